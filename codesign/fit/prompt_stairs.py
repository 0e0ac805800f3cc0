"""Seconds of a prompt on rank groups: stairs as far as graphs go, then whatever fits longer ones.

Up to 256 rows a prompt runs as a graph, padded to a bucket: 147 rows cost what 256 do. Longer ones
are launched kernel by kernel, with their own rows and other kernels.

Must not import torch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from codesign.fit.step_forms import Floats, Shapes, fit_line, fit_quadratic, fit_table, miss
from codesign.policy.cost import StepTime

if TYPE_CHECKING:
    import pandas as pd

PROMPT_BUCKETS = (16, 32, 64, 128, 256)  # rows that a prompt on ranks is filled up to
LONGEST = PROMPT_BUCKETS[-1]
# Rows of a prompt from which its attention shows beside all else that a forward on ranks does:
# below, a parabola follows whatever disturbed the longest prompt, and says hours of longer ones.
MIN_PARABOLA_ROWS = 1024
# Longer prompts wait for the host, which is disturbed now and then: that only adds.
_LONG_QUANTILE = 0.25
_MAX_SMOOTH_MISS = 0.03  # up to which longer prompts lie on a line or a parabola


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
    beyond = _long_prompts(shapes.only(is_long) if is_long.any() else shapes)
    if heights is None:
        return beyond
    knots, seconds = [PROMPT_BUCKETS[0]], [heights[0]]
    for low, bucket, height in zip(PROMPT_BUCKETS, PROMPT_BUCKETS[1:], heights[1:], strict=False):
        knots += [low + 1, bucket]
        seconds += [height, height]
    ends = [LONGEST + 1, *(n for n in beyond.rows if n > LONGEST + 1)]
    ends.append(2 * ends[-1])  # where its last slope shows
    knots += ends
    seconds += [max(beyond(n), heights[-1]) for n in ends]
    return StepTime(beyond.alpha, tuple(knots), tuple(map(float, seconds)), cross=beyond.cross)


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
    smooth = [fit_line(long)]
    if len(long.seconds) > 2 and long.rows.max() >= MIN_PARABOLA_ROWS:
        smooth.append(fit_quadratic(long))
    best = min(smooth, key=lambda time: miss(time, long))
    return best if miss(best, long) <= _MAX_SMOOTH_MISS else fit_table(long)
