"""What a run leaves behind, written while it is served: requests, rounds and notes.

A round is recorded while the next one's target step runs, so that recording delays no round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from codesign.calibration_log import CalibrationLog
from codesign.engine.partner import Answer
from codesign.policy.protocol import RequestVerdict, VerifyRows
from codesign.prompts import BoundRequest
from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords


@dataclass(slots=True)
class Round:
    """What is known of a round before it is over.

    Attributes:
        start: Seconds since the start of the run.
        prefill: Seconds of prompts in it.
        prefill_tokens: Their rows.
        begun: When prompts before it were over.
        emitted: When its tokens were there.
        running: Requests that decode.
    """

    start: float
    prefill: float = 0.0
    prefill_tokens: int = 0
    begun: float = 0.0
    emitted: float = 0.0
    running: int = 0


# A round, its rows and verdicts, when the target began to wait, the draft's answer, and the end.
_Ended = tuple[Round, Sequence[VerifyRows], Sequence[RequestVerdict], float, Answer, float]


class ServingLog:
    """The records of a run that goes on, and its clock.

    Args:
        replica: Number of the replica that serves.

    Attributes:
        requests: A record of each that was asked for, by number.
        rounds: Those that are written down.
        num_rounds: Those that are over.
        notes: What a reader of the run must know.
        calibration: Of the draft's chances.
    """

    def __init__(self, replica: int = 0) -> None:
        self._replica = replica
        self.requests: dict[int, RequestRecord] = {}
        self.rounds = RoundLog()
        self.num_rounds = 0
        self.notes: list[str] = []
        self.calibration = CalibrationLog()
        self._unwritten: list[_Ended] = []
        self._refused: dict[int, str] = {}
        self._num_finished = 0
        self._origin = perf_counter()

    def begin(self, origin: float) -> None:
        """The run started at ``origin``, by ``perf_counter``."""
        self._origin = origin

    def expect(self, request: BoundRequest) -> None:
        """A request is to be served here."""
        number = request.request_id
        self.requests[number] = RequestRecord(
            number,
            request.category,
            request.arrival,
            len(request.prompt_ids),
            replica=self._replica,
            slo_tpot=request.slo_tpot,
        )

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return perf_counter() - self._origin

    @property
    def num_over(self) -> int:
        """Requests that are finished or refused."""
        return self._num_finished + len(self._refused)

    def refuse(self, reasons: Mapping[int, str]) -> None:
        """Requests are not served, for these reasons."""
        self._refused |= reasons
        self.notes += [f"request {number} refused: {why}" for number, why in reasons.items()]

    def emit(self, verdicts: Sequence[RequestVerdict], now: float) -> None:
        """Tokens were there at ``now``."""
        for verdict in verdicts:
            record = self.requests[verdict.request_id]
            record.output_tokens += len(verdict.tokens)
            if record.first_token is None:
                record.first_token = now
            if verdict.is_finished:
                record.finish = now
                self._num_finished += 1

    def _judge(self, rows: Sequence[VerifyRows], verdicts: Sequence[RequestVerdict]) -> None:
        """The target has judged what was drafted."""
        for request, verdict in zip(rows, verdicts, strict=True):
            record = self.requests[request.request_id]
            record.num_rounds += 1
            record.num_draft_tokens += len(request.tokens) - 1
            record.num_accepted_tokens += len(verdict.tokens) - 1
            self.calibration.add(record.category, request, verdict)

    def end_round(
        self,
        this: Round,
        rows: Sequence[VerifyRows],
        verdicts: Sequence[RequestVerdict],
        *,
        ready: float,
        answer: Answer,
    ) -> None:
        """A round is over; ``catch_up`` writes it down.

        Args:
            this: What is known of it.
            rows: That were verified.
            verdicts: On them.
            ready: ``perf_counter`` when the target began to wait for the draft.
            answer: The draft's.
        """
        self.num_rounds += 1
        self._unwritten.append((this, rows, verdicts, ready, answer, self.now))

    def catch_up(self) -> None:
        """Write down what is over."""
        unwritten, self._unwritten = self._unwritten, []
        for ended in unwritten:
            self._write_round(*ended)

    def _write_round(
        self,
        this: Round,
        rows: Sequence[VerifyRows],
        verdicts: Sequence[RequestVerdict],
        ready: float,
        answer: Answer,
        end: float,
    ) -> None:
        self._judge(rows, verdicts)
        self.emit(verdicts, this.emitted)
        num_rows = sum(len(r.tokens) for r in rows)
        num_emitted = sum(len(v.tokens) for v in verdicts)
        times = answer.times
        spans = _spans_before_target(answer, ready)
        spans["target"] = end - this.start - this.prefill - sum(spans.values())
        self.rounds.append(
            RoundRecord(
                round=len(self.rounds),
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
                replica=self._replica,
                running=this.running,
                **spans,
            )
        )

    def records(self, *, cut_by: str | None) -> RunRecords:
        """Everything, at the end.

        Args:
            cut_by: What ended the run before all requests were served, if anything did.
        """
        self.catch_up()
        if cut_by is not None:
            total = len(self.requests) - len(self._refused)
            left = total - self._num_finished
            self.notes.append(f"{cut_by}: {left} of {total} requests unfinished")
        return RunRecords(
            list(self.requests.values()),
            self.rounds,
            self.now,
            self.notes,
            refused=self._refused,
            calibration=self.calibration.errors(),
        )


def _spans_before_target(answer: Answer, ready: float) -> dict[str, float]:
    """Seconds of each span before the target's forward, as far as the target waited for it.

    The exchange may overlap a prefill: only what lies after ``ready`` counts.
    """
    spans: dict[str, float] = {"link_there": 0.0, "link_back": 0.0, "reroot": 0.0, "draft": 0.0}
    times, before = answer.times, ready
    if times is None:
        return spans
    late = max(times.idle_from, answer.sent)  # overlapped forwards may still have run
    steps = (
        ("draft", late),
        ("link_there", times.received),
        ("reroot", times.rerooted),
        ("draft", times.answered),
        ("link_back", answer.received),
    )
    for name, end in steps:
        spans[name] += max(end - before, 0.0)
        before = max(before, end)
    return spans
