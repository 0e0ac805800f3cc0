"""Serves on the ranks that a profile holds: as a run does, and made-up requests whose rounds count.

A run would start ranks of its own. What single steps take: ``rank_bench``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from codesign.candidate import Candidate
from codesign.config import Deployment, Scheduling, Serving
from codesign.engine.draft_worker import DraftWorker
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.partner import LocalDraft, NoDraft, Partner
from codesign.engine.run import EngineRun, PolicySetup
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.engine.target import never, nothing
from codesign.models.shape import model_shape
from codesign.policy.batching import BatchLimits
from codesign.policy.labels import parse_policy
from codesign.policy.protocol import Candidates, RequestVerdict, VerifyRows
from codesign.profiler.bench import SPARE_ROWS
from codesign.profiler.draft_steps import made_up_tokens
from codesign.profiler.kept_trees import Kept, NotingWorker, with_kept
from codesign.profiler.rank_draft import Link, drafter_of
from codesign.profiler.steps import StepShape
from codesign.prompts import BoundRequest

_PROMPT, _LOOP_ROUNDS, _WARM_UP = 16, 28, 6  # of requests that are served here
_PACE_ROUNDS = 14
_SERVED_TOKENS = 40  # of each, by a policy
_JOINED, _AT_ONCE, _FEWEST_JOINED = 20, 4, 3  # requests that join others, and tokens of theirs


class _TimedTarget(GroupTarget):
    """A target that keeps the seconds of its steps."""

    def __init__(self, leader: GroupLeader, **settings: Any) -> None:
        super().__init__(leader, **settings)
        self.verify_seconds: list[float] = []

    def verify(
        self,
        candidates: Candidates | None,
        meanwhile: Callable[[], None] = nothing,
        goes_on: Callable[[], bool] = never,
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """See ``GroupTarget.verify``; no step is run ahead, as it is the host that is timed."""
        start = perf_counter()
        found = super().verify(candidates, meanwhile)
        self.verify_seconds.append(perf_counter() - start)
        return found


_Target = TypeVar("_Target", bound=GroupTarget)


class RankServing:
    """Serves on the ranks of one deployment.

    Args:
        setup: Of the ranks.
        target: Leads those of the target.
        draft: Leads those of a draft on the same ranks; None without one.
        link: To the leader of a draft on ranks of its own; None without one.
    """

    def __init__(
        self,
        setup: RankSetup,
        target: GroupLeader,
        draft: GroupLeader | None,
        link: Link | None,
    ) -> None:
        self.setup = setup
        self.target = target
        self.draft = draft
        self._link = link
        self._notes = False  # what re-roots keep, in rounds that are served
        self._noting: Callable[[], Kept] | None = None

    def rest(self) -> None:
        """Let a draft on ranks of its own rest."""
        if self._link is not None:
            self._link.let_rest()

    def serve(
        self,
        candidate: Candidate,
        requests: Sequence[BoundRequest],
        policy: PolicySetup,
        *,
        max_kv_tokens: int,
        scheduling: Scheduling = "fcfs",
    ) -> EngineRun:
        """Serve requests on these ranks as a run does, which would start ranks of its own.

        Args:
            candidate: Of this deployment; its batch and rows must fit the setup's.
            requests: No longer than the setup's slabs.
            policy: The candidate's.
            max_kv_tokens: KV rows of all running requests at their longest.
            scheduling: Who joins the batch next; by the policy's targets, if these are served.
        """
        self.rest()
        limits = BatchLimits(candidate.max_batch, max_kv_tokens)
        serving = Serving(scheduling=scheduling, answer_tokens=policy.answer_tokens)
        schedule = Schedule(
            requests,
            limits,
            serving,
            round_rows=policy.spec.kv_rows,
            on_time=policy.on_time(serving),
        )
        server = Server(self._worker(GroupTarget), self._partner(policy), schedule, requests)
        return EngineRun(server.run(), server.outputs)

    def pace(self) -> float:
        """Host seconds of a plain round of one request now, from a few of them."""
        return median(self.loop_seconds(1, _PACE_ROUNDS))

    def loop_seconds(self, num_requests: int, num_rounds: int = _LOOP_ROUNDS) -> list[float]:
        """Host seconds of a plain round of so many requests beside the target's step."""
        self.rest()
        asked = self._made_up(num_requests, num_rounds + 2)
        schedule = Schedule(asked, BatchLimits(num_requests, 1 << 20), Serving(), round_rows=1)
        worker = self._worker(_TimedTarget)
        starts = Server(worker, NoDraft(), schedule, asked).run().rounds.column("start")
        beside = np.diff(starts) - worker.verify_seconds[: len(starts) - 1]
        return beside[_WARM_UP:].tolist()

    def served_rounds(
        self,
        policy: str,
        num_requests: int,
        num_tokens: int = _SERVED_TOKENS,
        turns: int = 1,
        *,
        context: int | None = None,
    ) -> pd.DataFrame:
        """Rounds of made-up requests without prompts, after some to warm up.

        Args:
            policy: Its label.
            num_requests: That are served at once.
            num_tokens: That each of them asks for.
            turns: Requests one after another in each of these places.
            context: Mean of their prompts, which are then mixed as those of timed steps are, as far
                as slabs hold them; None: short ones.
        """
        self._notes = policy != "plain"
        try:
            asked = self._made_up(num_requests * turns, num_tokens, context)
            rounds = self._rounds(policy, num_requests, asked)
        finally:
            self._notes = False
        if self._noting is not None:
            rounds = with_kept(rounds, self._noting())
            self._noting = None
        return rounds.loc[rounds["prefill_tokens"] == 0].iloc[_WARM_UP:]

    def joined_rounds(self, policy: str) -> pd.DataFrame:
        """Rounds of made-up requests that join and leave one by one, after some to warm up."""
        asked = [
            replace(request, max_new_tokens=_FEWEST_JOINED * (2 + number % _AT_ONCE))
            for number, request in enumerate(self._made_up(_JOINED, 1))
        ]
        return self._rounds(policy, _AT_ONCE, asked).iloc[_WARM_UP:]

    def _rounds(self, policy: str, batch: int, asked: Sequence[BoundRequest]) -> pd.DataFrame:
        spec, setup = parse_policy(policy), self.setup
        deployment = Deployment(setup.target_ranks, setup.draft_ranks)
        candidate = Candidate(deployment, spec, batch)
        run = self.serve(candidate, asked, PolicySetup(spec), max_kv_tokens=1 << 20)
        return run.records.round_table()

    def _made_up(
        self, num_requests: int, num_tokens: int, context: int | None = None
    ) -> list[BoundRequest]:
        vocab = model_shape(self.setup.target).vocab
        lengths = (_PROMPT,) * num_requests
        if context is not None:
            most = (self.setup.target_tokens - SPARE_ROWS) // 2
            lengths = StepShape("target", num_requests, 1, min(context, most)).contexts
        prompts = [made_up_tokens(i, length, vocab) for i, length in enumerate(lengths)]
        return [BoundRequest(i, 0.0, "", tokens, num_tokens) for i, tokens in enumerate(prompts)]

    def _worker(self, kind: type[_Target]) -> _Target:
        setup = self.setup
        return kind(self.target, num_slots=setup.num_slots, sampling=setup.sampling)

    def _partner(self, policy: PolicySetup) -> Partner:
        if policy.spec.kind == "plain":
            return NoDraft()
        if self._link is not None:
            self._noting = self._link.kept if self._notes else None
            return self._link.partner(self.setup, policy, notes=self._notes)
        kind = NotingWorker if self._notes else DraftWorker
        worker = kind(policy.build(), drafter_of(self.setup, self.draft))
        if isinstance(worker, NotingWorker):
            self._noting = lambda: worker.kept
        return LocalDraft(worker)
