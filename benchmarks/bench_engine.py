"""A plan's candidates on this host's GPUs, one after another: speed, spans, step times, floors.

    python -m benchmarks.bench_engine --plan plan.json [--out DIRECTORY] [--trace FILE]

Serves the plan's requests with each candidate that drafts, and before it with plain decoding on the
same ranks, compares their tokens, and writes a JSON file. inflated_plan.py writes such a plan.
--trace writes the steps of both sides as a Chrome trace, in which the overlap is seen.
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

from benchmarks.common import READ_BANDWIDTH, need_gpus, write_result
from benchmarks.step_log import CONTEXTS, StepLog, lead_draft, serve_both
from codesign.candidate import Candidate
from codesign.engine import EngineRun
from codesign.engine.gpu.launch import keep_waiting
from codesign.engine.gpu.rank_engine import DTYPES
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.ranks import Rank
from codesign.engine.replay import Replay, draft_of
from codesign.metrics import tpot
from codesign.models import resolve_model
from codesign.plan import Plan
from codesign.records import SPANS

TRACE_SECONDS = 0.25  # of each run, from its middle, that --trace shows


class Bench:
    """Runs a plan's candidates.

    Args:
        path: The plan's file.
        device: "cuda", or "cpu".
        padded_rows: Fewest rows of a target's forward.
    """

    def __init__(self, path: Path, device: str, padded_rows: int) -> None:
        self.plan = Plan.load(path)
        self._replay = Replay(self.plan, path)
        self._device, self._padded_rows = device, padded_rows
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
            steps = [step for step in found["steps"] if 0 <= step[0] - middle < TRACE_SECONDS]
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


def main() -> None:
    """Run a plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--padded-rows", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="engine")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpus()
    bench, rows = Bench(args.plan, args.device, args.padded_rows), []
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


if __name__ == "__main__":
    main()
