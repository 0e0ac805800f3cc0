"""One replica: admits requests, runs prompts and rounds, evicts when KV memory runs out.

A SimPy process with one event per step. What a round does comes from a Batch, what it costs from
a timing; everything else a server does is here.
"""

from __future__ import annotations

from functools import partial

import simpy

from codesign.policy.batching import Batcher, QueuedRequest
from codesign.policy.cost import RoundCost
from codesign.sim.cluster import Process
from codesign.sim.played import PlayedBatch
from codesign.sim.prefill import Prefill
from codesign.sim.quiet_rounds import RunAhead
from codesign.sim.requests import SimulatedRequest
from codesign.sim.shared import Shared
from codesign.sim.steps import Step, StepLog
from codesign.sim.tape_batch import TapedBatch
from codesign.sim.timing import Spans, Timing, TogetherTiming, shared_step
from codesign.sim.under_way import UnderWay
from codesign.sim.work import Batch, Work


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
        self._prefill = Prefill(round_rows)
        self._step_now: Step | None = None
        self._log = StepLog(shared.rounds, number)
        self._under_way = UnderWay(cost.target, batcher)
        self._has_begun = False  # the next step, before the host has read the last one
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
        record = request.record
        answer = 0 if self._takes_rows else request.output_tokens - request.emitted
        kv_tokens = request.prompt_tokens + answer + self._round_rows
        prompt = request.prompt_tokens if request.prompt_left else 0
        return QueuedRequest(
            record.request_id, record.arrival, kv_tokens, request.blocks, prompt, record.slo_tpot
        )

    def run(self) -> Process:
        """Serve for ever; waits when there is nothing to do."""
        env, next_event = self._env, partial(self._shared.next_event, self._number)
        while True:
            self._has_begun = self._under_way.has_begun(self._now, self._kv_known)
            if self.batcher.num_waiting and not self._has_begun:
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
        if self._ahead is None or not self._prefill.is_empty:
            return False
        if self.batcher.on_time is not None:  # which hears of every round
            return False
        if self._waits_now():
            return False
        room = self.batcher.idle_room if self._takes_rows else None
        count, self._now = self._ahead.run(self._log.num_rounds, self._now, until, room)
        self._log.num_rounds += count
        return count > 0

    def _waits_now(self) -> bool:
        """Whether the next round of plain decoding is not as those behind it."""
        if not self._under_way.is_possible:
            return False
        return not self._has_begun or self.batcher.admits(self._now, kv_in_use=self._kv_known)

    @property
    def _kv_known(self) -> int | None:
        """KV rows in use where they are taken as requests grow; None where they are reserved."""
        return self._kv_in_use if self._takes_rows else None

    @property
    def _kv_in_use(self) -> int:
        return self._batch.kv_tokens + self._prefill.kv_tokens

    def _admit(self) -> None:
        for request_id in self.batcher.admit(self._now, kv_in_use=self._kv_known):
            request = self._requests[request_id]
            record = request.record
            if record.admitted is None:
                record.admitted = self._now
            if request.prompt_left:
                cached = min(self.batcher.cached_tokens(request_id), request.prompt_tokens - 1)
                record.cached_tokens = cached
                request.prompt_left = request.prompt_tokens - cached
                self._prefill.add(request)
            else:
                request.leave_queue(self._now)
                self._shared.on_taken(request_id, self._now)
                self._prefill.add(request)
                self._prefill.enter(request, 0)

    def _make_room(self) -> None:
        """Evict the youngest requests until the next round fits; the oldest always stays."""
        # Also for one request alone, before which idle prefix blocks go.
        while self.batcher.is_over(self._kv_in_use) and self.batcher.num_running > 1:
            self._evict(self._requests[self.batcher.youngest])

    def _evict(self, request: SimulatedRequest) -> None:
        number = request.record.request_id
        computed = request.prompt_tokens - request.prompt_left
        if not self._prefill.drop(request):
            request.emitted += self._batch.drop(number)
            self._batch.tally(number).add_to(request.record)
        request.record.num_preemptions += 1
        request.is_read = None
        request.prompt_left = request.prompt_tokens
        request.leave_queue(self._now)  # in which its prompt may have been still
        request.queued_since = self._now
        self.batcher.put_back(self._queued(request), computed_tokens=computed)

    def _step(self) -> float:
        """Decide what the next step does; return its seconds."""
        self._step_now = None
        if self._chunk is None:
            prefill, num_tokens = self._run_whole_prompts()
            if isinstance(self._batch, PlayedBatch) and isinstance(self._timing, TogetherTiming):
                # Those who come while the prompts run; see ``_begin_round``.
                num_waiting = self._shared.num_arriving(self._now, self._now + prefill)
                self._batch.sharing = (0, min(num_waiting, self.batcher.num_free))
            return prefill + self._begin_round(prefill, num_tokens)
        if isinstance(self._batch, PlayedBatch):
            num_waiting = self._prefill.num_prompts + self.batcher.num_waiting
            self._batch.sharing = (min(self._prefill.rows_left, self._chunk), num_waiting)
        seconds = self._begin_round(0.0, 0)
        return seconds + self._run_chunk(self._chunk)

    def _begin_round(self, prefill: float, prefill_tokens: int) -> float:
        entering = self._prefill.take_entering()
        if not entering and not self._batch.num_requests:
            return 0.0
        start = self._now
        # As in the engine: the draft is told after the prompts, one apart from the target before.
        told = start + prefill if isinstance(self._timing, TogetherTiming) else start
        work = self._batch.begin(entering, told)
        work.is_asked = self._under_way.is_possible and not self._has_begun
        spans = self._timing.spans(start, prefill, work)
        self._step_now = Step(start, work, spans, prefill, prefill_tokens)
        return spans.seconds

    def _run_whole_prompts(self) -> tuple[float, int]:
        """Run all admitted prompts: seconds and tokens."""
        chunk = self._prefill.take(self._prefill.rows_left, at=self._now, is_read=False)
        if not chunk.prompts:
            return 0.0, 0
        seconds = self._cost.prefill.of_prompts(chunk.prompts)
        for request in chunk.complete:
            self._first_token(request, self._now + seconds, request.record.cached_tokens)
        return seconds, chunk.num_tokens

    def _run_chunk(self, budget: int) -> float:
        """Run some prompt tokens in the same step as the round: seconds that they add."""
        chunk = self._prefill.take(budget, at=self._now, is_read=self._batch.reads_prompts)
        if not chunk.prompts:
            return 0.0
        step = self._step_now
        seconds = shared_step(self._cost, step and step.work, chunk.prompts)
        if chunk.read:
            seconds += self._timing.run_prompts(self._now, chunk.read)
        if step is None:
            self._step_now = step = Step(self._now, Work(0, 0, 0), Spans(0.0), 0.0, 0)
        step.prefill, step.prefill_tokens = seconds, chunk.num_tokens
        step.work.rests_on = False  # what is behind a chunk is asked for
        step.complete = chunk.complete
        return seconds

    def _first_token(self, request: SimulatedRequest, at: float, cached_tokens: int) -> None:
        """A prompt is complete: its first token is there."""
        if request.record.first_token is None:
            request.record.first_token = at
        self.batcher.began(request.record.request_id, at)
        if request.output_tokens - request.emitted == 1:
            self._prefill.leave(request)
            self._finish(request, at)
        else:
            self._prefill.enter(request, cached_tokens)

    def _finish_round(self) -> None:
        """The step is over: write the round down, let go who is finished."""
        step = self._step_now
        if step is None:
            return
        num_emitted = 0
        if step.work.batch:
            running = self.batcher.running if step.work.rests_on else ()
            num_emitted, finished = self._batch.end()
            self.batcher.round_over(step.spans.seconds, step.work.running, num_emitted)
            self._under_way.ended(step.work, running, finished, start=step.start, now=self._now)
            for number in finished:
                request = self._requests[number]
                self._batch.tally(number).add_to(request.record)
                self._finish(request, self._now)
        for request in step.complete:
            cached = request.prompt_tokens if request.is_read else request.record.cached_tokens
            self._first_token(request, self._now, cached)
        self._log.write(step, num_emitted)

    def _finish(self, request: SimulatedRequest, at: float) -> None:
        request.record.finish = at
        request.record.output_tokens = request.output_tokens
        self.batcher.finish(request.record.request_id)
        self._shared.on_finish()
