"""The draft side with a synthetic model: what it drafts, and how many seconds that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codesign.policy.cost import RoundCost
from codesign.policy.protocol import Candidates, DraftSide, ExpansionRows, Verdict
from codesign.records import RequestRecord
from codesign.sim.acceptance import SyntheticDrafter

# Committed tokens without a KV row that make an expansion a prefill. After a miss there are one or
# two, after an admission there is a prompt.
BULK_ROWS = 16


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request of the trace: its record so far, and the length of its output."""

    record: RequestRecord
    max_new_tokens: int


@dataclass(slots=True)
class Forwards:
    """Draft forwards: how many, their rows, their seconds."""

    count: int = 0
    rows: int = 0
    seconds: float = 0.0


class DraftWorkers:
    """Runs the expansions that the draft side names.

    Args:
        side: Its state.
        drafter: Its model.
        cost: Seconds of its steps.
        requests: By number.
    """

    def __init__(
        self,
        side: DraftSide,
        drafter: SyntheticDrafter,
        cost: RoundCost,
        requests: Mapping[int, SimulatedRequest],
    ) -> None:
        self._side = side
        self._drafter = drafter
        self._cost = cost
        self._requests = requests

    def receive(self, verdict: Verdict) -> None:
        """Take in a verdict."""
        for admission in verdict.admitted:
            request = self._requests[admission.request_id]
            self._drafter.admit(
                admission.request_id,
                category=request.record.category,
                prompt_tokens=request.record.prompt_tokens,
                output_tokens=request.max_new_tokens,
            )
        _, finished = self._side.receive(verdict)
        for request_id in finished:
            self._drafter.finish(request_id)

    def draft(self) -> Forwards:
        """Run the forwards that the candidates need."""
        forwards = Forwards()
        self._side.begin()
        while rows := self._side.next_expansion(forwards.count):
            self._forward(rows, forwards)
        return forwards

    def candidates(self, round_number: int) -> Candidates:
        """The trees to verify."""
        return self._side.candidates(round_number)

    def grow(self) -> Forwards:
        """Run the forwards that overlap the target's verification."""
        forwards = Forwards()
        for _ in range(self._side.policy.overlap):
            if rows := self._side.overlap_expansion():
                self._forward(rows, forwards)
        return forwards

    def _forward(self, expansion: Sequence[ExpansionRows], forwards: Forwards) -> None:
        for rows in expansion:
            tokens, log_probs = self._drafter.answer(rows)
            self._side.expanded(rows, tokens, log_probs)
            forwards.rows += len(rows.tokens)
        forwards.count += 1
        forwards.seconds += draft_seconds(self._cost, expansion)


def draft_seconds(cost: RoundCost, expansion: Sequence[ExpansionRows]) -> float:
    """Seconds of one draft forward; prompts in it are priced as a prefill of their own."""
    rows = context = bulk_rows = bulk_context = 0
    for entry in expansion:
        num_rows = len(entry.tokens)
        if num_rows - len(entry.nodes) >= BULK_ROWS:
            bulk_rows += num_rows
            bulk_context += entry.context
        else:
            rows += num_rows
            context += entry.context
    seconds = cost.draft(rows, context) if rows else 0.0
    return seconds + (cost.draft_prefill(bulk_rows, bulk_context) if bulk_rows else 0.0)
