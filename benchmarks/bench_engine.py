"""A plan's candidates on this host's GPUs, one after another: speed, spans, step times, floors.

    python -m benchmarks.bench_engine --inflate llama-3-70b+llama-3.2-1b --plan plan.json
    python -m benchmarks.bench_engine --plan plan.json [--out DIRECTORY] [--trace FILE]

The first form inflates a small model and a draft and writes a plan of serial and asynchronous trees
for them, by hand. The second serves the plan's requests with each candidate that drafts, and before
it with plain decoding on the same ranks, compares their tokens, and writes a JSON file. --trace
writes the steps of both sides as a Chrome trace, in which the overlap is seen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.common import READ_BANDWIDTH, need_gpus, write_result
from benchmarks.step_log import CONTEXTS, StepLog, lead_draft, serve_both
from codesign.artifacts import header, write_table
from codesign.candidate import ScoredCandidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.engine import EngineRun
from codesign.engine.gpu.launch import keep_waiting
from codesign.engine.gpu.rank_engine import DTYPES
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.ranks import Rank
from codesign.engine.replay import Replay, draft_of
from codesign.file_ref import FileRef
from codesign.fit import Fit
from codesign.fit.shipped import FITS
from codesign.metrics import tpot
from codesign.models import models_dir, resolve_model
from codesign.models.recipe import Degradation, Recipe, create_inflated, weights_sha256
from codesign.plan import Candidate, Plan
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import load_prompts
from codesign.records import SPANS


class Bench:
    """Runs a plan's candidates.

    Args:
        path: The plan's file.
        device: "cuda", or "cpu".
        padded_rows: Fewest rows of a target's forward.
        trace_seconds: Of each run, from its middle, that the trace shows.
    """

    def __init__(
        self, path: Path, device: str, padded_rows: int, trace_seconds: float = 0.25
    ) -> None:
        self.plan = Plan.load(path)
        self._replay = Replay(self.plan, path)
        self._device, self._padded_rows = device, padded_rows
        self._trace_seconds = trace_seconds
        self.events: list[dict[str, Any]] = []

    def run(
        self, candidate: Candidate, log: Path, following: Candidate | None = None
    ) -> list[dict[str, Any]]:
        """Serve the plan's requests without and then with a candidate's draft on the same ranks.

        Args:
            candidate: Which.
            log: For the draft's steps.
            following: The one to come, whose processes load while these ranks start.
        """
        policy, max_kv_tokens = self._replay.policy(candidate)
        setup = rank_setup(
            candidate, self._replay.requests, target=resolve_model(self.plan.target),
            draft=draft_of(self.plan), policy=policy, sampling=self.plan.sampling,
            max_kv_tokens=max_kv_tokens, device=self._device, dtype=DTYPES[self._device],
            smallest_bucket=self._padded_rows,
        )  # fmt: skip
        # Room to time a step behind 1000 rows, whatever the requests.
        room = CONTEXTS[-1] + self._padded_rows
        setup = replace(
            setup,
            target_tokens=max(setup.target_tokens, room),
            draft_tokens=max(setup.draft_tokens, room),
            lead_draft=partial(lead_draft, log=log),
        )
        watched: list[StepLog] = []
        logs: dict[str, dict[str, Any]] = {}

        def watch(rank: Rank) -> None:
            watched.extend(map(StepLog, rank.leaders, ("target", "draft")))

        def look(rank: Rank) -> None:
            for step_log, model in zip(watched, rank.models, strict=True):
                logs[step_log.name] = step_log.summary(rank, model)

        start = perf_counter()
        load_ahead(following)
        plain, run = serve_both(
            setup, candidate, self._replay.requests, max_kv_tokens=max_kv_tokens, between=watch,
            after=look,
        )  # fmt: skip
        if log.exists():
            logs["draft"] = json.loads(log.read_text())
        self._add_events(candidate.label, logs)
        ranks = candidate.deployment.target_workers
        differing = sum(tokens != plain.outputs[i] for i, tokens in run.outputs.items())
        return [
            {"candidate": f"plain on {ranks}, on the ranks of the next", **summary(plain)},
            {
                "candidate": candidate.label,
                "start_and_both_runs_seconds": round(perf_counter() - start, 2),
                **summary(run),
                **{f"{name}_step": found["step"] for name, found in logs.items()},
                "requests_that_differ_from_plain": differing,
                "notes": run.records.notes,
            },
        ]

    def _add_events(self, label: str, logs: dict[str, dict[str, Any]]) -> None:
        """Steps of both sides in the middle of the run, as events of a Chrome trace."""
        every = [start for found in logs.values() for start, _, _ in found["steps"]]
        if not every:
            return
        middle = (min(every) + max(every)) / 2
        pid = 1 + sum(event["name"] == "process_name" for event in self.events)
        self.events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": label}})
        for tid, (name, found) in enumerate(sorted(logs.items(), reverse=True), 1):
            self.events.append(
                {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            )
            steps = [step for step in found["steps"] if 0 <= step[0] - middle < self._trace_seconds]
            self.events += [
                {
                    "ph": "X", "pid": pid, "tid": tid, "name": f"{name}, {rows} rows",
                    "ts": round(1e6 * (start - middle), 1), "dur": round(1e6 * (end - start), 1),
                }
                for start, end, rows in steps
            ]  # fmt: skip


def summary(run: EngineRun) -> dict[str, Any]:
    """Speed of decoding, tokens a round, spans in milliseconds of rounds without prefill."""
    rounds = run.records.rounds
    quiet = rounds.column("prefill") == 0
    spans = {name: 1e3 * rounds.column(name)[quiet] for name in SPANS}
    emitted, batch = rounds.column("num_emitted_tokens")[quiet], rounds.column("batch")[quiet]
    total = np.sum(list(spans.values()), axis=0)
    beside = spans["link_there"] + spans["link_back"] + spans["reroot"]
    return {
        "requests": len(run.outputs),
        "tokens": sum(map(len, run.outputs.values())),
        "tokens_per_second": round(float(1e3 * emitted.sum() / total.sum()), 1),
        **by_prompts(run),
        "tokens_a_round": round(float(emitted.sum() / batch.sum()), 3),
        "round_ms": round(float(np.median(total)), 4),
        "messages_and_reroot_ms": round(float(np.median(beside)), 4),
        "span_ms_median": {name: round(float(np.median(v)), 4) for name, v in spans.items()},
        "span_ms_mean": {name: round(float(v.mean()), 4) for name, v in spans.items()},
    }


def load_ahead(candidate: Candidate | None) -> None:
    """Keep as many processes loading as a candidate's run will start."""
    keep_waiting(candidate.deployment.num_workers - 1 if candidate is not None else 0)


