"""Steps of a replica, and the rows in which they are written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codesign.records import RoundLog
from codesign.sim.requests import SimulatedRequest
from codesign.sim.timing import Spans
from codesign.sim.work import Work


@dataclass(slots=True)
class Step:
    """A round, prompts, or both.

    Attributes:
        start: When it began.
        work: What its round does; a batch of 0 if it only runs prompts.
        spans: When the parts of the round run.
        prefill: Seconds of prompts.
        prefill_tokens: Their tokens.
        complete: Requests whose prompt ends with the step.
    """

    start: float
    work: Work
    spans: Spans
    prefill: float
    prefill_tokens: int
    complete: Sequence[SimulatedRequest] = ()


class StepLog:
    """Writes the steps of one replica, each as a row of records.RoundRecord.

    Args:
        rounds: Where all replicas write.
        replica: Number of this one.

    Attributes:
        num_rounds: Written so far.
    """

    def __init__(self, rounds: RoundLog, replica: int) -> None:
        self.num_rounds = 0
        self._rounds = rounds
        self._replica = replica
        self._grown: list[tuple[int, int]] = []  # overlapped forwards of the round before

    def write(self, step: Step, num_emitted: int) -> None:
        """A step is over in which the batch has emitted so many tokens."""
        work, spans = step.work, step.spans
        forwards = work.drafting + self._grown if self._grown else work.drafting
        self._grown = work.overlapped
        draft_rows = 0
        for rows, _ in forwards:
            draft_rows += rows
            if rows > self._rounds.most_draft_rows:
                self._rounds.most_draft_rows = rows
        for rows, _ in work.prompts:
            draft_rows += rows
        self._rounds.append_values(
            (
                self.num_rounds,
                step.start,
                work.batch,
                work.rows,
                work.context,
                len(forwards),
                draft_rows,
                work.rows - work.batch,
                num_emitted - work.batch,
                num_emitted,
                step.prefill,
                step.prefill_tokens,
                spans.target,
                spans.link_there,
                spans.link_back,
                spans.reroot,
                spans.draft,
                self._replica,
                work.running,
            )
        )
        self.num_rounds += 1
