"""Every policy on the same running ranks: measured, and what the simulator says of the same.

    python -m benchmarks.policy_ranks serve FOLDER --fit FIT --seconds 140    # two GPUs
    python -m benchmarks.policy_ranks join FOLDER                             # no GPU; for report

The first seconds of each trace, prompts made shorter and answers cut, at a rate that loads plain
decoding by ``LOAD`` as the fit says, or as in ``--segments mooncake,mooncake@1.2``; at most eight
requests at once, whole prompts between rounds.
Ranks are started once per way to split the GPUs and serve every policy on it; plain decoding comes
first and again later, which tells how far two equal runs are apart. What there is no time for is
left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks.policies.cases import PAPER_TPOT, SEGMENTS, figures_of
from codesign.artifacts import header, read_table, write_json, write_table
from codesign.artifacts.machine import machine_name
from codesign.config import SLO, Serving, parse_deployment
from codesign.errors import CodesignError, InputError
from codesign.fit import Fit
from codesign.fit.devices import load_device
from codesign.fit.priced_model import parse_model
from codesign.fit.roofline import Forward
from codesign.plan import Candidate
from codesign.policy.cost import RoundCost
from codesign.policy.speculation import check_runs_in_engine, parse_policy
from codesign.records import RunRecords
from codesign.run_directory import read_run, write_run
from codesign.sim import simulate

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
BATCH, MAX_KV_TOKENS, SEED, NUM_SEEDS = 8, 8 * 2048, 1, 5
PROMPT, PROMPTS, MAX_OUTPUT, LOAD = 192, (48, 512), 96, 0.7
BURST = 400.0  # seconds into the trace "code", before the burst
ROOM = 3.0  # seconds, for what is written at the end


def segment(name: str, folder: Path | None, cost: RoundCost, seconds: float) -> pd.DataFrame:
    """So many seconds of a trace, at a rate that loads plain decoding.

    Args:
        name: Of the trace, or NAME@LOAD, a share of what plain decoding bears.
        folder: Of the published traces; None: where ``codesign trace fetch`` puts them.
        cost: Step times of the machine.
        seconds: Of arrivals.
    """
    name, load = read_segment(name)
    requests = SEGMENTS[name].load(folder, seed=SEED).drop(columns="hash_ids", errors="ignore")
    requests = requests.loc[requests["arrival"] >= (BURST if name == "code" else 0.0)]
    prompts = requests["prompt_tokens"] * (PROMPT / requests["prompt_tokens"].median())
    requests = requests.assign(
        prompt_tokens=prompts.round().astype(int).clip(*PROMPTS),
        output_tokens=requests["output_tokens"].clip(2, MAX_OUTPUT),
    )
    prompt, output = (float(np.mean(requests[f"{kind}_tokens"])) for kind in ("prompt", "output"))
    step = cost.target(BATCH, BATCH * (prompt + output / 2), BATCH)
    rate = load / (cost.prefill(prompt) + output * step / BATCH)
    head = requests.iloc[: max(round(rate * seconds), 4)].reset_index(drop=True)
    arrival = head["arrival"] - head["arrival"].iloc[0]
    return head.assign(arrival=arrival * seconds / arrival.iloc[-1])


def read_segment(name: str) -> tuple[str, float]:
    """The trace and the load that a segment's name says.

    Raises:
        InputError: If there is no such trace, or the load is not a number above 0.
    """
    trace, _, load = name.partition("@")
    number = re.fullmatch(r"\d+\.?\d*|\.\d+", load or str(LOAD))
    if trace not in SEGMENTS or number is None or not float(number[0]):
        known = ", ".join(SEGMENTS)
        raise InputError(f"unknown segment {name!r}; write one of {known}, or as in conv@1.2")
    return trace, float(number[0])


def candidates_of(labels: Sequence[str], deployment: str) -> dict[str, Candidate]:
    """The candidate of each label; words after the policy ("plain again") tell runs apart.

    Raises:
        InputError: If a policy is unknown, or does not run in the engine on this deployment.
    """
    found: dict[str, Candidate] = {}
    for label in labels:
        spec = parse_policy(label.split(maxsplit=1)[0])
        check_runs_in_engine(spec)
        found[label] = Candidate(parse_deployment(deployment), spec, BATCH)
    return found


def target_of(cost: RoundCost) -> SLO:
    """The paper's 30 ms a token, scaled by a plain step; and a prompt that waits for four more."""
    paper = Forward(parse_model("llama-3.1-70b"), load_device("a800"), 8).decode(1, 1000)
    step = cost.target(1, 1000, 1)
    return SLO(ttft=5.0 * cost.prefill(PROMPT), tpot=PAPER_TPOT * step / paper)


