"""What the loop wants of a target: its half of a round, on a CPU or on rank groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from codesign.engine.pieces import PromptPiece
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestVerdict,
    TargetSide,
    VerifyRows,
)


def nothing() -> None:
    """Nothing to do."""


def never() -> bool:
    """It is not so."""
    return False


class Target(ABC):
    """The target's half of a round, on a CPU (TargetWorker) or on GPUs (GroupTarget).

    Attributes:
        side: Decides every token.
    """

    side: TargetSide

    @property
    def is_ahead(self) -> bool:
        """Whether the next round's step is under way: nobody can join that round."""
        return False

    @abstractmethod
    def open_prompt(self, admission: Admission, blocks: Sequence[int]) -> int:
        """Make room for a request.

        Args:
            admission: It.
            blocks: Ids of its prompt's whole blocks; none without a prefix cache.

        Returns:
            Leading rows of its prompt that are there already.
        """

    @abstractmethod
    def run_pieces(self, pieces: Sequence[PromptPiece]) -> list[RequestVerdict]:
        """Run parts of prompts, and commit the token after each that is complete."""

    @abstractmethod
    def verify(
        self,
        candidates: Candidates | None,
        meanwhile: Callable[[], None] = nothing,
        goes_on: Callable[[], bool] = never,
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """Run every request's tree (or last token) and commit what the walk yields.

        Args:
            candidates: Of the draft.
            meanwhile: Called while the model runs, where that leaves the host time.
            goes_on: Whether the next round is plain decoding of the same requests; asked in a round
                of plain decoding, where the next one's step can begin before this one's has ended.
        """

    @abstractmethod
    def free(self, request_id: int) -> None:
        """A request's KV rows are free, if it has any."""

    def evict(self, request_id: int) -> None:
        """A request loses its KV rows, if it has any."""
        if request_id in self.side.request_ids:
            self.side.evict(request_id)
        self.free(request_id)

    def free_finished(self, verdicts: Sequence[RequestVerdict]) -> None:
        """Free the rows of requests that are over."""
        for verdict in verdicts:
            if verdict.is_finished:
                self.free(verdict.request_id)
