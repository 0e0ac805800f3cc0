"""Rank groups as users start them: every split of two GPUs, torchrun, killed ranks, kernels.

    python -m benchmarks.bench_rank_groups [--out DIRECTORY] [--device cpu]

Nothing is downloaded: models are random, a draft is its target with noise, so acceptance means
nothing here. Each stage is a process with a time limit; past it, the stacks of its ranks go to the
log beside the results. Tokens are compared with plain decoding at the same padded rows.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from benchmarks.bench_gpu_engine import big_shape
from benchmarks.common import need_gpus, write_result
from benchmarks.rank_group_inputs import make_pair, make_plan, random_requests
from benchmarks.stage_process import run_stage, say_row
from codesign.config import Deployment
from codesign.engine import EngineRun
from codesign.engine.gpu import launch
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.ranks import Rank
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.step_rows import RequestRows, bucket_of, pack_step
from codesign.plan import Candidate
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.records import SPANS

MODELS = {"cuda": ("smollm2-135m", "llama-3.2-1b"), "cpu": ("tiny",)}
ROWS = 32  # padded rows of runs that are compared


def main() -> None:
    """Run the stages, write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=float, default=45.0, help="seconds of a stage")
    parser.add_argument("--only", nargs="+", help="these stages")
    parser.add_argument("--stage", help="be this stage; its rows go to standard output")
    parser.add_argument("--models", type=Path, help="keep the models in this folder")
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpus()
    if args.stage:
        faulthandler.register(signal.SIGUSR1)
        STAGES[args.stage](Stage(args.models, args.device))
        return
    rows, log = [], []
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or Path(folder)
        for stage in args.only or [s for s in STAGES if args.device == "cuda" or s != "shapes"]:
            command = ["-m", "benchmarks.bench_rank_groups", "--stage", stage]
            command += ["--models", str(models), "--device", args.device]
            found, said = run_stage(stage, command, models / f"{stage}.log", args.limit)
            rows += found
            log.append(f"== {stage}\n{said}")
            write(rows, log, args.out or Path(), args.device)


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


def one_gpu(stage: Stage) -> None:
    """Plain and serial speculation on one GPU, with and without fused attention."""
    for name in MODELS[stage.device]:
        for fused in (True, False):
            plain = stage.serve(name, "plain", fused=fused)
            stage.serve(name, "tree-8x4x2", fused=fused, against=plain)
            stage.serve(name, "plain", rows=8, count=3, tokens=520, fused=fused)
    warm = Sampling(temperature=0.7, seed=3)
    name = MODELS[stage.device][0]
    plain = stage.serve(name, "plain", sampling=warm, batch=4, count=16, tokens=64)
    stage.serve(
        name, "tree-4x2x2", sampling=warm, batch=4, count=16, tokens=64, against=plain, check=True
    )


def shapes(stage: Stage) -> None:
    """Steps of published shapes on one GPU, with and without fused attention."""
    for fused in (True, False):
        for name, is_draft in (("llama-3.2-1b", True), ("llama-3.1-8b", False)):
            say_row(fused=fused, **big_shape(name, is_draft=is_draft, fused=fused))


def two_target_ranks(stage: Stage) -> None:
    """A target on two ranks, its sums through shared memory; and against one rank."""
    name, *others = MODELS[stage.device]
    alone = stage.serve(name, "plain")
    plain = stage.serve(name, "plain", target_ranks=2, against=alone)
    stage.serve(name, "tree-8x4x2", target_ranks=2, against=plain)
    for other in (name, *others):
        stage.serve(other, "plain", target_ranks=2, rows=8, count=3, tokens=520)
    warm: dict[str, Any] = {"sampling": Sampling(temperature=0.7, seed=3), "target_ranks": 2}
    plain = stage.serve(name, "plain", batch=4, count=16, tokens=64, **warm)
    stage.serve(name, "tree-4x2x2", batch=4, count=16, tokens=64, against=plain, **warm)


def two_target_ranks_by_nccl(stage: Stage) -> None:
    """The same without the kernels made for these GPUs, to compare their times."""
    for name in MODELS[stage.device]:
        stage.serve(name, "plain", target_ranks=2, rows=8, count=3, tokens=520, fused=False)


def one_and_one(stage: Stage) -> None:
    """An asynchronous tree with a GPU each."""
    name = MODELS[stage.device][0]
    for sampling in (Sampling(), Sampling(temperature=0.7, seed=3)):
        plain = stage.serve(name, "plain", sampling=sampling, count=16)
        stage.serve(
            name, "async-tree-8x4x3", draft_ranks=1, sampling=sampling, count=16, against=plain
        )


