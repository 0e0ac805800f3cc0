"""How long a round with draft tokens may take for the sake of the requests' TPOT targets.

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from codesign.policy.interface import Progress
from codesign.policy.traffic import COLD, Traffic


class SloRoom:
    """Seconds after which plain decoding would still keep every target that it can keep.

    Of the round a request gets one token, as the paper has it, and if the draft model has run
    what it says so far, one more with the mean chance; on deeper ones it does not count. Its
    target is one of the mean of all its tokens: there are those that it has, and those that are
    expected. One that would miss its target with plain rounds from now on has nothing to lose.

    Args:
        progress: Of each request; none if nobody knows, so that everything is allowed.
        missing: Tokens that the draft has not run, of each.
        common: Target of those that have none of their own; None for none.
        plain: Seconds of a plain round and the prompts between such.
        confidence: Mean chance of a likeliest token.
        traffic: How long answers are; until the next round.
    """

    def __init__(
        self,
        progress: Sequence[Progress],
        missing: Sequence[int],
        *,
        common: float | None,
        plain: float,
        confidence: float,
        traffic: Traffic,
    ) -> None:
        self._progress, self._missing, self._common = progress, missing, common
        self._plain, self._confidence, self._traffic = plain, confidence, traffic

    def allows(self, seconds: float) -> bool:
        """Whether a round may take so long."""
        return seconds <= self._sure or seconds <= self.longest

    @cached_property
    def _sure(self) -> float:
        """Less than ``longest``: what each keeps its target by, whatever is still to come.

        Most requests are far from it, and this is known at once.
        """
        common, plain, sure = self._common or math.inf, self._plain, math.inf
        for one in self._progress:
            target = one.slo_tpot or common
            left = target * (one.tokens + 1) - one.elapsed if target >= plain else 0.0
            if left < sure:
                sure = left
        return sure

    @cached_property
    def longest(self) -> float:
        """Seconds that a round may take."""
        if not self._progress:
            return math.inf
        progress, common, plain = self._progress, self._common, self._plain
        tokens_B = np.array([one.tokens for one in progress])
        left_B = self._traffic.expected_left(tokens_B)
        elapsed_B = np.array([one.elapsed for one in progress])
        target_B = np.array([one.slo_tpot or common for one in progress], float)  # nan for none
        room_B = target_B * (tokens_B + 1 + left_B) - elapsed_B - plain * left_B
        known_B = np.array(self._missing) < COLD
        longest_B = room_B + plain * np.minimum(known_B * self._confidence, left_B)
        return float(longest_B[room_B >= plain].min(initial=math.inf))
