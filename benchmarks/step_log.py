"""Runs on rank groups for measurements: two on the same ranks, and what each step of them took.

A module of its own: the draft's leader, in another process, finds ``lead_draft`` here.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.bench_forward import one_request
from benchmarks.common import READ_BANDWIDTH
from codesign.candidate import Candidate
from codesign.config import Serving
from codesign.engine import EngineRun
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.link import serve_verdicts
from codesign.engine.gpu.mailbox import Mailbox
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.ranks import DRAFT_MODEL, TARGET_MODEL, Rank, draft_worker
from codesign.engine.gpu.run import load_leader, partner_of, started
from codesign.engine.gpu.step_rows import BUCKET, Words, bucket_of, pack_step
from codesign.engine.partner import NoDraft
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.policy.batching import BatchLimits
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest

HAND_OFF, HOP = 0.26e-6, 0.63e-6  # seconds: block to block on a GPU, across NVLink; measured
CONTEXTS = (500, 1000)
STEPS = 60


class StepLog:
    """Times of the steps that a leader asks for.

    Args:
        leader: Whose steps are timed from now on.
        name: Of its model.
    """

    def __init__(self, leader: GroupLeader, name: str) -> None:
        self.leader, self.name = leader, name
        self.steps: list[tuple[float, float, int]] = []
        self._begun: deque[tuple[float, int]] = deque()
        self._begin, self._take = leader.begin, leader.take
        leader.begin = self._timed_begin  # type: ignore[method-assign]
        leader.take = self._timed_take  # type: ignore[method-assign]

    def _timed_begin(self, message: Words) -> int:
        start = perf_counter()
        count = self._begin(message)
        self._begun.extend([(start, int(message[BUCKET]))] * count)
        return count

    def _timed_take(self) -> Words:
        """A step that ran ahead begins where the host had the answer of the one before."""
        answer, now = self._take(), perf_counter()
        start, rows = self._begun.popleft()
        if self.steps:
            start = max(start, self.steps[-1][1])
        self.steps.append((start, now, rows))
        return answer

    def summary(self, rank: Rank, model: int) -> dict[str, Any]:
        """Steps of a run, then step times and floors of 8 rows."""
        steps = list(self.steps)
        return {"steps": steps, "step": step_times(self.leader) | floors(rank, model)}


def step_times(leader: GroupLeader, rows: int = 8) -> dict[str, float]:
    """Milliseconds of a step as the host sees it, median, by context."""
    times = {}
    for context in CONTEXTS:
        if context + rows > leader.rank.slabs.max_tokens:
            continue
        message = pack_step(
            [one_request(rows, context)], bucket=bucket_of(rows), scratch_slot=leader.scratch_slot
        )
        seconds = []
        for _ in range(STEPS):
            start = perf_counter()
            leader.ask(message)
            seconds.append(perf_counter() - start)
        times[f"ms_at_context_{context}"] = round(1e3 * statistics.median(seconds[10:]), 4)
    return times


def floors(rank: Rank, model: int) -> dict[str, float]:
    """Milliseconds that a step of 8 rows behind 500 takes at least: its bytes, its chain."""
    forward = rank.models[model].forward
    shape, ranks = forward.shape, forward.group.size
    read = rank.weight_bytes[model] - forward.embedding_VD.nbytes
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * forward.embedding_VD.itemsize
    chain = shape.layers * (5 * HAND_OFF + (2 * HOP if ranks > 1 else 0.0))
    return {
        "gigabytes": round(read / 1e9, 3),
        "bandwidth_floor_ms": round(1e3 * (read + 500 * row) / READ_BANDWIDTH, 4),
        "chain_floor_ms": round(1e3 * chain, 4),
    }


def lead_draft(
    rank: Rank, leader: GroupLeader | None, verdicts: Mailbox, candidates: Mailbox, *, log: Path
) -> None:
    """Be the draft's leader as in a run, and leave its steps in a file."""
    assert leader is not None, "n-grams have no steps"
    steps = StepLog(leader, "draft")
    serve_verdicts(draft_worker(rank.setup, leader), verdicts, candidates, rank.setup.limits)
    log.write_text(json.dumps({"steps": steps.steps, "step": {}}))  # the target does not wait long
    whole = log.with_suffix(".whole")
    whole.write_text(json.dumps(steps.summary(rank, DRAFT_MODEL)))
    whole.replace(log)


def serve_both(
    setup: RankSetup,
    candidate: Candidate,
    requests: Sequence[BoundRequest],
    *,
    max_kv_tokens: int,
    between: Callable[[Rank], None] | None = None,
    after: Callable[[Rank], None] | None = None,
) -> tuple[EngineRun, EngineRun]:
    """Serve requests without and then with a candidate's draft, on ranks that start once.

    Args:
        setup: From ``rank_setup``, for the candidate.
        candidate: Its policy and batch limit.
        requests: With token ids.
        max_kv_tokens: KV rows of all running requests at their longest.
        between: Called with this rank, the target's leader, between the two.
        after: Called with this rank at the end.
    """
    with started(setup) as (ranks, setup):
        this = load_leader(setup, ranks)
        followers = this.group_mailbox(draft=False, watch=ranks.of_target)
        leader = this.leader(TARGET_MODEL, followers, ranks.of_target)
        drafts = partner_of(this, ranks, followers)
        runs = []
        for partner, spec in ((NoDraft(), parse_policy("plain")), (drafts, candidate.speculation)):
            worker = GroupTarget(
                leader, num_slots=setup.num_slots, sampling=setup.sampling,
                smallest_bucket=setup.smallest_bucket,
            )  # fmt: skip
            limits = BatchLimits(candidate.max_batch, max_kv_tokens)
            schedule = Schedule(requests, limits, Serving(), round_rows=spec.kv_rows)
            if runs and between is not None:
                between(this)
            server = Server(worker, partner, schedule, requests)
            runs.append(EngineRun(server.run(), server.outputs))
        if after is not None:
            after(this)
        leader.end()
        this.leave()
    return runs[0], runs[1]
