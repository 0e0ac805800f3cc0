"""Every policy on the same running ranks: measured, and what the simulator says of the same.

    python -m benchmarks.policy_ranks serve FOLDER --fit FIT --seconds 140    # two GPUs
    python -m benchmarks.policy_ranks join FOLDER                             # no GPU; for report

The first seconds of each trace, prompts made shorter and answers cut, at a rate that loads plain
decoding by ``LOAD`` as the fit says, or as in ``--segments mooncake,mooncake@1.2``; at most
``--batch`` requests at once, whole prompts between rounds.
Ranks are started once per way to split the GPUs and serve every policy on it; plain decoding comes
first and again later, which tells how far two equal runs are apart. What there is no time for is
left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import TYPE_CHECKING

from benchmarks.error_line import errors_in_one_line
from benchmarks.policies.ranks import join
from benchmarks.policies.run_figures import figures_of
from benchmarks.policies.segments import (
    BATCH,
    KV_TOKENS,
    SEED,
    read_segment,
    segment,
    target_of,
)
from codesign.artifacts import beside, header, read_table, write_json, write_table
from codesign.candidate import Candidate
from codesign.config import SCHEDULINGS, SLO, parse_deployment
from codesign.errors import InputError
from codesign.fit import ACCEPTANCE_FILE, Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.policy.speculation import check_runs_in_engine, parse_policy
from codesign.run_directory import write_run

if TYPE_CHECKING:
    from codesign.engine.run import EngineRun
    from codesign.profiler.rank_bench import RankBench
    from codesign.prompts import BoundRequest

RESULTS = Path(__file__).parent / "results" / "policies.json"
SERIAL = (
    "plain", "batch-tree-16x2x8", "specserve-8", "chain-3", "chain-1", "plain again", "chain-5",
    "tree-8x4x4", "specserve-8-no-slo",
)  # fmt: skip
SPLIT = ("async-batch-tree-16x2x8", "async-tree-8x4x6")
ROOM = 3.0  # seconds, for what is written at the end


def candidates_of(
    labels: Sequence[str], deployment: str, batch: int = BATCH
) -> dict[str, Candidate]:
    """The candidate of each label; words after the policy ("plain again") tell runs apart.

    Raises:
        InputError: If a policy is unknown, or does not run in the engine on this deployment.
    """
    found: dict[str, Candidate] = {}
    for label in labels:
        spec = parse_policy(label.split(maxsplit=1)[0])
        check_runs_in_engine(spec)
        found[label] = Candidate(parse_deployment(deployment), spec, batch)
    return found


def serve(args: argparse.Namespace) -> None:
    """Measure; needs the GPUs."""
    whole, split = str(args.gpus), f"{args.gpus - 1}+1"
    names = args.segments.split(",")
    for name in names:
        read_segment(name)
    serial, apart = (list(filter(str.strip, part.split(","))) for part in (args.serial, args.split))
    ways = {
        way: candidates_of(labels, way, args.batch)
        for way, labels in ((whole, serial), (split, apart))
    }
    if args.device == "cuda":
        from benchmarks.common import need_gpus

        need_gpus(args.gpus)
    end = monotonic() + args.seconds - ROOM
    fit = Fit.load(args.fit)
    needed = [
        whole,
        *([split] if ways[split] else []),
    ]  # the load is that of all
    if lacking := [way for way in needed if way not in fit.costs]:
        raise InputError(f"{args.fit} has no step times of {lacking[0]} GPUs")
    args.folder.mkdir(parents=True, exist_ok=True)
    for file in (args.fit, beside(args.fit, ACCEPTANCE_FILE)):
        shutil.copy(file, args.folder)
    slo = target_of(fit.costs[whole])
    for name in names:
        requests = segment(name, args.traces, fit.costs[whole], args.length, args.batch)
        write_table(args.folder / f"{name}.parquet", requests, header("trace", seed=SEED))
    # Of the split's policies the first surely runs, others if there is time.
    first = end - (args.start + len(names) * 1.4 * args.length if apart else 0.0)
    about = {"slo": asdict(slo), "segments": names, "fit": args.fit.name, "batch": args.batch}
    about["scheduling"] = args.scheduling
    about["ships"] = args.fit.resolve().is_relative_to(DEFAULT_FIT.parents[1])
    write_json(args.folder / "about.json", {**header("policies", seed=SEED), **about})
    for (deployment, candidates), until in zip(ways.items(), (first, end), strict=True):
        if not candidates:
            continue
        served = _serve_on(args, fit, deployment, candidates, slo, until)
        print(f"{deployment}: {served} runs, {end - monotonic():.0f} s left", flush=True)


def _serve_on(
    args: argparse.Namespace,
    fit: Fit,
    deployment: str,
    candidates: Mapping[str, Candidate],
    slo: SLO,
    until: float,
) -> int:
    """Every policy of a way to split, on one start of its ranks; how many runs there was time."""
    from codesign.engine.run import PolicySetup
    from codesign.profiler.grids import MAX_REQUESTS
    from codesign.profiler.rank_parts import RankMeasurer
    from codesign.profiler.store import ProfileSettings

    settings = ProfileSettings(
        target=fit.target,
        draft=fit.draft,
        workers=0,
        is_quick=True,
        device=args.device,
        deployments=(deployment,),
    )
    served, longest = 0, args.length
    requests = {name: _bound(args.folder, name, fit.target) for name in args.segments.split(",")}
    start, num_slots = monotonic(), max(args.batch, MAX_REQUESTS) + 1  # a bench fills so many
    with RankMeasurer(settings).bench(parse_deployment(deployment), num_slots) as bench:
        print(f"{deployment}: started in {monotonic() - start:.1f} s", flush=True)
        _warm_up(
            bench, fit, deployment, [r for asked in requests.values() for r in asked], args.batch
        )
        for policy, candidate in candidates.items():
            setup = PolicySetup(
                candidate.speculation,
                fit.costs[deployment],
                fit.calibration,
                slo.tpot,
                fit.acceptance.hit_rate(1),
                slo_ttft=slo.ttft,
            )
            for name, asked in requests.items():
                if monotonic() + longest > until:
                    print(f"  {policy} on {name}: no time left", flush=True)
                    continue
                start = monotonic()
                run = bench.serve(
                    candidate,
                    asked,
                    replace(setup, answer_tokens=mean(r.max_new_tokens for r in asked)),
                    max_kv_tokens=candidate.max_batch * KV_TOKENS,
                    scheduling=args.scheduling,
                )
                longest = max(longest, monotonic() - start)
                _write(args.folder, name, policy, candidate, run, slo)
                served += 1
        return served


def _warm_up(
    bench: RankBench, fit: Fit, deployment: str, requests: list[BoundRequest], batch: int
) -> None:
    """Let both models meet every length of prompt: what a first one costs is nobody's policy."""
    from codesign.engine.run import PolicySetup

    start = monotonic()
    lengths = {len(r.prompt_ids): r for r in requests}.values()
    short = [
        replace(r, request_id=number, arrival=0.0, max_new_tokens=3)
        for number, r in enumerate(lengths)
    ]
    spec = parse_policy("async-tree-4x2x2" if "+" in deployment else "tree-4x2x2")
    candidate = Candidate(parse_deployment(deployment), spec, batch)
    setup = PolicySetup(spec, fit.costs[deployment], fit.calibration)
    bench.serve(candidate, short, setup, max_kv_tokens=candidate.max_batch * KV_TOKENS)
    print(f"  {len(short)} lengths of prompt met in {monotonic() - start:.1f} s", flush=True)


