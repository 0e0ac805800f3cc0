"""What a token of each request weighs where rows are shared out: more if it is behind its target.

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from codesign.policy.interface import Progress
from codesign.policy.row_prices import Floats

MOST_URGENT = 2.0  # weight of a token of a request that is behind its target
HOPELESS = 1.5  # times its target per token, from which a request counts like any other


class Urgency:
    """What a token of each request of a round weighs, found when first needed: most never are.

    Args:
        progress: Of B requests.
        step: Seconds of a plain round.
        slo_tpot: Target per token of those that have none of their own.
    """

    def __init__(self, progress: Sequence[Progress], step: float, slo_tpot: float | None) -> None:
        self._found = partial(urgencies, progress, step, slo_tpot)

    @cached_property
    def weights(self) -> Floats | None:
        """As of ``urgencies``."""
        return self._found()

    def find(self) -> None:
        """Find them now, as there is time."""
        _ = self.weights


def urgencies(progress: Sequence[Progress], step: float, slo_tpot: float | None) -> Floats | None:
    """(B,) weight of a token of each request; None if all count 1.

    Args:
        progress: Of B requests.
        step: Seconds of a plain round.
        slo_tpot: Target per token of those that have none of their own.
    """
    common, weights = slo_tpot or math.inf, None
    for i, one in enumerate(progress):
        target = one.slo_tpot or common
        if one.elapsed + step > target * (one.tokens + 1):
            weights = np.ones(len(progress)) if weights is None else weights
            weights[i] = _urgency(one, target, step)
    return weights


def _urgency(one: Progress, target: float, step: float) -> float:
    """Weight of the tokens of a request that is owed more than one: how many, within bounds."""
    if one.elapsed > HOPELESS * target * (one.tokens + 1):
        return 1.0
    return min((one.elapsed + step) / target - one.tokens, MOST_URGENT)
