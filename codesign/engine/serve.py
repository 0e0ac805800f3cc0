"""The target's loop: admit, prefill, verify, commit, until every request is served.

Prompts run between rounds, or, where the plan says so, a chunk of them within each. Rounds follow
``codesign.policy.protocol``, in the order of the simulator's loop. Arrivals replay by the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, sleep

from codesign import Progress
from codesign.engine.draft_news import DraftNews
from codesign.engine.feed import Feed
from codesign.engine.garbage import collect, collect_idle, collected_beside
from codesign.engine.partner import Answer, DraftLostError, LosablePartner, Partner, TargetLostError
from codesign.engine.pieces import PromptPiece
from codesign.engine.schedule import Schedule
from codesign.engine.serving_log import Round, ServingLog
from codesign.engine.target import Target, never
from codesign.policy.protocol import Admission, RequestVerdict, VerifyRows
from codesign.prompts import BoundRequest
from codesign.records import RunRecords


class Server:
    """Serves requests with one target and one draft partner.

    Args:
        worker: The target.
        partner: Whoever drafts.
        schedule: Of those requests that can be served.
        requests: What was asked for.
        refused: Why some of them are not served, by number.
        progress: Called as ``progress("serve", finished, total)``.
        ended: Called as soon as nothing more is served, whatever the reason.
        feed: Where requests come from; by default they come when they are due.
        emitted: Called with each verdict as soon as its tokens are final.

    Attributes:
        outputs: Emitted tokens by request number, complete or not.
        calibration: How right the draft's chances were.
    """

    def __init__(
        self,
        worker: Target,
        partner: Partner,
        schedule: Schedule,
        requests: Sequence[BoundRequest],
        *,
        refused: Mapping[int, str] | None = None,
        progress: Progress | None = None,
        ended: Callable[[], None] | None = None,
        feed: Feed | None = None,
        emitted: Callable[[RequestVerdict], None] | None = None,
    ) -> None:
        self._worker = worker
        self._partner = LosablePartner(partner, self._note_loss)
        self._schedule = schedule
        self._progress = progress
        self._ended = ended
        self._feed = feed
        self._emitted = emitted
        self._pending: list[RequestVerdict] = []
        self._complete: list[Admission] = []  # prompts that were completed in the last round
        self._num_left = 0  # that waited when the batch was last made up
        self._news = DraftNews(requests)
        self._log = ServingLog(feed.replica if feed is not None else 0)
        self.calibration = self._log.calibration
        self._asked = {r.request_id: r for r in requests}
        self.outputs: dict[int, list[int]] = {}
        for request in requests if feed is None else ():
            self._expect(request)
        self._log.refuse(refused or {})

    def _expect(self, request: BoundRequest) -> None:
        self._log.expect(request)
        self.outputs[request.request_id] = self._schedule.output(request.request_id)

    def run(self) -> RunRecords:
        """Serve everything.

        An interruption, or the loss of a part of the target, ends the run with what is finished.
        """
        try:
            self._log.begin(perf_counter() if self._feed is None else self._feed.start())
            return self._log.records(cut_by=self._serve())
        finally:
            self._partner.close()

    @collected_beside()
    def _serve(self) -> str | None:
        """Serve until all is done; or what ended it before."""
        try:
            while self._wait_for_work():
                self._round()
        except KeyboardInterrupt:
            return "interrupted"
        except TargetLostError as lost:
            return str(lost)
        finally:
            if self._ended is not None:
                self._ended()
        return None

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False once nothing can come any more."""
        schedule = self._schedule
        if schedule.batcher.num_running == 0:
            self._catch_up()
        self._take_fed(wait=schedule.is_done)
        if schedule.is_done:
            return False
        arrival = schedule.batcher.next_arrival
        if schedule.batcher.num_running == 0 and arrival is not None:
            collect_idle(arrival - self._log.now)
            sleep(max(arrival - self._log.now, 0.0))
        return True

    def _take_fed(self, *, wait: bool) -> None:
        if self._feed is not None:
            for number in self._feed.take(wait=wait):
                self._expect(self._asked[number])
                self._schedule.arrive(number)

    def _round(self) -> None:
        this = Round(start=self._log.now)
        admitted = self._admit()
        if self._schedule.chunk is None:
            self._run_between(this, admitted)
        elif self._schedule.batcher.num_running:
            self._run_beside(this)

    def _run_between(self, this: Round, admitted: Sequence[int]) -> None:
        """Run whole prompts, then a round of all requests."""
        joining = list(map(self._schedule.admission, admitted))
        if self._partner.is_async:  # the draft prefills while the target does
            self._send(joining)
            first = self._prefill(this)
        else:
            self._pending += self._prefill(this)
            self._send(joining)
            first = []
        ready, this.begun = perf_counter(), self._log.now
        answer = self._partner.receive()
        if not self._worker.side.request_ids:  # all requests ended with their first token
            self._pending = first
            return
        rows, verdicts = self._verify(this, answer, self._goes_on)
        self._pending = first + verdicts
        self._log.end_round(this, rows, verdicts, ready=ready, answer=answer)

    def _run_beside(self, this: Round) -> None:
        """Run a round of those whose prompt is complete, with a chunk of prompts in its step."""
        pieces = self._schedule.pieces(self._open_prompt)
        joining, self._complete = self._complete, []
        self._send(joining, pieces)
        ready, this.begun = perf_counter(), self._log.now
        answer = self._partner.receive()
        rows: Sequence[VerifyRows] = ()
        verdicts: list[RequestVerdict] = []
        if self._worker.side.request_ids:
            goes_on = never if pieces else self._goes_on
            rows, verdicts = self._verify(this, answer, goes_on)
        first = self._run_pieces(this, pieces)
        over = {verdict.request_id for verdict in first if verdict.is_finished}
        self._pending = verdicts + [v for v in first if v.request_id not in over]
        self._complete = [p.admission for p in pieces if p.is_last and p.request_id not in over]
        self._news.drop(over)  # the draft has run their prompts in vain
        self._log.end_round(this, rows, verdicts, ready=ready, answer=answer)

    def _verify(
        self, this: Round, answer: Answer, goes_on: Callable[[], bool]
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        this.running = len(self._worker.side.request_ids)
        rows, verdicts = self._worker.verify(answer.candidates, self._catch_up, goes_on)
        this.emitted = self._log.now
        emitted = sum([len(verdict.tokens) for verdict in verdicts])
        self._schedule.batcher.round_over(this.emitted - this.begun, this.running, emitted)
        self._commit(verdicts)
        return rows, verdicts

    def _goes_on(self) -> bool:
        """Whether the next round is plain decoding of this one's requests, as far as is known."""
        self._take_fed(wait=False)
        return self._partner.rests_on() and self._schedule.goes_on(self._log.now)

    def _catch_up(self) -> None:
        """Do what could wait: draft at rest, write down what is over, tidy up, tell of it."""
        self._partner.catch_up()
        self._log.catch_up()
        collect()
        if self._progress is not None:
            self._progress("serve", self._log.num_over, len(self._log.requests))

    def _send(self, joining: Sequence[Admission], pieces: Sequence[PromptPiece] = ()) -> None:
        quiet = self._news.quiet
        verdict = self._news.verdict(
            self._log.num_rounds,
            self._pending,
            joining,
            pieces,
            now=self._log.now,
            beside=self._schedule.rows_of(quiet) if quiet else (0, 0),
            sharing=self._sharing(pieces),
        )
        self._partner.send(verdict)

    def _sharing(self, pieces: Sequence[PromptPiece]) -> tuple[int, int]:
        """Prompt rows that share the round, and how many requests wait for a first token.

        Where prompts run between rounds, those alone who came while they ran and find room.
        """
        batcher = self._schedule.batcher
        if self._schedule.chunk is None and not batcher.num_free:
            return 0, 0  # most often, of a batch that is full
        num_waiting = batcher.num_arrived(self._log.now)
        if self._schedule.chunk is None:
            return 0, min(max(num_waiting - self._num_left, 0), batcher.num_free)
        num_admitted = batcher.num_running - len(self._worker.side.request_ids)
        return sum(piece.count for piece in pieces), num_waiting + num_admitted

    def _note_loss(self, lost: DraftLostError) -> None:
        self._log.notes.append(
            f"draft lost in round {self._log.num_rounds} at {self._log.now:.1f} s ({lost}); "
            "decoding went on without speculation"
        )

    def _admit(self) -> list[int]:
        """Let requests join and leave the batch; those that have joined and may stay."""
        now = self._log.now
        if self._worker.is_ahead:  # as nobody joins its step, and nobody must go
            evicted = self._schedule.make_room()
            assert not evicted, f"{evicted} lose rows of a step that is under way"
            self._num_left = self._schedule.batcher.num_arrived(now)
            return []
        admitted = self._schedule.admit(now)
        for number in admitted:
            if self._log.requests[number].admitted is None:
                self._log.requests[number].admitted = now
        if late := self._schedule.refuse(now):
            why = "the queue is full when it comes. Ask again later"
            self._log.refuse(dict.fromkeys(late, why))
            self._tell_over(late)
        evicted = self._schedule.make_room()
        self._num_left = self._schedule.batcher.num_arrived(now)
        if not evicted:
            return admitted
        for number in evicted:
            self._worker.evict(number)
            self._log.requests[number].num_preemptions += 1
        self._news.drop(evicted)
        self._complete = [a for a in self._complete if a.request_id not in evicted]
        return [number for number in admitted if number not in evicted]

    def _open_prompt(self, admission: Admission, blocks: Sequence[int]) -> int:
        num_cached = self._worker.open_prompt(admission, blocks)
        record = self._log.requests[admission.request_id]
        record.cached_tokens = min(num_cached, len(admission.tokens) - 1)
        return num_cached

    def _prefill(self, this: Round) -> list[RequestVerdict]:
        return self._run_pieces(this, self._schedule.pieces(self._open_prompt))

    def _run_pieces(self, this: Round, pieces: Sequence[PromptPiece]) -> list[RequestVerdict]:
        if not pieces:
            return []
        start = perf_counter()
        verdicts = self._worker.run_pieces(pieces)
        self._partner.run_prompts()
        self._commit(verdicts)
        self._log.emit(verdicts, self._log.now)
        this.prefill = perf_counter() - start
        this.prefill_tokens = sum(piece.count for piece in pieces)
        return verdicts

    def _commit(self, verdicts: Sequence[RequestVerdict]) -> None:
        now = self._log.now
        for verdict in verdicts:
            self._schedule.emit(
                verdict.request_id, verdict.tokens, now=now, is_finished=verdict.is_finished
            )
            if self._emitted is not None:
                self._emitted(verdict)
        self._tell_over([v.request_id for v in verdicts if v.is_finished])

    def _tell_over(self, request_ids: list[int]) -> None:
        if self._feed is not None and request_ids:
            self._feed.finished(request_ids)
