"""The target's loop: admit, prefill, verify, commit, until every request is served.

Rounds follow ``codesign.policy.protocol``; the simulator's loop (codesign.sim) has the same order
of steps. Arrivals replay by the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Protocol

from codesign.engine.partner import Answer, DraftLostError, NoDraft, Partner, TargetLostError
from codesign.policy.batching import Batcher
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestVerdict,
    TargetSide,
    Verdict,
    VerifyRows,
)
from codesign.prompts import BoundRequest
from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords

Progress = Callable[[str, int, int], None]


class Target(Protocol):
    """The target's half of a round, on a CPU (TargetWorker) or on GPUs (GroupTarget)."""

    side: TargetSide

    def prefill(self, admissions: Sequence[Admission]) -> list[RequestVerdict]:
        """Run prompts and commit the token after each."""
        ...

    def verify(
        self, candidates: Candidates | None
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """Run every request's tree (or last token) and commit what the walk yields."""
        ...


@dataclass(slots=True)
class _Round:
    """What one round needs until it is written down."""

    start: float
    prefill: float = 0.0
    prefill_tokens: int = 0


class Server:
    """Serves requests with one target and one draft partner.

    Args:
        worker: The target.
        partner: Whoever drafts.
        batcher: Queue of the same requests.
        requests: What to serve.
        progress: Called as ``progress("serve", finished, total)``.

    Attributes:
        outputs: Emitted tokens by request number, complete or not.
    """

    def __init__(
        self,
        worker: Target,
        partner: Partner,
        batcher: Batcher,
        requests: Sequence[BoundRequest],
        *,
        progress: Progress | None = None,
    ) -> None:
        self._worker = worker
        self._partner = partner
        self._batcher = batcher
        self._requests = {r.request_id: r for r in requests}
        self._progress = progress
        self._num_finished = 0
        self._pending: list[RequestVerdict] = []
        self._rounds = RoundLog()
        self._notes: list[str] = []
        self._origin = 0.0
        self.outputs: dict[int, list[int]] = {r.request_id: [] for r in requests}
        self._records = {
            r.request_id: RequestRecord(r.request_id, r.category, r.arrival, len(r.prompt_ids))
            for r in requests
        }

    def run(self) -> RunRecords:
        """Serve everything.

        An interruption, or the loss of a part of the target, ends the run with what is finished.
        """
        self._origin = perf_counter()
        try:
            while not self._batcher.is_done:
                self._wait_for_work()
                self._round()
        except (KeyboardInterrupt, TargetLostError) as end:
            left = len(self._requests) - self._num_finished
            cause = "interrupted" if isinstance(end, KeyboardInterrupt) else str(end)
            self._notes.append(f"{cause}: {left} of {len(self._requests)} requests unfinished")
        finally:
            seconds = self._now()
            self._partner.close()
        return RunRecords(list(self._records.values()), self._rounds, seconds, self._notes)

    def _now(self) -> float:
        return perf_counter() - self._origin

    def _wait_for_work(self) -> None:
        arrival = self._batcher.next_arrival
        if self._batcher.num_running == 0 and arrival is not None:
            sleep(max(arrival - self._now(), 0.0))

    def _round(self) -> None:
        this = _Round(start=self._now())
        admitted = self._admit()
        if self._partner.is_async:  # the draft prefills while the target does
            self._send(admitted)
            first = self._prefill(this, admitted)
        else:
            self._pending += self._prefill(this, admitted)
            self._send(admitted)
            first = []
        ready = perf_counter()
        answer = self._receive()
        if not self._worker.side.request_ids:  # all requests ended with their first token
            self._pending = first
            return
        rows, verdicts = self._worker.verify(answer.candidates)
        self._pending = first + verdicts
        self._commit(verdicts)
        self._write_round(this, rows, verdicts, ready, answer)

    def _send(self, admitted: Sequence[Admission]) -> None:
        verdict = Verdict(len(self._rounds), tuple(self._pending), tuple(admitted), now=self._now())
        try:
            self._partner.send(verdict)
        except DraftLostError as lost:
            self._go_on_without_draft(lost)
            self._partner.send(verdict)

    def _receive(self) -> Answer:
        try:
            return self._partner.receive()
        except DraftLostError as lost:
            self._go_on_without_draft(lost)
            return self._partner.receive()

    def _go_on_without_draft(self, lost: DraftLostError) -> None:
        self._notes.append(
            f"draft lost in round {len(self._rounds)} at {self._now():.1f} s ({lost}); "
            "decoding went on without speculation"
        )
        self._partner.close()
        self._partner = NoDraft()

    def _admit(self) -> list[Admission]:
        now = self._now()
        admitted = []
        for request_id in self._batcher.admit(now):
            request = self._requests[request_id]
            self._records[request_id].admitted = now
            admitted.append(
                Admission(request_id, request.prompt_ids, request.max_new_tokens, request.slo_tpot)
            )
        return admitted

    def _prefill(self, this: _Round, admitted: Sequence[Admission]) -> list[RequestVerdict]:
        if not admitted:
            return []
        start = perf_counter()
        verdicts = self._worker.prefill(admitted)
        self._commit(verdicts)
        this.prefill = perf_counter() - start
        this.prefill_tokens = sum(len(a.tokens) for a in admitted)
        return verdicts

    def _commit(self, verdicts: Sequence[RequestVerdict]) -> None:
        now = self._now()
        for verdict in verdicts:
            record = self._records[verdict.request_id]
            self.outputs[verdict.request_id] += verdict.tokens
            record.output_tokens += len(verdict.tokens)
            if record.first_token is None:
                record.first_token = now
            if verdict.is_finished:
                record.finish = now
                self._batcher.finish(verdict.request_id)
                self._num_finished += 1
        if self._progress is not None:
            self._progress("serve", self._num_finished, len(self._requests))

    def _write_round(
        self,
        this: _Round,
        rows: Sequence[VerifyRows],
        verdicts: Sequence[RequestVerdict],
        ready: float,
        answer: Answer,
    ) -> None:
        for request, verdict in zip(rows, verdicts, strict=True):
            record = self._records[request.request_id]
            record.num_rounds += 1
            record.num_draft_tokens += len(request.tokens) - 1
            record.num_accepted_tokens += len(verdict.tokens) - 1
        num_rows = sum(len(r.tokens) for r in rows)
        num_emitted = sum(len(v.tokens) for v in verdicts)
        times = answer.times
        spans = round_spans(answer, start=this.start + self._origin, ready=ready)
        spans["target"] = self._now() - this.start - this.prefill - sum(spans.values())
        self._rounds.append(
            RoundRecord(
                round=len(self._rounds),
                start=this.start,
                batch=len(rows),
                rows=num_rows,
                context=sum(r.context for r in rows),
                num_expansions=times.num_expansions if times else 0,
                draft_rows=times.num_rows if times else 0,
                num_draft_tokens=num_rows - len(rows),
                num_accepted_tokens=num_emitted - len(rows),
                num_emitted_tokens=num_emitted,
                prefill=this.prefill,
                prefill_tokens=this.prefill_tokens,
                replica=0,
                **spans,
            )
        )


def round_spans(answer: Answer, *, start: float, ready: float) -> dict[str, float]:
    """Seconds of each span before the target's forward, as far as the target waited for it.

    The exchange may overlap a prefill; only what lies after ``ready`` counts.

    Args:
        answer: The partner's answer.
        start: ``perf_counter`` at the start of the round.
        ready: ``perf_counter`` when the target began to wait.
    """
    spans: dict[str, float] = {"link_there": 0.0, "link_back": 0.0, "reroot": 0.0, "draft": 0.0}
    if answer.times is None:
        return spans
    times = answer.times
    late = max(times.idle_from, answer.sent)  # overlapped forwards may still have run
    steps = (
        ("draft", late),
        ("link_there", times.received),
        ("reroot", times.rerooted),
        ("draft", times.answered),
        ("link_back", answer.received),
    )
    before = max(ready, start)
    for name, end in steps:
        spans[name] += max(end - before, 0.0)
        before = max(before, end)
    return spans
