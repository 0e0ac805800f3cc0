"""What leaving slow cores gains on this host; no GPU is used, but results are kept where one is.

    python -m benchmarks.bench_cores [--ranks 2] [--seconds 2.5] [--turns 2] [--out FOLDER]

One process for each rank of a run works through a table of numbers as a round's host does, then
waits for 2 ms as for a GPU, and so on; one after another, runs that stay where the system puts
them and runs that leave cores that are slow or taken (``engine/gpu/quick_core.py``). A core counts
as slow where its empty loop takes more than 1.3 times the least of all, and as lost where two polls
of a wait are more than 1 ms apart.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.common import write_result
from codesign.artifacts.machine import num_cores
from codesign.engine.gpu.quick_core import LOST, SLOW, QuickCore

TABLE = list(range(50_000))
STEPS = 1000  # numbers read in a piece of work: 70 us on a quick core
WAIT = 2e-3  # seconds
MODES = {"stays": False, "leaves": True}


class Counting(QuickCore):
    """Counts how often it leaves."""

    hops = 0

    def _leave(self) -> None:
        self.hops += 1
        super()._leave()


def work() -> int:
    """Read numbers here and there, as a round's Python does."""
    total = 0
    for step in range(STEPS):
        total += TABLE[(step * 7919) % len(TABLE)]
    return total


def run_rank(rank: int, ranks: int, leaves: bool, seconds: float, queue: Any) -> None:
    """Work and wait; hand over (N, 3) seconds: of a piece of work, a loop behind it, and lost."""
    core = Counting(rank, ranks)
    rows: list[tuple[float, float, float]] = []
    end = perf_counter() + seconds
    while (start := perf_counter()) < end:
        work()
        done = perf_counter()
        pace, lost = core._pace(), 0.0
        now = perf_counter()
        while now < done + WAIT:
            before, now = now, perf_counter()
            lost += (now - before) * (now - before > LOST)
            if leaves:
                core.was_away(now, now - before)
                core.look(now)
        rows.append((done - start, pace, lost))
    queue.put((np.array(rows), core.hops))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a table, one for each mode."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    found: dict[str, list[tuple[np.ndarray, int]]] = {mode: [] for mode in MODES}
    for _ in range(args.turns):
        for mode, leaves in MODES.items():
            words = [(rank, args.ranks, leaves, args.seconds, queue) for rank in range(args.ranks)]
            processes = [context.Process(target=run_rank, args=each) for each in words]
            for process in processes:
                process.start()
            found[mode] += [queue.get() for _ in processes]
            for process in processes:
                process.join()
    least = min(np.percentile(times[:, 1], 2) for runs in found.values() for times, _ in runs)
    return [row(mode, runs, float(least), args.seconds) for mode, runs in found.items()]


def row(
    mode: str, runs: list[tuple[np.ndarray, int]], least: float, seconds: float
) -> dict[str, Any]:
    """Figures of a mode."""
    times = np.concatenate([times for times, _ in runs])
    low, median, high, highest = (1e6 * np.percentile(times[:, 0], (10, 50, 90, 99))).round(1)
    return {
        "mode": mode,
        "work_us": round(1e6 * float(times[:, 0].mean()), 1),
        "p10": float(low),
        "median": float(median),
        "p90": float(high),
        "p99": float(highest),
        "slow": round(float((times[:, 1] > SLOW * least).mean()), 3),
        "lost": round(float(times[:, 2].sum()) / (len(runs) * seconds), 4),
        "hops_a_second": round(sum(hops for _, hops in runs) / (len(runs) * seconds), 1),
    }


def main() -> None:
    """Measure this host."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.5, help="of a run (2.5)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each mode (2)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cores = num_cores()
    if cores < 3 * args.ranks:
        parser.error(f"with {cores} cores {args.ranks} ranks never move. Try fewer: --ranks N")
    rows = measure(args)
    for each in rows:
        print(each)
    if torch.cuda.is_available():
        note = f"{args.ranks} processes on {cores} cores, {STEPS} numbers a piece of work, "
        note += f"waits of {WAIT * 1e3} ms"
        print(write_result("cores", rows, directory=args.out, note=note))


if __name__ == "__main__":
    main()
