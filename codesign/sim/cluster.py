"""The engine with a clock instead of models: SimPy processes that run the round protocol.

The target's workers are one process and, when the draft model has workers of its own, these are
another. They run the objects of codesign.policy, exchange Verdict and Candidates over links, and
let the fitted seconds of each phase pass: a few events per round, never one per token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from codesign.policy.batching import Batcher
from codesign.policy.cost import RoundCost
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestVerdict,
    TargetSide,
    Verdict,
    VerifyRows,
)
from codesign.records import RoundLog, RoundRecord
from codesign.sim.acceptance import PROMPT_TOKEN, TRUE_TOKEN
from codesign.sim.drafting import DraftWorkers, Forwards, SimulatedRequest

Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class DraftAnswer:
    """Candidates, with the seconds that went into them.

    Attributes:
        candidates: The message itself.
        sent: When the draft side sent it.
        late: Seconds from the verdict's departure to the end of overlapped forwards.
        link_there: Seconds from then, or from its departure, to the verdict's arrival.
        drafting: Forwards between verdict and candidates.
        grown: Overlapped forwards before the verdict, which went into the trees as well.
        overlapped: Seconds of the forwards that begin when the candidates are sent.
    """

    candidates: Candidates
    sent: float
    late: float
    link_there: float
    drafting: Forwards
    grown: Forwards
    overlapped: float


@dataclass(slots=True)
class Wait:
    """What the target waited for before it could verify: spans of a round, in seconds."""

    link_there: float = 0.0
    reroot: float = 0.0
    draft: float = 0.0
    link_back: float = 0.0


class Link:
    """One direction between the two processes: what is sent arrives after a delay."""

    def __init__(self, env: simpy.Environment, delay: float) -> None:
        self._env = env
        self._delay = delay
        self._store = simpy.Store(env)

    def send(self, message: Any) -> None:
        """Put a message on its way."""
        arrival = self._env.timeout(self._delay, (message, self._env.now))
        assert arrival.callbacks is not None
        arrival.callbacks.append(self._deliver)

    def _deliver(self, arrival: simpy.Event) -> None:
        self._store.put(arrival.value)

    def receive(self) -> simpy.Event:
        """Event of the next message: (message, time at which it was sent)."""
        return self._store.get()


class Cluster:
    """One deployment that serves a trace.

    Args:
        requests: By number.
        batcher: Decides who joins.
        cost: Seconds of each step.
        draft: The draft's workers; None for plain decoding.
        is_apart: The draft model has a process of its own.
        on_finish: Called with the time when a request is over.
    """

    def __init__(
        self,
        requests: Mapping[int, SimulatedRequest],
        batcher: Batcher,
        cost: RoundCost,
        draft: DraftWorkers | None,
        *,
        is_apart: bool,
        on_finish: Callable[[], None] | None = None,
    ) -> None:
        self.rounds = RoundLog()
        self._env = simpy.Environment(initial_time=0.0)
        self._requests = requests
        self._batcher = batcher
        self._cost = cost
        self._draft = draft
        self._is_apart = is_apart and draft is not None
        self._on_finish = on_finish
        self._target = TargetSide()
        self._news: list[RequestVerdict] = []  # emitted, not yet told to the draft side
        self._num_verdicts = 0
        self._to_draft = Link(self._env, cost.link)
        self._to_target = Link(self._env, cost.link)

    def run(self) -> float:
        """Serve every request; return the seconds that it took."""
        if self._is_apart and self._draft is not None:
            self._env.process(self._draft_process(self._draft))
        self._env.run(self._env.process(self._target_process()))
        return float(self._env.now)

    def _target_process(self) -> Process:
        serve = self._round_apart if self._is_apart else self._round_together
        while not self._batcher.is_done:
            admitted = self._batcher.admit(self._env.now)
            if self._batcher.num_running:
                yield from serve([self._admission(request_id) for request_id in admitted])
            else:
                assert self._batcher.next_arrival is not None
                yield self._env.timeout(self._batcher.next_arrival - self._env.now)
        if self._is_apart:
            self._to_draft.send(self._verdict((), is_last=True))

    def _draft_process(self, draft: DraftWorkers) -> Process:
        grown = Forwards()
        while True:
            idle_from = self._env.now
            verdict, departed = yield self._to_draft.receive()
            if verdict.is_last:
                return
            late = max(idle_from - departed, 0.0)
            link_there = self._env.now - departed - late
            draft.receive(verdict)
            drafting = draft.draft()
            yield self._env.timeout(self._cost.reroot + drafting.seconds)
            candidates = draft.candidates(verdict.round)
            before, grown = grown, draft.grow()
            now = self._env.now
            self._to_target.send(
                DraftAnswer(candidates, now, late, link_there, drafting, before, grown.seconds)
            )
            # The number of overlapped forwards is fixed, so a verdict waits until they are done.
            if grown.count:
                yield self._env.timeout(grown.seconds)

    def _round_together(self, admitted: Sequence[Admission]) -> Process:
        """Draft and target take turns; the draft side hears of a prompt with its first token."""
        start = self._env.now
        if admitted:
            yield from self._prefill(admitted)
        prefill = self._env.now - start
        verdict = self._verdict(admitted)
        if self._draft is None:
            yield from self._verify(start, prefill, admitted, None, Wait())
            return
        self._draft.receive(verdict)
        if not self._target.request_ids:
            return
        drafting = self._draft.draft()
        candidates = self._draft.candidates(verdict.round)
        yield self._env.timeout(self._cost.reroot + drafting.seconds)
        answer = DraftAnswer(candidates, self._env.now, 0.0, 0.0, drafting, Forwards(), 0.0)
        wait = Wait(reroot=self._cost.reroot, draft=drafting.seconds)
        yield from self._verify(start, prefill, admitted, answer, wait)

    def _round_apart(self, admitted: Sequence[Admission]) -> Process:
        """The draft side hears of a prompt before its prefill, and prefills at the same time."""
        start = self._env.now
        self._to_draft.send(self._verdict(admitted))
        if admitted:
            yield from self._prefill(admitted)
        ready = self._env.now
        answer, _ = yield self._to_target.receive()
        wait = exposed_wait(answer, self._cost, self._env.now - ready)
        yield from self._verify(start, ready - start, admitted, answer, wait)

    def _prefill(self, admitted: Sequence[Admission]) -> Process:
        for admission in admitted:
            self._target.admit(admission)
        yield self._env.timeout(self._cost.prefill(_prompt_tokens(admitted), 0))
        for admission in admitted:
            self._requests[admission.request_id].record.first_token = self._env.now
            self._emit(self._target.commit_first(admission.request_id, TRUE_TOKEN))

    def _verify(
        self,
        start: float,
        prefill: float,
        admitted: Sequence[Admission],
        answer: DraftAnswer | None,
        wait: Wait,
    ) -> Process:
        """Verify, judge and record a round; none if prefill has finished everyone."""
        rows = self._target.verify_rows(None if answer is None else answer.candidates)
        if not rows:
            return
        num_rows = sum([len(entry.tokens) for entry in rows])
        context = sum([entry.context for entry in rows])
        seconds = self._cost.target(num_rows, context)
        if answer is not None and answer.overlapped:
            beside = answer.sent + answer.overlapped - self._env.now
            seconds = slowed(seconds, max(beside, 0.0), self._cost.slowdown)
        yield self._env.timeout(seconds)
        num_emitted = sum([self._judge(entry) for entry in rows])
        self.rounds.append(
            RoundRecord(
                round=len(self.rounds),
                start=start,
                batch=len(rows),
                rows=num_rows,
                context=context,
                num_expansions=answer.drafting.count + answer.grown.count if answer else 0,
                draft_rows=answer.drafting.rows + answer.grown.rows if answer else 0,
                num_draft_tokens=num_rows - len(rows),
                num_accepted_tokens=num_emitted - len(rows),
                num_emitted_tokens=num_emitted,
                prefill=prefill,
                prefill_tokens=_prompt_tokens(admitted),
                target=seconds,
                link_there=wait.link_there,
                link_back=wait.link_back,
                reroot=wait.reroot,
                draft=wait.draft,
            )
        )

    def _judge(self, rows: VerifyRows) -> int:
        """Walk one request's tree; return the number of tokens that it emits."""
        verdict, _ = self._target.judge(rows, _sample)
        record = self._requests[rows.request_id].record
        record.num_rounds += 1
        record.num_draft_tokens += len(rows.tokens) - 1
        record.num_accepted_tokens += len(verdict.tokens) - 1
        self._emit(verdict)
        return len(verdict.tokens)

    def _emit(self, verdict: RequestVerdict) -> None:
        record = self._requests[verdict.request_id].record
        record.output_tokens += len(verdict.tokens)
        self._news.append(verdict)
        if verdict.is_finished:
            record.finish = self._env.now
            self._batcher.finish(verdict.request_id)
            if self._on_finish is not None:
                self._on_finish()

    def _admission(self, request_id: int) -> Admission:
        request = self._requests[request_id]
        request.record.admitted = self._env.now
        prompt = (PROMPT_TOKEN,) * request.record.prompt_tokens
        return Admission(request_id, prompt, request.max_new_tokens)

    def _verdict(self, admitted: Sequence[Admission], *, is_last: bool = False) -> Verdict:
        news, self._news = self._news, []
        self._num_verdicts += 1
        return Verdict(self._num_verdicts - 1, tuple(news), tuple(admitted), is_last)


