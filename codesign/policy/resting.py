"""Rest: rounds of plain decoding without a look at the batch, once a look found nothing better.

A look takes the host's time. So after one by which plain decoding is best no more are made until
it was ``FIRST_SHARE`` of the time, as measured, or by the fit where nothing is timed: in a
simulation. There looks that nobody has timed cost nothing, and every round has one. Each further
look that finds the same halves the share, down to ``LOOKING``: a hard passage is soon over, a batch
for which drafting does not pay is not.

The look that would end a rest is made beside the target's step of the round before, when the host
has time: at trees that lack that round's tokens. If plain decoding is best still the policy rests
on; otherwise the next round has a look of its own.

What drafting is worth has its looks in it, too, but not before confidences are learned: only
drafting teaches them.

Must not import torch or read a clock.
"""

from __future__ import annotations

from math import ceil

from codesign.policy.batch_round import LEAST
from codesign.policy.cost import Calibration
from codesign.policy.interface import Speculation

FIRST_SHARE = 0.04  # of the time of plain rounds that a first look may take
LOOKING = 0.005  # the same of later ones, in the end
LONGEST_REST = 64  # rounds
LEARNED = 64  # confidences, from which looks count in what drafting is worth


class Resting(Speculation):
    """A policy that says when it rests."""

    asks = True

    def __init__(self, calibration: Calibration | None) -> None:
        super().__init__(calibration)
        self._rest = 0  # rounds until the next look; less than 0 where drafting goes on
        self._share = FIRST_SHARE
        self._longest_rest = LONGEST_REST
        self._plain_round = 0.0  # seconds

    def stays_at_rest(self) -> bool:
        """See ``Speculation``."""
        self._rest -= 1
        return self._rest > 0

    def rests_on(self) -> bool:
        """See ``Speculation``."""
        return self._rest > 1

    def looks_ahead(self) -> bool:
        """See ``Speculation``."""
        return self._rest == 1

    def begin_rest(self, look: float, plain_round: float, most: int = LONGEST_REST) -> None:
        """Plain decoding is best, as a look of so many seconds found; a round takes so many.

        Args:
            look: Seconds.
            plain_round: Seconds.
            most: Rounds until the next look.
        """
        follows = self._rest >= 0  # another rest, without a round of drafting between
        self._share = max(self._share / 2.0, LOOKING) if follows else FIRST_SHARE
        self._plain_round, self._longest_rest = plain_round, most
        self._rest = self._rounds(look)

    def looked(self, seconds: float) -> None:
        """See ``Speculation``."""
        if self._rest > 0:
            self._rest = self._rounds(seconds)

    def _rounds(self, look: float) -> int:
        """Rounds until the next look, after one of so many seconds."""
        rounds = rounds_until_look(look, self._plain_round, self._share)
        return min(rounds, self._longest_rest)


def rounds_until_look(look: float, seconds: float, share: float = LOOKING) -> int:
    """Rounds of so many seconds of whose time a look is its share."""
    return max(ceil(min(look / (share * max(seconds, LEAST)), LONGEST_REST)), 1)