def serve(args: argparse.Namespace) -> None:
    """Measure; needs the GPUs."""
    whole, split = str(args.gpus), f"{args.gpus - 1}+1"
    names = args.segments.split(",")
    for name in names:
        read_segment(name)
    serial, apart = (list(filter(str.strip, part.split(","))) for part in (args.serial, args.split))
    ways = {way: candidates_of(labels, way) for way, labels in ((whole, serial), (split, apart))}
    if args.device == "cuda":
        from benchmarks.common import need_gpus

        need_gpus(args.gpus)
    end = monotonic() + args.seconds - ROOM
    fit = Fit.load(args.fit)
    if lacking := [way for way, candidates in ways.items() if candidates and way not in fit.costs]:
        raise InputError(f"{args.fit} has no step times of {lacking[0]} GPUs")
    args.folder.mkdir(parents=True, exist_ok=True)
    for file in (args.fit, args.fit.with_name(f"{args.fit.stem}.acceptance.parquet")):
        shutil.copy(file, args.folder)
    slo = target_of(fit.costs[whole])
    for name in names:
        requests = segment(name, args.traces, fit.costs[whole], args.length)
        write_table(args.folder / f"{name}.parquet", requests, header("trace", seed=SEED))
    # Of the split's policies the first surely runs, others if there is time.
    first = end - (args.start + len(names) * 1.4 * args.length if apart else 0.0)
    about = {"slo": asdict(slo), "segments": names, "fit": args.fit.name}
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
    start = monotonic()
    with RankMeasurer(settings).bench(parse_deployment(deployment)) as bench:
        print(f"{deployment}: started in {monotonic() - start:.1f} s", flush=True)
        _warm_up(bench, fit, deployment, [r for asked in requests.values() for r in asked])
        for policy, candidate in candidates.items():
            setup = PolicySetup(
                candidate.speculation, fit.costs[deployment], fit.calibration, slo.tpot
            )
            for name, asked in requests.items():
                if monotonic() + longest > until:
                    print(f"  {policy} on {name}: no time left", flush=True)
                    continue
                start = monotonic()
                run = bench.serve(candidate, asked, setup, max_kv_tokens=MAX_KV_TOKENS)
                longest = max(longest, monotonic() - start)
                _write(args.folder, name, policy, candidate, run, slo)
                served += 1
        return served


def _warm_up(bench: RankBench, fit: Fit, deployment: str, requests: list[BoundRequest]) -> None:
    """Let both models meet every length of prompt: what a first one costs is nobody's policy."""
    from codesign.engine.run import PolicySetup

    start = monotonic()
    lengths = {len(r.prompt_ids): r for r in requests}.values()
    short = [
        replace(r, request_id=number, arrival=0.0, max_new_tokens=3)
        for number, r in enumerate(lengths)
    ]
    spec = parse_policy("async-tree-4x2x2" if "+" in deployment else "tree-4x2x2")
    candidate = Candidate(parse_deployment(deployment), spec, BATCH)
    setup = PolicySetup(spec, fit.costs[deployment], fit.calibration)
    bench.serve(candidate, short, setup, max_kv_tokens=MAX_KV_TOKENS)
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


