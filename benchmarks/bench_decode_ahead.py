"""Plain decoding with the host in the chain and with ranks that run ahead of it, beside each other.

    python -m benchmarks.bench_decode_ahead [--shapes llama-3-8b ...] [--ranks 1 2] [--out FOLDER]

Random int4 weights in a published shape, so nothing is downloaded. The same requests are served in
turn in both ways by ranks that start once ("host", "ahead"), at 1, 8 and 24 at once; then steps
follow one another with nothing between them ("steps"), which is as fast as rounds can be.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.plain_ranks import PROMPT, AskedTarget, measure_shapes, plain_ranks
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.next_steps import next_message
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.request_rows import RequestRows
from codesign.engine.gpu.step_rows import bucket_of, pack_step

BATCHES = (1, 8, 24)
TURNS, WARM_UP = 3, 10
STEPS = 60
MODES: dict[str, type[GroupTarget]] = {"host": AskedTarget, "ahead": GroupTarget}


def bare_milliseconds(leader: GroupLeader, batch: int) -> float:
    """Milliseconds of a step behind another one, with nothing of the host between them."""
    rows = [
        RequestRows(i, (1,), (PROMPT,), PROMPT, (PROMPT,), ((0,),), (-1,)) for i in range(batch)
    ]
    bucket = bucket_of(batch)
    leader.settle()
    leader.begin(pack_step(rows, bucket=bucket, scratch_slot=leader.scratch_slot))
    times = []
    for step in range(1, STEPS):
        leader.begin(next_message(bucket, dict.fromkeys(range(batch), PROMPT + step)))
        leader.take()
        times.append(perf_counter())
    leader.settle()
    return 1e3 * float(np.median(np.diff(times)[WARM_UP:]))


def measure(shape: str, ranks: int, model: Path) -> list[dict[str, Any]]:
    """Rows of the table of one shape on so many GPUs."""
    rows = []
    with plain_ranks(ranks, model, max(BATCHES)) as running:
        for batch in BATCHES:
            runs = {mode: [] for mode in MODES}
            for _ in range(TURNS):
                for mode, kept in runs.items():
                    seconds, outputs, share = running.served(batch, MODES[mode])
                    kept.append((1e3 * seconds[WARM_UP:], outputs, share))
            rows.append(
                {"shape": shape, "ranks": ranks, "batch": batch}
                | {"steps_ms": round(bare_milliseconds(running.leader, batch), 4)}
                | figures(runs)
            )
            print(rows[-1], flush=True)
    return rows


def figures(
    runs: dict[str, list[tuple[np.ndarray, dict[int, list[int]], float]]],
) -> dict[str, Any]:
    """What both ways of serving took, and whether tokens differ."""
    found: dict[str, Any] = {}
    for mode, kept in runs.items():
        rounds = np.concatenate([times for times, _, _ in kept])
        median, highest = np.percentile(rounds, (50, 99)).round(4).tolist()
        found[f"{mode}_ms"], found[f"{mode}_p99_ms"] = median, highest
        found[f"{mode}_mean_ms"] = round(float(rounds.mean()), 4)
    found["share_ahead"] = round(float(np.mean([share for *_, share in runs["ahead"]])), 3)
    first = runs["host"][0][1]
    found["runs_that_differ"] = sum(
        outputs != first for kept in runs.values() for _, outputs, _ in kept
    )
    return found


def main() -> None:
    """Measure, print and keep the rows."""
    measure_shapes("decode_ahead", __doc__, measure, f"{TURNS} runs of each in turn")


if __name__ == "__main__":
    main()
