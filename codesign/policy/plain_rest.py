"""How long a batch that decodes plainly is left alone: looking at it takes the host's time, too.

What a look finds changes little while the batch stays as it is: answers get longer, and with them
what drafting would still save.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from codesign.policy.batch_round import LEAST
from codesign.policy.tree import DraftTree

LOOKING = 0.01  # share of the time of plain rounds that looks at the batch may take
LONGEST = 16  # rounds on one look


class PlainRest:
    """Rounds of plain decoding that follow a look by which that is best."""

    def __init__(self) -> None:
        self._left = 0
        self._batch: tuple[object, ...] = ()

    def begin(self, look: float, seconds: float) -> None:
        """Plain decoding is best: leave the batch alone until looks take no more than their share.

        Args:
            look: Seconds of a look.
            seconds: Of a plain round.
        """
        self._left = min(ceil(look / (LOOKING * max(seconds, LEAST))), LONGEST)

    def goes_on(self, trees: Sequence[DraftTree], *others: object) -> bool:
        """Whether the round that starts is plain without a look.

        Args:
            trees: Of the batch.
            others: What else must be as it was in the round before.
        """
        batch = (list(trees), *others)  # the same objects: trees are not compared by their nodes
        self._left = self._left - 1 if batch == self._batch else 0
        self._batch = batch
        return self._left > 0