def exposed_wait(answer: DraftAnswer, cost: RoundCost, waited: float) -> Wait:
    """Spans of what the target waited for; what a prefill has hidden is what came first.

    Args:
        answer: What came.
        cost: Seconds of re-rooting and of a message.
        waited: Seconds from the end of prefill, if any, to the answer.
    """
    left = waited
    spans = []
    steps = (cost.link, answer.drafting.seconds, cost.reroot, answer.link_there, answer.late)
    for seconds in steps:
        spans.append(min(left, seconds))
        left -= spans[-1]
    link_back, drafting, reroot, link_there, late = spans
    return Wait(link_there, reroot, drafting + late, link_back)


def slowed(seconds: float, beside: float, slowdown: float) -> float:
    """Seconds of a forward that shares the machine with ``beside`` seconds of the other model.

    Args:
        seconds: Of the forward alone.
        beside: Seconds for which the other model will go on from now.
        slowdown: Seconds lost for each second of both.
    """
    stretched = seconds + slowdown * beside
    return stretched if beside <= stretched else seconds / (1.0 - slowdown)


def _sample(row: int) -> int:
    return TRUE_TOKEN


def _prompt_tokens(admitted: Sequence[Admission]) -> int:
    return sum([len(admission.tokens) for admission in admitted])