def by_prompts(run: EngineRun) -> dict[str, Any]:
    """Decoding speed of a request, mean by kind of prompt, and the mean of these."""
    speeds: dict[str, list[float]] = {}
    for request in run.records.requests:
        if seconds := tpot(request):
            speeds.setdefault(request.category, []).append(1.0 / seconds)
    means = {kind: round(float(np.mean(each)), 1) for kind, each in sorted(speeds.items())}
    mean = round(float(np.mean(list(means.values()))), 1) if means else 0.0
    return {"tokens_per_second_by_prompts": means, "mean_over_prompt_sets": mean}


def inflate(
    pair: str, sources: Sequence[str], degradation: Degradation, *, int4_head: bool
) -> tuple[str, str]:
    """Names of an inflated target and draft of small models, made if they are not there.

    Args:
        pair: Shapes, "TARGET+DRAFT".
        sources: The small target and the small draft.
        degradation: Of the draft.
        int4_head: Of the draft.
    """
    names = []
    for shape, role, source in zip(pair.split("+"), ("target", "draft"), sources, strict=True):
        loss = degradation if role == "draft" else Degradation()
        parts = ["bench", shape, role, Path(source).name]
        if loss != Degradation():
            parts += [f"{loss.noise:g}", *map(str, loss.drop_layers), f"h{loss.drop_kv_heads}"]
        int4 = int4_head and role == "draft"
        parts += ["int4-head"] * int4
        names.append("-".join(parts))
        if not (models_dir() / names[-1]).exists():
            recipe = Recipe(
                shape, role, source, weights_sha256(source), degradation=loss, int4_head=int4
            )
            create_inflated(recipe, name=names[-1])
    return names[0], names[1]


