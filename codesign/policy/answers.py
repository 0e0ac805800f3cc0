"""How long answers are at least, by those that have ended: what a target is kept by.

A request that is given time to spare by a mean answer keeps its target only if its answer is that
long, and most are shorter than the mean. An answer that may end soon has little to spare.

Must not import torch or read a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

SHORT = 0.05  # share of answers that may end before they are taken to
_FEWEST, _MOST = 8, 128  # answers from which on those that have ended count; that are remembered


class Answers:
    """Takes in the tokens of answers that have ended, without the first one.

    Args:
        guess: Tokens of an answer, until some have ended.
    """

    def __init__(self, guess: float) -> None:
        self._guess = guess - 1.0
        self._last: deque[float] = deque(maxlen=_MOST)
        self._ranked: list[float] = []

    def ended(self, later: float) -> None:
        """An answer has ended after so many tokens beyond the first."""
        self._last.append(later)
        self._ranked = sorted(self._last)

    def left_at_least(self, later: float) -> float:
        """Tokens still to come after so many beyond the first, of all but ``SHORT`` that go on."""
        ranked = self._ranked
        if len(ranked) < _FEWEST:
            return max(self._guess - later, 0.0)
        shorter = bisect_right(ranked, later)
        if shorter == len(ranked):
            return 0.0
        return ranked[shorter + int(SHORT * (len(ranked) - shorter))] - later