def lose(stage: Stage, number: int, split: tuple[int, int]) -> None:
    """Kill or stop the rank that this process does not lead, after some rounds."""
    name = MODELS[stage.device][0]
    started: list[launch.LocalRanks] = []
    start_ranks = launch.LocalRanks.__init__

    def kept(self: launch.LocalRanks, setup: Any) -> None:
        started.append(self)
        start_ranks(self, setup)

    calls, at = 0, 0.0

    def progress(_: str, done: int, total: int) -> None:
        nonlocal calls, at
        calls += 1
        if calls == 40:
            at = monotonic()
            for pid in started[-1].pids.values():
                os.kill(pid, number)

    target, draft = stage.pair(name)
    requests = random_requests(target, 4, 200)
    policy = "async-tree-8x4x3" if split[1] else "plain"
    candidate = Candidate(Deployment(*split), parse_policy(policy), 1)
    setup = rank_setup(
        candidate, requests, target=target, draft=draft,
        max_kv_tokens=1 << 16, device=stage.device, dtype=stage.dtype, silence=4.0,
    )  # fmt: skip
    launch.LocalRanks.__init__ = kept
    try:
        run = run_on_ranks(setup, candidate, requests, max_kv_tokens=1 << 16, progress=progress)
    finally:
        launch.LocalRanks.__init__ = start_ranks
    say_row(
        run=f"{name}: {policy} on {candidate.deployment.label}, {signal.Signals(number).name}",
        seconds_to_the_end=round(monotonic() - at, 2),
        finished=sum(r.finish is not None for r in run.records.requests),
        tokens=sum(map(len, run.outputs.values())),
        notes=run.records.notes,
    )
    os._exit(0)  # as the command line does: a kernel may wait for the lost rank


def command_line(stage: Stage) -> None:
    """``codesign run`` by itself and under torchrun."""
    make_plan(stage.models, *stage.pair(MODELS[stage.device][0]))
    device = "cuda" if stage.device == "cuda" else "cpu-ranks"
    words = ["-m", "codesign", "run", "--plan", str(stage.models / "plan.json")]
    words += ["--device", device, "--padded-rows", str(ROWS), "--json", "--quiet"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ways = (
        ("codesign run", [], ("plain on 2", "tree-8x4x2 on 2")),
        ("torchrun -m codesign run", torchrun, ("plain on 1", "async-tree-8x4x3 on 1+1")),
    )
    for name, launcher, labels in ways:
        start = perf_counter()
        wanted = [word for label in labels for word in ("--candidate", f"{label}, batch 2")]
        out = ["--out", str(stage.models / f"runs-{len(launcher)}")]
        done = subprocess.run(
            [sys.executable, *launcher, *words, *wanted, *out],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(done.stderr, file=sys.stderr)
        found = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        say_row(
            run=name,
            exit_code=done.returncode,
            seconds=round(perf_counter() - start, 2),
            differing=found.get("differing_requests"),
            runs=[
                {
                    "label": r["label"],
                    "throughput": r["metrics"]["throughput"],
                    "tpot_mean_ms": 1e3 * r["metrics"]["tpot_mean"],
                    "acceptance_length": r["metrics"]["acceptance_length"],
                    "notes": r["notes"],
                }
                for r in found.get("runs", ())
            ],
        )


STAGES: dict[str, Callable[[Stage], None]] = {
    "two_target_ranks": two_target_ranks,
    "two_target_ranks_by_nccl": two_target_ranks_by_nccl,
    "one_and_one": one_and_one,
    "command_line": command_line,
    "killed_target": partial(lose, number=signal.SIGKILL, split=(2, 0)),
    "killed_draft": partial(lose, number=signal.SIGKILL, split=(1, 1)),
    "hung_target": partial(lose, number=signal.SIGSTOP, split=(2, 0)),
    "hung_draft": partial(lose, number=signal.SIGSTOP, split=(1, 1)),
    "one_gpu": one_gpu,
    "shapes": shapes,
}


def write(rows: Sequence[dict[str, Any]], log: Sequence[str], out: Path, device: str) -> None:
    """The rows so far, and the log."""
    out.mkdir(parents=True, exist_ok=True)
    if device == "cuda":
        note = "random models; a draft is its target with noise; spans in ms without prefill"
        write_result("rank_groups", rows, directory=out, note=note)
    else:
        (out / "rank_groups_cpu.json").write_text(json.dumps(list(rows), indent=1))
    (out / "rank_groups.log").write_text("\n".join(log))


if __name__ == "__main__":
    main()
