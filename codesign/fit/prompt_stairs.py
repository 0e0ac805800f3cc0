"""Seconds of a prompt on rank groups: stairs as far as graphs go, then whatever fits longer ones.

Up to 256 rows a prompt runs as a graph, padded to a bucket: 147 rows cost what 256 do. Up to 2048
some models' do, and others' are launched kernel by kernel, with their own rows: where two prompts
of a bucket were timed, they tell. Longer ones are launched.

Must not import torch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from codesign.fit.least_squares import Floats
from codesign.fit.step_forms import Shapes, fit_line, fit_quadratic, fit_table, miss
from codesign.policy.cost import StepTime

if TYPE_CHECKING:
    import pandas as pd

PROMPT_BUCKETS = (16, 32, 64, 128, 256)  # rows that a prompt on ranks is filled up to
LONGEST = PROMPT_BUCKETS[-1]
LONG_BUCKETS = (512, 768, 1024, 1536, 2048)  # that prompts may be filled up to
_FEWEST_PAIRS = 3  # of prompts timed in one long bucket, from which all are looked at by buckets
# Rows of a prompt from which its attention shows beside all else that a forward on ranks does:
# below, a parabola follows whatever disturbed the longest prompt, and says hours of longer ones.
MIN_PARABOLA_ROWS = 1024
# Longer prompts wait for the host, which is disturbed now and then: that only adds.
_LONG_QUANTILE = 0.25
_FLAT = 0.03  # by which two prompts of a bucket that are filled up to it may differ
_MAX_SMOOTH_MISS = 0.03  # up to which longer prompts lie on a line or a parabola
_TIE = 1e-6  # by which the error of a parabola must be less than the line's


def prompt_shapes(steps: pd.DataFrame) -> Shapes:
    """Shapes of prompts: medians as far as graphs go, a low quantile of longer ones."""
    is_long = steps["rows"] > LONGEST
    parts = [
        Shapes.of(part, quantile)
        for part, quantile in ((steps.loc[~is_long], 0.5), (steps.loc[is_long], _LONG_QUANTILE))
        if len(part)
    ]
    columns = ("rows", "context", "requests", "seconds")
    return Shapes(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def fit_prompt_stairs(shapes: Shapes) -> StepTime:
    """One height for each bucket, never falling, and a form of their own for longer prompts."""
    is_long = shapes.rows > LONGEST
    heights = _heights(shapes.only(~is_long)) if not is_long.all() else None
    long = shapes.only(is_long) if is_long.any() else shapes
    climbs = _climbs(long)
    beyond = _long_prompts(_longest_each(long) if climbs else long)
    if heights is None:
        return beyond
    knots, seconds = [PROMPT_BUCKETS[0]], [heights[0]]
    for low, bucket, height in zip(PROMPT_BUCKETS, PROMPT_BUCKETS[1:], heights[1:], strict=False):
        knots += [low + 1, bucket]
        seconds += [height, height]
    for rows, height in climbs:
        knots.append(rows)
        seconds.append(max(height, seconds[-1]))
    ends = [knots[-1] + 1, *(n for n in beyond.rows if n > knots[-1] + 1)]
    ends.append(2 * ends[-1])  # where its last slope shows
    knots += ends
    seconds += [max(beyond(n), seconds[-1]) for n in ends]
    return StepTime(beyond.alpha, tuple(knots), tuple(map(float, seconds)), cross=beyond.cross)


def _climbs(long: Shapes) -> list[tuple[int, float]]:
    """(rows, seconds) of both edges of each long bucket, straight on from the prompts within it.

    A bucket of one prompt is as flat as most others are, or has that prompt alone. None at all if
    few buckets have two.
    """
    inside = [
        (low + 1, high, long.only((long.rows > low) & (long.rows <= high)))
        for low, high in pairwise((LONGEST, *LONG_BUCKETS))
    ]
    slopes = [_slope(part) for _, _, part in inside if len(part.rows) > 1]
    if len(slopes) < _FEWEST_PAIRS:
        return []
    is_flat = float(np.median(slopes)) <= 0.0
    climbs: list[tuple[int, float]] = []
    for low, high, part in inside:
        if len(part.rows) == 0:
            continue
        rows, seconds = float(part.rows.max()), float(part.seconds[part.rows.argmax()])
        if len(part.rows) > 1:
            slope = _slope(part)
            climbs += [(edge, seconds + slope * (edge - rows)) for edge in (low, high)]
        else:
            climbs += [(edge, seconds) for edge in ((low, high) if is_flat else (int(rows),))]
    return climbs


def _slope(part: Shapes) -> float:
    """Seconds a row between the shortest and the longest prompt of a bucket, 0 within noise."""
    first, last = int(part.rows.argmin()), int(part.rows.argmax())
    if part.seconds[last] <= (1.0 + _FLAT) * part.seconds[first]:
        return 0.0
    return float((part.seconds[last] - part.seconds[first]) / (part.rows[last] - part.rows[first]))


def _longest_each(long: Shapes) -> Shapes:
    """The longest prompt of each long bucket, and all that are longer than these."""
    edges = np.array((LONGEST, *LONG_BUCKETS))
    bucket = np.searchsorted(edges, long.rows)
    is_last = [n == long.rows[bucket == b].max() for n, b in zip(long.rows, bucket, strict=True)]
    return long.only(np.array(is_last) | (bucket == len(edges)))


def _heights(short: Shapes) -> Floats:
    """(B,) seconds of each bucket; one that was not timed lies between its neighbours."""
    found = [
        (bucket, float(np.median(short.seconds[inside])))
        for low, bucket in pairwise((0, *PROMPT_BUCKETS))
        if (inside := (short.rows > low) & (short.rows <= bucket)).any()
    ]
    buckets, seconds = zip(*found, strict=True)
    return np.interp(PROMPT_BUCKETS, buckets, np.maximum.accumulate(seconds))


def _long_prompts(long: Shapes) -> StepTime:
    """The smoothest form that meets these prompts; straight through the origin if there is one."""
    if len(long.seconds) < 2:
        return StepTime.linear(alpha=0.0, gamma=float((long.seconds / long.rows)[-1]), delta=0.0)
    best = fit_line(long)
    if len(long.seconds) > 2 and long.rows.max() >= MIN_PARABOLA_ROWS:
        parabola = fit_quadratic(long)
        # One without a curve is the line: rounding must not say in which form it is kept.
        if miss(parabola, long) < miss(best, long) - _TIE:
            best = parabola
    return best if miss(best, long) <= _MAX_SMOOTH_MISS else fit_table(long)