def write_plan(
    path: Path, target: str, draft: str, candidates: Sequence[Candidate], *, requests: int,
    tokens: int, sampling: Sampling,
) -> None:  # fmt: skip
    """A plan of these candidates over shipped prompts, all there at once; no machine was fitted.

    Every kind of prompt comes as often as the others, where there are requests enough.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fit = replace(Fit.load(FITS / "smollm2-135m-cpu" / "fit.json"), target=target, draft=draft)
    fit_path, trace_path = path.with_suffix(".fit.json"), path.with_suffix(".trace.parquet")
    fit.save(fit_path)
    kinds = sorted({prompt.category for prompt in load_prompts("run")})
    trace = pd.DataFrame(
        {
            "arrival": 0.0,
            "prompt_tokens": [40 + 17 * i % 160 for i in range(requests)],
            "output_tokens": tokens,
            "category": [kinds[i % len(kinds)] for i in range(requests)],
        }
    )
    write_table(trace_path, trace, header("trace", seed=0))
    scored = [ScoredCandidate(c, {}, {}, "fitted", is_feasible=True) for c in candidates]
    Plan(
        target=target, draft=draft, slo=SLO(), objective="latency", sampling=sampling,
        serving=Serving(max_kv_tokens=1 << 14), trace=FileRef.of(trace_path),
        num_requests=requests, fit=FileRef.of(fit_path), seed=0, num_seeds=1,
        chosen=scored[0], alternatives=tuple(scored[1:]),
    ).save(path)  # fmt: skip


def main() -> None:
    """Write a plan, or run one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--inflate", metavar="TARGET+DRAFT", help="write the plan for this pair")
    parser.add_argument("--noise", type=float, default=0.0, help="on the inflated draft's weights")
    parser.add_argument("--drop-layers", nargs="*", type=int, default=(), help="of the draft")
    parser.add_argument("--sources", nargs=2, default=["smollm2-135m", "smollm2-135m-draft"],
                        metavar=("TARGET", "DRAFT"), help="small models")  # fmt: skip
    parser.add_argument("--drop-kv-heads", type=int, default=0, help="of the draft")
    parser.add_argument("--int4-head", action="store_true", help="of the draft")
    parser.add_argument("--policies", nargs="+", default=["tree-8x4x2@1"],
                        help="LABEL@DEPLOYMENT each")  # fmt: skip
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--padded-rows", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="engine")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--trace-seconds", type=float, default=0.25)
    args = parser.parse_args()
    if args.inflate:
        layers, heads = tuple(args.drop_layers), args.drop_kv_heads
        loss = Degradation(noise=args.noise, drop_layers=layers, drop_kv_heads=heads)
        target, draft = inflate(args.inflate, args.sources, loss, int4_head=args.int4_head)
        candidates = [_candidate(words, args.batch) for words in args.policies]
        sampling = Sampling(temperature=args.temperature, seed=3)
        write_plan(args.plan, target, draft, candidates, requests=args.requests,
                   tokens=args.tokens, sampling=sampling)  # fmt: skip
        return
    if args.device == "cuda":
        need_gpus()
    bench, rows = Bench(args.plan, args.device, args.padded_rows, args.trace_seconds), []
    every = [scored.candidate for scored in bench.plan.scored]
    todo = [candidate for candidate in every if candidate.speculation.kind != "plain"]
    if args.device == "cuda":
        need_gpus(max((candidate.deployment.num_workers for candidate in todo), default=1))
    load_ahead(todo[0] if todo else None)
    with tempfile.TemporaryDirectory() as folder:
        for index, (candidate, following) in enumerate(zip_longest(todo, todo[1:])):
            for row in bench.run(candidate, Path(folder) / f"{index}.json", following):
                rows.append({"target": bench.plan.target, "draft": bench.plan.draft, **row})
                print(json.dumps(rows[-1]), flush=True)
            _write(args, rows, bench.events)


def _write(
    args: argparse.Namespace, rows: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> None:
    """What there is so far: time on a rented machine may end at any point."""
    if args.trace:
        args.trace.write_text(json.dumps({"traceEvents": list(events)}))
    if args.device == "cuda":
        note = "decode speed: rounds without prefill; floors of 8 rows behind 500 at "
        note += f"{READ_BANDWIDTH / 1e12:.1f} TB/s"
        write_result(args.name, rows, directory=args.out, note=note)


def _candidate(words: str, batch: int) -> Candidate:
    policy, _, deployment = words.rpartition("@")
    return Candidate(parse_deployment(deployment), parse_policy(policy), batch)


if __name__ == "__main__":
    main()
