"""Quantiles of Student's t distribution for whole degrees of freedom.

Source:
    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4: with
    theta = atan(t / sqrt(freedom)), the chance to be within +-t is a finite sum in sin and cos.
"""

from __future__ import annotations

import functools
import math

_HALVINGS = 60  # of an angle of at most pi / 2: to the last bit


@functools.cache
def student_t_quantile(freedom: int, chance: float) -> float:
    """The value that a t-distributed number is below with this chance.

    Args:
        freedom: Degrees of freedom, at least 1.
        chance: Between 1/2 and 1, the latter not included.
    """
    low, high = 0.0, math.pi / 2.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if _chance_within(middle, freedom) < 2.0 * chance - 1.0:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _chance_within(theta: float, freedom: int) -> float:
    """Chance of the angle of a t-distributed number to lie within +-theta."""
    sin, cos = math.sin(theta), math.cos(theta)
    is_odd = freedom % 2
    term, total = (cos, 0.0) if is_odd else (1.0, 0.0)
    for divisor in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= cos * cos * (divisor - 1) / divisor
    return 2.0 / math.pi * (theta + sin * total) if is_odd else sin * total
