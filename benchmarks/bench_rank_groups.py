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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.bench_gpu_engine import big_shape
from benchmarks.common import need_gpus, write_result
from benchmarks.rank_groups.inputs import make_plan
from benchmarks.rank_groups.lost_ranks import lose
from benchmarks.rank_groups.serving import MODELS, ROWS, Stage
from benchmarks.rank_groups.stage_process import run_stage, say_row
from codesign.policy.walk import Sampling

LIMIT = 45.0  # seconds of a stage


def main() -> None:
    """Run the stages, write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
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
            found, said = run_stage(stage, command, models / f"{stage}.log", LIMIT)
            rows += found
            log.append(f"== {stage}\n{said}")
            write(rows, log, args.out or Path(), args.device)


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
