"""One replica: admits requests, runs prompts and rounds, evicts when KV memory runs out.

A SimPy process with one event per step. What a round does comes from a Batch, what it costs from
a timing; everything else a server does is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from codesign.policy.batching import Batcher, QueuedRequest
from codesign.policy.cost import RoundCost
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.records import RequestRecord, RoundLog
from codesign.sim.ahead import RunAhead
from codesign.sim.played import PlayedBatch
from codesign.sim.requests import SimulatedRequest
from codesign.sim.taped import TapedBatch
from codesign.sim.timing import Spans, Timing, TogetherTiming, shared_step
from codesign.sim.work import Batch, Entering, Tally, Work

Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class _Running:
    """The step that runs now; ``complete`` are prompts that end with it."""

    start: float
    work: Work
    spans: Spans
    prefill: float
    prefill_tokens: int
    complete: Sequence[SimulatedRequest] = ()


def _nobody_comes(start: float, end: float) -> int:
    return 0


def _nobody_asks(request_id: int, at: float) -> None:
    """There is no pool for prompts."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all replicas of a run share.

    Attributes:
        env: The clock.
        requests: By number.
        rounds: Where rounds are written.
        on_finish: Called when a request is over.
        next_event: When something from outside a replica happens next, at the earliest.
        on_taken: Called with a request whose prompt has run elsewhere, and when it was admitted.
        num_arriving: Requests that a replica is given after one time and not after another.
    """

    env: simpy.Environment
    requests: dict[int, SimulatedRequest]
    rounds: RoundLog
    on_finish: Callable[[], None]
    next_event: Callable[[], float]
    on_taken: Callable[[int, float], None] = _nobody_asks
    num_arriving: Callable[[float, float], int] = _nobody_comes


class Replica:
    """Serves the requests that it is given.

    Args:
        number: Of this replica.
        shared: What all replicas share.
        batcher: Its queue.
        batch: Requests that decode.
        timing: When the parts of a round run.
        cost: Seconds of prompts.
        round_rows: Most KV rows of a request in a round.
        prefill_chunk: Most prompt tokens in a step that decodes; None to run whole prompts between
            rounds.
        takes_rows: KV rows are taken as requests grow, and requests evicted when they run out.
    """

    def __init__(
        self,
        number: int,
        shared: Shared,
        batcher: Batcher,
        batch: Batch,
        timing: Timing,
        cost: RoundCost,
        *,
        round_rows: int,
        prefill_chunk: int | None = None,
        takes_rows: bool = False,
    ) -> None:
        self.batcher = batcher
        self._number = number
        self._shared = shared
        self._env = shared.env
        self._now = shared.env.now  # may be ahead of the clock while no event lies between
        self._requests = shared.requests
        self._batch = batch
        self._timing = timing
        self._cost = cost
        self._round_rows = round_rows
        self._chunk = prefill_chunk
        self._takes_rows = takes_rows
        self._prompts: deque[SimulatedRequest] = deque()  # admitted, prompt not complete
        self._prompt_kv = 0  # KV rows of these and of ``_entering``, prefix cache not counted
        self._entering: list[Entering] = []  # prompt complete, decode from the next round on
        self._now_running: _Running | None = None
        self._grown: list[tuple[int, int]] = []  # overlapped forwards of the round before
        self._num_rounds = 0
        self._wake: simpy.Event | None = None
        self._ahead: RunAhead | None = None
        if isinstance(batch, TapedBatch) and isinstance(timing, TogetherTiming):
            self._ahead = RunAhead(batch, timing, shared.rounds, number)

    def give(self, request: SimulatedRequest) -> None:
        """A request arrives; one whose prompt has run elsewhere has ``prompt_left`` 0."""
        request.record.replica = self._number
        self.batcher.add(self._queued(request))
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _queued(self, request: SimulatedRequest) -> QueuedRequest:
        answer = 0 if self._takes_rows else request.output_tokens - request.emitted
        kv_tokens = request.prompt_tokens + answer + self._round_rows
        number = request.record.request_id
        return QueuedRequest(number, request.record.arrival, kv_tokens, request.blocks)

    def run(self) -> Process:
        """Serve for ever; waits when there is nothing to do."""
        env, next_event = self._env, self._shared.next_event
        while True:
            if self.batcher.num_waiting:
                self._admit()
            if not self.batcher.num_running:
                self._wake = env.event()
                yield self._wake
                self._now = env.now
                continue
            if self._run_ahead(next_event()):
                continue
            if self._takes_rows:
                self._make_room()
            end = self._now + self._step()
            if end >= next_event():  # else nothing happens before: no event is needed
                yield env.timeout(end - env.now)
            self._now = end
            self._finish_round()

    def _run_ahead(self, until: float) -> bool:
        """Run all rounds at once that end before ``until`` and change nothing but KV rows."""
        if self._ahead is None or self._entering or self._prompts:
            return False
        is_bounded = self._takes_rows and self.batcher.num_running > 1
        room = self.batcher.idle_room if is_bounded else None
        count, self._now = self._ahead.run(self._num_rounds, self._now, until, room)
        self._num_rounds += count
        return count > 0

    @property
    def _kv_in_use(self) -> int:
        return self._batch.kv_tokens + self._prompt_kv

    def _own_rows(self, request: SimulatedRequest) -> int:
        """KV rows of an admitted request before it decodes, prefix cache not counted."""
        return request.prompt_tokens + self._round_rows - PREFIX_BLOCK * len(request.blocks)

    def _admit(self) -> None:
        kv_in_use = self._kv_in_use if self._takes_rows else None
        for request_id in self.batcher.admit(self._now, kv_in_use=kv_in_use):
            request = self._requests[request_id]
            record = request.record
            if record.admitted is None:
                record.admitted = self._now
            self._prompt_kv += self._own_rows(request)
            if request.prompt_left:
                cached = min(self.batcher.cached_tokens(request_id), request.prompt_tokens - 1)
                record.cached_tokens = cached
                request.prompt_left = request.prompt_tokens - cached
                self._prompts.append(request)
            else:
                self._shared.on_taken(request_id, self._now)
                self._enter(request, 0)

    def _make_room(self) -> None:
        """Evict the youngest requests until the next round fits; the oldest always stays."""
        while self.batcher.num_running > 1 and self.batcher.is_over(self._kv_in_use):
            self._evict(self._requests[self.batcher.youngest])

    def _evict(self, request: SimulatedRequest) -> None:
        number = request.record.request_id
        computed = request.prompt_tokens - request.prompt_left
        if request in self._prompts:
            self._prompts.remove(request)
            self._prompt_kv -= self._own_rows(request)
        elif any(entering.request_id == number for entering in self._entering):
            self._entering = [e for e in self._entering if e.request_id != number]
            self._prompt_kv -= self._own_rows(request)
            request.emitted += 1
        else:
            request.emitted += self._batch.drop(number)
            self._count(request.record, self._batch.tally(number))
        request.record.num_preemptions += 1
        request.is_read = None
        request.prompt_left = request.prompt_tokens
        self.batcher.put_back(self._queued(request), computed_tokens=computed)

    def _step(self) -> float:
        """Decide what the next step does; return its seconds."""
        self._now_running = None
        if self._chunk is None:
            prefill, num_tokens = self._run_whole_prompts()
            if isinstance(self._batch, PlayedBatch) and isinstance(self._timing, TogetherTiming):
                # The draft is told after the prompts; one apart from the target is told before.
                num_waiting = self._shared.num_arriving(self._now, self._now + prefill)
                self._batch.sharing = (0, num_waiting)
            return prefill + self._begin_round(prefill, num_tokens)
        if isinstance(self._batch, PlayedBatch):
            rows = sum([request.prompt_left for request in self._prompts])
            num_waiting = len(self._prompts) + self.batcher.num_waiting
            self._batch.sharing = (min(rows, self._chunk), num_waiting)
        seconds = self._begin_round(0.0, 0)
        return seconds + self._run_chunk(self._chunk)

    def _begin_round(self, prefill: float, prefill_tokens: int) -> float:
        entering, self._entering = self._entering, []
        if not entering and not self._batch.num_requests:
            return 0.0
        for request in entering:
            self._prompt_kv -= self._own_rows(self._requests[request.request_id])
        start = self._now
        work = self._batch.begin(entering, start)
        spans = self._timing.spans(start, prefill, work)
        self._now_running = _Running(start, work, spans, prefill, prefill_tokens)
        return spans.seconds

    def _run_whole_prompts(self) -> tuple[float, int]:
        """Run all admitted prompts: seconds and tokens."""
        if not self._prompts:
            return 0.0, 0
        prompts = [(r.prompt_left, r.prompt_tokens - r.prompt_left) for r in self._prompts]
        num_tokens = sum([rows for rows, _ in prompts])
        seconds = self._cost.prefill.of_prompts(prompts)
        for request in self._prompts:
            self._first_token(request, self._now + seconds, request.record.cached_tokens)
        self._prompts.clear()
        return seconds, num_tokens

    def _run_chunk(self, budget: int) -> float:
        """Run some prompt tokens in the same step as the round: seconds that they add."""
        num_tokens = 0
        prompts: list[tuple[int, int]] = []
        read: list[tuple[int, int]] = []  # by the draft, too
        reads_new = self._batch.reads_prompts
        complete: list[SimulatedRequest] = []
        for request in self._prompts:
            count = min(request.prompt_left, budget - num_tokens)
            if not count:
                break
            prompts.append((count, request.prompt_tokens - request.prompt_left))
            if request.is_read is None:
                request.is_read = reads_new
            if request.is_read:
                read.append(prompts[-1])
            num_tokens += count
            request.prompt_left -= count
            if not request.prompt_left:
                complete.append(request)
        if not num_tokens:
            return 0.0
        running = self._now_running
        seconds = shared_step(self._cost, running and running.work, prompts)
        if read:
            seconds += self._timing.run_prompts(self._now, read)
        if running is None:
            self._now_running = running = _Running(self._now, Work(0, 0, 0), Spans(0.0), 0.0, 0)
        running.prefill, running.prefill_tokens = seconds, num_tokens
        running.complete = complete
        for _ in complete:
            self._prompts.popleft()
        return seconds

    def _first_token(self, request: SimulatedRequest, at: float, cached_tokens: int) -> None:
        """A prompt is complete: its first token is there."""
        request.prompt_left = 0
        if request.record.first_token is None:
            request.record.first_token = at
        if request.output_tokens - request.emitted == 1:
            self._prompt_kv -= self._own_rows(request)
            self._finish(request, at)
        else:
            self._enter(request, cached_tokens)

    def _enter(self, request: SimulatedRequest, cached_tokens: int) -> None:
        """Join the batch with the next round."""
        record = request.record
        self._entering.append(
            Entering(
                record.request_id,
                record.category,
                request.prompt_tokens,
                request.output_tokens - request.emitted,
                cached_tokens=cached_tokens,
                emitted_before=request.emitted,
                shared_tokens=PREFIX_BLOCK * len(request.blocks),
                speculates=request.speculates,
            )
        )

    def _finish_round(self) -> None:
        """The step is over: write the round down, let go who is finished."""
        running = self._now_running
        if running is None:
            return
        num_emitted = 0
        if running.work.batch:
            num_emitted, finished = self._batch.end()
            for number in finished:
                request = self._requests[number]
                self._count(request.record, self._batch.tally(number))
                self._finish(request, self._now)
        for request in running.complete:
            cached = request.prompt_tokens if request.is_read else request.record.cached_tokens
            self._first_token(request, self._now, cached)
        self._write(running, num_emitted)

    def _finish(self, request: SimulatedRequest, at: float) -> None:
        request.record.finish = at
        request.record.output_tokens = request.output_tokens
        self.batcher.finish(request.record.request_id)
        self._shared.on_finish()

    def _count(self, record: RequestRecord, tally: Tally) -> None:
        record.num_rounds += tally.num_rounds
        record.num_draft_tokens += tally.num_draft_tokens
        record.num_accepted_tokens += tally.num_accepted_tokens

    def _write(self, running: _Running, num_emitted: int) -> None:
        work, spans = running.work, running.spans
        forwards = work.drafting + self._grown if self._grown else work.drafting
        self._grown = work.overlapped
        draft_rows = 0
        for rows, _ in forwards:
            draft_rows += rows
        for rows, _ in work.prompts:
            draft_rows += rows
        self._shared.rounds.append_values(
            (
                self._num_rounds,
                running.start,
                work.batch,
                work.rows,
                work.context,
                len(forwards),
                draft_rows,
                work.rows - work.batch,
                num_emitted - work.batch,
                num_emitted,
                running.prefill,
                running.prefill_tokens,
                spans.target,
                spans.link_there,
                spans.link_back,
                spans.reroot,
                spans.draft,
                self._number,
            )
        )
        self._num_rounds += 1
