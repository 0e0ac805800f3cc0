"""Serving random prompts on rank groups of this host, one row of results for each run."""

from __future__ import annotations

import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.rank_groups.inputs import make_pair, random_requests
from benchmarks.rank_groups.stage_process import say_row
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine import EngineRun
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.ranks import Rank
from codesign.engine.gpu.request_rows import RequestRows
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.step_rows import bucket_of, pack_step
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.records import SPANS

MODELS = {"cuda": ("smollm2-135m", "llama-3.2-1b"), "cpu": ("tiny",)}
ROWS = 32  # padded rows of runs that are compared


class Stage:
    """Serves on ranks of this host and prints a row for each run."""

    def __init__(self, models: Path, device: str) -> None:
        self.models, self.device = models, device
        self.dtype = "bfloat16" if device == "cuda" else "float32"

    def pair(self, name: str) -> tuple[Path, Path]:
        """Folders of a target and its draft, which the first stage that asks makes."""
        target, draft = self.models / name, self.models / f"{name}-draft"
        if not (draft / "model.safetensors").exists():
            make_pair(target, draft, self.device)
        return target, draft

    def serve(
        self, model: str, policy: str, *, target_ranks: int = 1, draft_ranks: int = 0,
        batch: int = 1, rows: int = ROWS, count: int = 8, tokens: int = 128,
        sampling: Sampling | None = None, against: EngineRun | None = None, **options: Any,
    ) -> EngineRun:  # fmt: skip
        """Serve random prompts; print speed and how many requests differ from another run."""
        target, draft = self.pair(model)
        requests = random_requests(target, count, tokens)
        candidate = Candidate(Deployment(target_ranks, draft_ranks), parse_policy(policy), batch)
        inspect = options.pop("inspect", None)
        setup = rank_setup(
            candidate, requests, target=target, draft=draft,
            sampling=sampling or Sampling(), max_kv_tokens=1 << 16, smallest_bucket=rows,
            device=self.device, dtype=self.dtype, silence=20.0, **options,
        )  # fmt: skip
        steps: dict[str, float] = {}

        def look(rank: Rank) -> None:
            if inspect is not None:
                inspect(rank)
            elif rows == 8:
                steps["us"] = step_microseconds(rank)

        start = perf_counter()
        run = run_on_ranks(setup, candidate, requests, max_kv_tokens=1 << 16, inspect=look)
        rounds = run.records.rounds
        quiet = rounds.column("prefill") == 0
        seconds = float(sum(rounds.column(s)[quiet].sum() for s in SPANS))
        say_row(
            run=f"{model}: {policy} on {candidate.deployment.label}, batch {batch}, {rows} rows",
            temperature=setup.sampling.temperature,
            fused=setup.fused,
            start_and_run_seconds=round(perf_counter() - start, 2),
            decode_tokens_per_second=round(
                float(rounds.column("num_emitted_tokens")[quiet].sum()) / max(seconds, 1e-9), 1
            ),
            span_ms_median={
                s: round(1e3 * statistics.median(rounds.column(s)[quiet].tolist() or [0.0]), 4)
                for s in SPANS
            },
            accepted=round(
                float(rounds.column("num_emitted_tokens").sum() / rounds.column("batch").sum()), 3
            ),
            target_step_us_at_8_rows_context_500=steps.get("us"),
            differing=None if against is None else differing(run, against),
            notes=run.records.notes,
        )
        return run


def differing(run: EngineRun, other: EngineRun) -> str:
    """How many requests differ, and where the first difference lies."""
    pairs = [(run.outputs[i], other.outputs[i]) for i in run.outputs]
    places = [
        next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairs
        if a != b
    ]
    return f"{len(places)} of {len(pairs)}" + (f", first at {min(places)}" if places else "")


def step_microseconds(rank: Rank) -> float:
    """Median time of a target step of 8 rows behind 500, on all of its ranks."""
    leader = rank.leaders[0]
    slab = rank.models[0].slabs.max_tokens
    context = min(500, slab - 8)
    request = RequestRows(
        slot=0, tokens=(1,) * 8, positions=(context, *(context + 1,) * 7), context=context,
        prefixes=(context,) * 8, paths=((0,), *((0, i) for i in range(1, 8))),
        parents=(-1, *(0,) * 7),
    )  # fmt: skip
    message = pack_step([request], bucket=bucket_of(8), scratch_slot=leader.scratch_slot)
    times = []
    for _ in range(220):
        at = perf_counter()
        leader.ask(message)
        times.append(perf_counter() - at)
    return round(1e6 * statistics.median(times[20:]), 1)
