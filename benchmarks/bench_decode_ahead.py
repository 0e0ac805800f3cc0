"""Plain decoding with the host in the chain and with ranks that run ahead of it, beside each other.

    python -m benchmarks.bench_decode_ahead [--shapes llama-3-8b ...] [--ranks 1 2] [--out FOLDER]

Random int4 weights in a published shape, so nothing is downloaded. The same requests are served in
turn in both ways by ranks that start once ("host", "ahead"), at 1, 8 and 24 at once; then steps
follow one another with nothing between them ("steps"), which is as fast as rounds can be.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.bench_serving import CONFIG, VOCABULARY
from benchmarks.common import need_gpus, write_result
from benchmarks.random_pair import inflate_source, write_source_pair
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.next_steps import next_message
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup, rank_setup
from codesign.engine.gpu.ranks import TARGET_MODEL
from codesign.engine.gpu.request_rows import RequestRows
from codesign.engine.gpu.run import load_leader, started
from codesign.engine.gpu.step_rows import bucket_of, pack_step
from codesign.engine.partner import NoDraft
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.engine.target import never, nothing
from codesign.policy.batching import BatchLimits
from codesign.policy.protocol import Candidates, RequestVerdict, VerifyRows
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest

BATCHES = (1, 8, 24)
PROMPT, ANSWER = 64, 128
TURNS, WARM_UP = 3, 10
STEPS = 60


class AskedTarget(GroupTarget):
    """A target whose host asks for every step."""

    def verify(
        self,
        candidates: Candidates | None,
        meanwhile: Callable[[], None] = nothing,
        goes_on: Callable[[], bool] = never,
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """See ``GroupTarget.verify``."""
        return super().verify(candidates, meanwhile)


MODES: dict[str, type[GroupTarget]] = {"host": AskedTarget, "ahead": GroupTarget}


def made_up(count: int) -> list[BoundRequest]:
    """Requests that are all there at once."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, PROMPT), generator=generator).tolist()
    return [BoundRequest(i, 0.0, "", tuple(ids), ANSWER) for i, ids in enumerate(tokens)]


def served(
    leader: GroupLeader, setup: RankSetup, mode: str, batch: int
) -> tuple[np.ndarray, dict[int, list[int]], float]:
    """Milliseconds of each round, the outputs, and the share of steps that were run ahead."""
    requests = made_up(batch)
    worker = MODES[mode](leader, num_slots=setup.num_slots, sampling=setup.sampling)
    schedule = Schedule(requests, BatchLimits(batch, 1 << 20), Serving(), round_rows=1)
    server = Server(worker, NoDraft(), schedule, requests)
    starts = server.run().rounds.column("start")
    rounds = 1e3 * np.diff(starts)[WARM_UP:]
    return rounds, server.outputs, worker.ahead.num_used / len(starts)


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
    requests = made_up(max(BATCHES))
    candidate = Candidate(Deployment(ranks), parse_policy("plain"), max(BATCHES))
    setup = rank_setup(candidate, requests, target=model, draft=None, max_kv_tokens=1 << 20)
    rows = []
    with started(setup) as (others, setup):
        this = load_leader(setup, others)
        followers = this.group_mailbox(draft=False, watch=others.of_target)
        leader = this.leader(TARGET_MODEL, followers, others.of_target)
        for batch in BATCHES:
            runs = {mode: [] for mode in MODES}
            for _ in range(TURNS):
                for mode, kept in runs.items():
                    kept.append(served(leader, setup, mode, batch))
            rows.append(
                {"shape": shape, "ranks": ranks, "batch": batch}
                | {"steps_ms": round(bare_milliseconds(leader, batch), 4)}
                | figures(runs)
            )
            print(rows[-1], flush=True)
        leader.end()
        this.leave()
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["llama-3-8b", "llama-3-70b"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus(max(args.ranks))
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_source_pair(Path(folder), CONFIG)
            for shape in args.shapes:
                model = inflate_source(Path(folder), shape, prefix="bench")
                for ranks in args.ranks:
                    rows += measure(shape, ranks, model)
    finally:
        note = f"prompts of {PROMPT} tokens, answers of {ANSWER}, {TURNS} runs of each in turn"
        print(write_result("decode_ahead", rows, directory=args.out, note=note))


if __name__ == "__main__":
    main()