def join(args: argparse.Namespace) -> None:
    """Simulate what each run served, and put both into the results."""
    about = json.loads((args.folder / "about.json").read_text())
    fit, slo = Fit.load(args.folder / about["fit"]), SLO(**about["slo"])
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results = {k: value for k, value in results.items() if not k.startswith(f"{args.key}/")}
    machine = json.loads((args.folder / about["fit"]).read_text())["hardware"]
    results[f"{args.key}/about"] = {
        **about["slo"], "target": fit.target, "draft": fit.draft, "load": LOAD, "batch": BATCH,
        "machine": machine_name(machine),
        "created": about["created"],
    }  # fmt: skip
    for name in about["segments"]:
        found = dict(_joined(args.folder, name, fit, slo))
        results |= {f"{args.key}/{name}/{way}": figures for way, figures in found.items()}
        print(f"{name}:\n" + "\n".join(_lines(found)))
    args.out.write_text(json.dumps(results, indent=1, default=float) + "\n", encoding="utf-8")


def _joined(folder: Path, name: str, fit: Fit, slo: SLO) -> Iterator[tuple[str, dict[str, Any]]]:
    """(policy and split, measured figures with the simulated ones beside them)."""
    planned = read_table(folder / f"{name}.parquet", kind="trace")[0]
    outputs = read_run(folder / "runs" / name / "plain").outputs  # if they have been kept
    for path in sorted((folder / "runs" / name).glob("*/run.json")):
        run = read_run(path.parent)
        candidate = Candidate.from_dict(run.summary["candidate"])
        lengths = np.array([r.prompt_tokens for r in run.records.requests], np.int64)
        requests = planned.assign(prompt_tokens=lengths)
        figures = dict(run.summary["metrics"])
        cost = fit.costs[candidate.deployment.label]
        figures |= _against_fit(run.records, cost, is_split=candidate.deployment.draft_workers > 0)
        slower = replace(
            cost,
            prefill=cost.prefill.scaled(figures["prompts"]),
            draft_prefill=cost.draft_prefill.scaled(figures["prompts"]),
        )
        known = replace(fit, costs={candidate.deployment.label: slower})
        figures["simulated"] = _simulated(requests, candidate, fit, slo)
        figures["prompts_known"] = _simulated(requests, candidate, known, slo)
        if outputs is not None and run.outputs is not None:
            figures["same_outputs"] = sum(run.outputs[n] == o for n, o in outputs.items())
        yield f"{run.summary['label']} on {candidate.deployment.label}", figures


def _simulated(
    requests: pd.DataFrame, candidate: Candidate, fit: Fit, slo: SLO
) -> dict[str, float]:
    """Mean figures over the seeds."""
    serving = Serving(max_kv_tokens=MAX_KV_TOKENS)
    runs = [
        figures_of(simulate(requests, candidate, fit, serving=serving, slo=slo, seed=seed), slo)
        for seed in range(NUM_SEEDS)
    ]
    return {
        key: float(np.mean([run[key] for run in runs]))
        for key, value in runs[0].items()
        if isinstance(value, float) and all(run[key] is not None for run in runs)
    }


def _against_fit(run: RunRecords, cost: RoundCost, *, is_split: bool) -> dict[str, float]:
    """Prompts and target steps over the fit's, and seconds of a round's drafting beyond its steps.

    The last only where target and draft take turns: else most of it is hidden.
    """
    rounds = run.rounds
    names = ("rows", "context", "batch", "num_expansions", "draft_rows", "target", "draft")
    table = pd.DataFrame({name: rounds.column(name) for name in names})
    quiet = table.loc[rounds.column("prefill_tokens") == 0]
    steps = cost.target.of_arrays(quiet["rows"], quiet["context"], quiet["batch"])
    found = {
        "prompts": float(rounds.column("prefill").sum())
        / sum(cost.prefill(request.prompt_tokens) for request in run.requests),
        "target_steps": float(np.sum(quiet["target"])) / float(steps.sum()),
    }
    drafting = quiet.loc[quiet["num_expansions"] > 0]
    if len(drafting) and not is_split:
        rows = drafting["draft_rows"] / drafting["num_expansions"]
        step = cost.draft.of_arrays(rows, drafting["context"], drafting["batch"])
        beyond = drafting["draft"] - drafting["num_expansions"] * step
        found["beyond_draft_steps"] = float(np.mean(beyond))  # what deciding takes is in it
    return found


