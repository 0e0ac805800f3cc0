"""Rest: rounds of plain decoding without a look at the batch, once a look found nothing better.

A look takes the host's time. So after one by which plain decoding is best no more are made until
it was ``LOOKING`` of the time, as measured, or by the fit where nothing is timed: in a simulation.
There looks that nobody has timed cost nothing, and every round has one.

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

LOOKING = 0.005  # share of the time of plain rounds that looks at the batch may take
LONGEST_REST = 64  # rounds
LEARNED = 64  # confidences, from which looks count in what drafting is worth


class Resting(Speculation):
    """A policy that says when it rests."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        super().__init__(calibration)
        self._rest = 0  # rounds until the next look
        self._longest_rest = LONGEST_REST
        self._plain_round = 0.0  # seconds

    def stays_at_rest(self) -> bool:
        """See ``Speculation``."""
        self._rest -= 1
        return self._rest > 0

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
        self._plain_round, self._longest_rest = plain_round, most
        self._rest = min(rounds_until_look(look, plain_round), most)

    def looked(self, seconds: float) -> None:
        """See ``Speculation``."""
        if self._rest > 0:
            rounds = rounds_until_look(seconds, self._plain_round)
            self._rest = min(rounds, self._longest_rest)


def rounds_until_look(look: float, seconds: float) -> int:
    """Rounds of so many seconds of whose time a look is its share."""
    return max(ceil(min(look / (LOOKING * max(seconds, LEAST)), LONGEST_REST)), 1)
