"""Ranks of random int4 weights that decode plainly, for benchmarks of how they are asked.

Nothing is downloaded. Part of bench_decode_ahead.py and bench_turns.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_serving import CONFIG, VOCABULARY
from benchmarks.common import need_gpus, write_result
from benchmarks.random_pair import inflate_source, write_source_pair
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup, rank_setup
from codesign.engine.gpu.ranks import TARGET_MODEL
from codesign.engine.gpu.run import load_leader, started
from codesign.engine.partner import NoDraft
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.engine.target import never, nothing
from codesign.policy.batching import BatchLimits
from codesign.policy.protocol import Candidates, RequestVerdict, VerifyRows
from codesign.policy.speculation import parse_policy
from codesign.policy.turns import Turns
from codesign.prompts import BoundRequest

PROMPT, ANSWER = 64, 128
Measure = Callable[[str, int, Path], list[dict[str, Any]]]  # (shape, ranks, model) -> rows


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


def made_up(count: int) -> list[BoundRequest]:
    """Requests that are all there at once."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, PROMPT), generator=generator).tolist()
    return [BoundRequest(i, 0.0, "", tuple(ids), ANSWER) for i, ids in enumerate(tokens)]


class PlainRanks:
    """Ranks that run, as their leader.

    Args:
        leader: Of the ranks.
        setup: Theirs.
    """

    def __init__(self, leader: GroupLeader, setup: RankSetup) -> None:
        self.leader, self._setup = leader, setup

    def served(
        self, batch: int, kind: type[GroupTarget] = GroupTarget, turns: Turns | None = None
    ) -> tuple[np.ndarray, dict[int, list[int]], float]:
        """Seconds of each round but the last, outputs, and the share of steps run ahead."""
        requests, setup = made_up(batch), self._setup
        worker = kind(self.leader, num_slots=setup.num_slots, sampling=setup.sampling, turns=turns)
        schedule = Schedule(requests, BatchLimits(batch, 1 << 20), Serving(), round_rows=1)
        server = Server(worker, NoDraft(), schedule, requests)
        starts = server.run().rounds.column("start")
        return np.diff(starts), server.outputs, worker.ahead.num_used / len(starts)


@contextmanager
def plain_ranks(ranks: int, model: Path, most: int) -> Iterator[PlainRanks]:
    """So many ranks with a model, for up to ``most`` requests at once."""
    candidate = Candidate(Deployment(ranks), parse_policy("plain"), most)
    setup = rank_setup(candidate, made_up(most), target=model, draft=None, max_kv_tokens=1 << 20)
    with started(setup) as (others, setup):
        this = load_leader(setup, others)
        followers = this.group_mailbox(draft=False, watch=others.of_target)
        leader = this.leader(TARGET_MODEL, followers, others.of_target)
        yield PlainRanks(leader, setup)
        leader.end()
        this.leave()


def measure_shapes(name: str, description: str | None, measure: Measure, note: str) -> None:
    """A benchmark's command line: measure shapes on ranks, print and keep the rows.

    Args:
        name: Of the result.
        description: For ``--help``.
        measure: Rows of a shape on so many ranks.
        note: What the result says of how it was measured.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
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
        note = f"prompts of {PROMPT} tokens, answers of {ANSWER}, {note}"
        print(write_result(name, rows, directory=args.out, note=note))