def _bound(folder: Path, name: str, target: str) -> list[BoundRequest]:
    """A segment's requests with token ids."""
    from codesign.models import resolve_model
    from codesign.models.tokenizer import Tokenizer
    from codesign.prompts import bind_prompts, encode_user_turn, load_prompts

    encode = encode_user_turn(Tokenizer(resolve_model(target)))
    requests = read_table(folder / f"{name}.parquet", kind="trace")[0]
    return bind_prompts(requests, load_prompts("run"), encode, seed=SEED)


def _write(
    folder: Path,
    name: str,
    policy: str,
    candidate: Candidate,
    run: EngineRun,
    slo: SLO,
) -> None:
    records = run.records
    figures = figures_of(records, slo)
    write_run(
        folder / "runs" / name / policy.replace(" ", "_"),
        records,
        origin="measured",
        summary={"label": policy, "candidate": candidate.to_dict(), "metrics": figures},
        seed=SEED,
        outputs=run.outputs,
    )
    print(
        f"  {policy} on {name}: latency {1e3 * figures['latency_mean']:.0f} ms, TPOT "
        f"{1e3 * figures['tpot_mean']:.2f} ms, in SLO {figures['slo_attainment']:.0%}, "
        f"{len(records.requests)} requests in {records.seconds:.1f} s",
        flush=True,
    )


def main() -> None:
    """Serve or join."""
    parser = argparse.ArgumentParser(description="Policies on running ranks.")
    parser.add_argument("part", choices=["serve", "join"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", type=Path, help="step times of these GPUs")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu-ranks"])
    parser.add_argument("--segments", default="mooncake,code")
    parser.add_argument("--serial", default=",".join(SERIAL), help="policies, with commas")
    parser.add_argument("--split", default=",".join(SPLIT), help="the same of 1 GPU beside others")
    parser.add_argument("--batch", type=int, default=BATCH, help="most requests at once")
    parser.add_argument("--scheduling", choices=SCHEDULINGS, default="fcfs", help="who joins next")
    parser.add_argument("--length", type=float, default=4.0, help="seconds of each segment")
    parser.add_argument("--start", type=float, default=30.0, help="a guess: until ranks serve")
    parser.add_argument("--seconds", type=float, default=140.0, help="of all")
    parser.add_argument("--traces", type=Path, help="folder of published traces (the cache)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--key", default="ranks", help="of the results: ranks, ranks-8b, ..")
    args = parser.parse_args()
    with errors_in_one_line():
        {"serve": serve, "join": join}[args.part](args)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a kernel that waits for a lost rank would keep this process
