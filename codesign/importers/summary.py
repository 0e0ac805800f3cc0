"""What a server said about its speculative decoding, whichever server it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codesign.errors import InputError

MAX_CHAIN = 1000  # draft tokens per round; servers draft 1 to 16


@dataclass(frozen=True, slots=True)
class AcceptanceSummary:
    """Acceptance of chains, over all rounds of all requests.

    Attributes:
        source: Server and kind of file, in words.
        chain: Draft tokens per round.
        survival: Share of rounds that accepted at least 1, 2, ..., ``chain`` draft tokens; None if
            the server only says the mean.
        length: Tokens per round, bonus token included.
        num_rounds: Rounds that were counted; None if the server does not say.
        notes: What the file leaves open, one sentence each; always show them.
    """

    source: str
    chain: int
    survival: tuple[float, ...] | None
    length: float
    num_rounds: float | None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_chain(self.source, self.chain)

    @property
    def error(self) -> float | None:
        """Relative standard error of ``length`` if rounds were independent; None if unknown."""
        if self.survival is None or not self.num_rounds:
            return None
        # E[X^2] of the accepted tokens X is the sum of (2 i - 1) P(X >= i).
        square = sum((2 * i - 1) * share for i, share in enumerate(self.survival, 1))
        variance = max(square - (self.length - 1.0) ** 2, 0.0)
        return math.sqrt(variance / self.num_rounds) / self.length


def from_counts(
    source: str, counts: Sequence[float], num_rounds: float, notes: Sequence[str]
) -> AcceptanceSummary:
    """The summary of counters: rounds in which the 1st, 2nd, ... draft token was accepted.

    Raises:
        InputError: If there were no rounds, or the counts contradict each other.
    """
    if not all(map(math.isfinite, (num_rounds, *counts))):
        raise InputError(f"{source}: a counter is no finite number. Save the figures again")
    if num_rounds <= 0:
        raise InputError(
            f"{source}: no speculative rounds were counted. Send requests with speculation on, "
            "then save the figures again"
        )
    if min(counts, default=-1) < 0 or max(counts) > num_rounds * (1 + 1e-9):
        raise InputError(
            f"{source}: accepted tokens per position ({', '.join(f'{c:g}' for c in counts)}) do "
            f"not fit {num_rounds:g} rounds. Save all counters at one moment"
        )
    survival = tuple(count / num_rounds for count in counts)
    return AcceptanceSummary(
        source, len(counts), survival, 1.0 + sum(survival), num_rounds, tuple(notes)
    )


def from_histogram(
    source: str,
    histogram: Mapping[int, float],
    *,
    chain: int | None,
    notes: Sequence[str] = (),
) -> AcceptanceSummary:
    """The summary of a histogram: rounds by the number of accepted draft tokens.

    Args:
        source: As in AcceptanceSummary.
        histogram: Rounds by accepted draft tokens, the bonus token not counted.
        chain: Draft tokens per round; None for the most that were ever accepted.
        notes: As in AcceptanceSummary.

    Raises:
        InputError: If there were no rounds, or one accepted more than the chain has.
    """
    most = max((accepted for accepted, count in histogram.items() if count), default=0)
    if chain is None:
        chain = max(most, 1)
        notes = (*notes, f"draft tokens per round: {chain}, the most that were ever accepted")
    _check_chain(source, chain)
    if most > chain:
        raise InputError(
            f"{source}: a round accepted {most} draft tokens, more than the {chain} that were "
            "drafted. Give the right number: --chain N"
        )
    counts = [
        sum(count for accepted, count in histogram.items() if accepted >= i)
        for i in range(1, chain + 1)
    ]
    return from_counts(source, counts, sum(histogram.values()), notes)


def _check_chain(source: str, chain: int) -> None:
    if chain > MAX_CHAIN:
        raise InputError(
            f"{source}: {chain:,} draft tokens per round are more than any server drafts "
            f"({MAX_CHAIN:,} are read). Save the figures again, or give the right number: --chain N"
        )


def shorter_drafts_note(drafted: float, num_rounds: float, chain: int) -> tuple[str, ...]:
    """A note if rounds had fewer draft tokens than ``chain``: far positions look worse."""
    if num_rounds <= 0 or drafted >= 0.98 * chain * num_rounds:
        return ()
    return (
        f"drafts had {drafted / num_rounds:.2f} tokens on average, not {chain}: a token that was "
        "never drafted counts as refused, so far positions look worse than they are",
    )