def statements(found: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, bool]]:
    """What was asked, the measured figure, and whether it holds."""
    base = found[next(way for way in found if way.startswith("plain on"))]["latency_mean"]
    speed = {way: base / f["latency_mean"] for way, f in found.items()}
    in_slo = {way: f["slo_attainment"] for way, f in found.items()}

    def best(values: dict[str, float], *kinds: str) -> float:
        return max((v for way, v in values.items() if way.startswith(kinds)), default=np.nan)

    trees, plain = best(speed, "batch-tree", "async-batch"), ("plain",)
    fixed = best(speed, "chain")
    paper = best(speed, "specserve-8 on")
    rivals = best(in_slo, "chain", "specserve", "tree", "async-tree", *plain)
    points = best(in_slo, "batch-tree", "async-batch") - rivals
    return {
        "batch trees / SpecServe, at least 0.98": (trees / paper, trees >= 0.98 * paper),
        "batch trees / plain, at least 0.98": (trees, trees >= 0.98),
        "SpecServe / best fixed length, at least 1": (paper / fixed, paper >= fixed),
        "SLO attainment of batch trees minus the best other's, at least 0": (points, points >= 0.0),
    }


def rank_correlation(found: Mapping[str, Mapping[str, Any]], kind: str = "simulated") -> float:
    """Of measured and simulated mean latencies, over the policies.

    Args:
        found: Figures by policy and split.
        kind: "simulated", or "prompts_known": after prompts took what they did in each run.
    """
    ways = [way for way in found if not way.startswith("plain again")]
    measured = [found[way]["latency_mean"] for way in ways]
    simulated = [found[way][kind]["latency_mean"] for way in ways]
    ranks = np.argsort(np.argsort([measured, simulated], axis=1), axis=1)
    return float(np.corrcoef(*ranks)[0, 1])


def _lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    base = found[next(way for way in found if way.startswith("plain on"))]
    for way, f in sorted(found.items(), key=lambda pair: pair[1]["latency_mean"]):
        s, known = f["simulated"], f["prompts_known"]
        yield (
            f"  {way:32s} x{base['latency_mean'] / f['latency_mean']:.2f} "
            f"({base['simulated']['latency_mean'] / s['latency_mean']:.2f})  TPOT "
            f"{1e3 * f['tpot_mean']:.2f} ({1e3 * s['tpot_mean']:.2f}) ms  TTFT p50 "
            f"{1e3 * f['ttft_p50']:.0f} ({1e3 * s['ttft_p50']:.0f}) ms  in SLO "
            f"{f['slo_attainment']:.0%} ({s['slo_attainment']:.0%})  tokens a round "
            f"{f['acceptance_length']:.2f} ({s['acceptance_length']:.2f})  outputs "
            f"{f.get('same_outputs', '-')} of {f['num_requests']} as plain's; prompts x"
            f"{f['prompts']:.2f}, target x{f['target_steps']:.2f} of the fit, beyond draft steps "
            f"{1e3 * f.get('beyond_draft_steps', 0.0):.2f} ms; latency {f['latency_mean']:.3f} "
            f"({s['latency_mean']:.3f}, with these prompts {known['latency_mean']:.3f})"
        )
    yield f"  rank correlation of latencies, measured and simulated: {rank_correlation(found):.2f}"
    yield f"  the same with each run's own prompts: {rank_correlation(found, 'prompts_known'):.2f}"
    for asked, (value, holds) in statements(found).items():
        yield f"  {asked}: {value:.3f}, {'holds' if holds else 'DOES NOT HOLD'}"


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
    parser.add_argument("--length", type=float, default=4.0, help="seconds of each segment")
    parser.add_argument("--start", type=float, default=30.0, help="a guess: until ranks serve")
    parser.add_argument("--seconds", type=float, default=140.0, help="of all")
    parser.add_argument("--traces", type=Path, help="folder of published traces (the cache)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--key", default="ranks", help="of the results: ranks, ranks-8b, ..")
    args = parser.parse_args()
    try:
        {"serve": serve, "join": join}[args.part](args)
    except CodesignError as error:
        print(f"policy_ranks.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a kernel that waits for a lost rank would keep this process
