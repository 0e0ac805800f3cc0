"""Forms of a step's time, each fitted to shapes by non-negative least squares (least_squares.py).

A shape is (rows, requests, context); its time is a quantile over repetitions. Which form is taken
is steps.py's choice.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.fit.least_squares import Floats, robust_fit
from codesign.policy.step_time import BUCKETS, FEW_ROWS, StepTime

if TYPE_CHECKING:
    import pandas as pd

TILES = (0, 4, 8)  # rows of a request that attention may take together: 16 or 32 query rows
_MAX_BENDS = 4  # of the piecewise form
# A parabola written out: within 0.5 % between knots, straight on beyond 262,144 rows.
_PROMPT_KNOTS = (0, *sorted({round(2.0 ** (i / 4.0)) for i in range(73)}))


@dataclass(frozen=True, slots=True)
class Shapes:
    """Median seconds by shape.

    Attributes:
        rows: (S,) rows of the forward.
        context: (S,) KV rows before it, summed over the requests.
        requests: (S,) that share it.
        seconds: (S,) over repetitions, the median or another quantile.
    """

    rows: Floats
    context: Floats
    requests: Floats
    seconds: Floats

    @classmethod
    def of(cls, steps: pd.DataFrame, quantile: float = 0.5) -> Shapes:
        """Shapes of a table of single timings (see codesign.fit)."""
        grouped = steps.groupby(["rows", "context", "requests"])["seconds"]
        found = grouped.median() if quantile == 0.5 else grouped.quantile(quantile, "lower")
        table = found.reset_index()
        names = ("rows", "context", "requests", "seconds")
        return cls(*(table[name].to_numpy(np.float64) for name in names))

    def without(self, index: int) -> Shapes:
        """All shapes but one."""
        return self.only(np.arange(len(self.seconds)) != index)

    def only(self, keep: NDArray[np.bool_]) -> Shapes:
        """A choice of the shapes."""
        columns = (self.rows, self.context, self.requests, self.seconds)
        return Shapes(*(column[keep] for column in columns))


def miss(time: StepTime, shapes: Shapes) -> float:
    """Mean relative error on the shapes themselves."""
    seconds_S = time.of_arrays(shapes.rows, shapes.context, shapes.requests)
    return float(np.mean(np.abs(seconds_S / shapes.seconds - 1.0)))


def fit_line(shapes: Shapes) -> StepTime:
    """``alpha * context + gamma * rows + delta``, no coefficient below 0."""
    design = np.column_stack([shapes.context, shapes.rows, np.ones_like(shapes.rows)])
    alpha, gamma, delta = robust_fit(design, shapes.seconds).tolist()
    return StepTime.linear(alpha=alpha, gamma=gamma, delta=delta)


def fit_quadratic(shapes: Shapes) -> StepTime:
    """A line, and ``cross`` seconds for each pair of a row and a token that it attends to.

    A row of a prompt attends to the context before the prompt and to the rows before it, so that
    whole prompts, measured without context, tell what a chunk of a prompt pays for its context.
    """
    pairs = shapes.rows * (shapes.context + shapes.rows / 2.0)
    design = np.column_stack([pairs, shapes.rows, np.ones_like(pairs)])
    cross, gamma, delta = robust_fit(design, shapes.seconds).tolist()
    return prompt_time(alpha=0.0, gamma=gamma, delta=delta, cross=cross)


def prompt_time(*, alpha: float, gamma: float, delta: float, cross: float) -> StepTime:
    """Seconds of prompt rows of which each attends to the context and to the rows before it.

    Args:
        alpha: Seconds per token of context.
        gamma: Seconds per row.
        delta: Seconds of a forward without rows.
        cross: Seconds per pair of a row and a token that it attends to.
    """
    seconds = tuple(delta + gamma * n + cross * n * n / 2.0 for n in _PROMPT_KNOTS)
    return StepTime(alpha=alpha, rows=_PROMPT_KNOTS, seconds=seconds, cross=cross)


def fit_piecewise(shapes: Shapes) -> StepTime:
    """``alpha * context + f(rows)``, f straight between a few bends and steeper after each."""
    measured = np.unique(shapes.rows)
    inner = measured[1:-1]
    picks = np.linspace(0, len(inner) - 1, min(_MAX_BENDS, len(inner))).round().astype(np.int64)
    bends = np.unique(inner[picks]) if len(inner) else inner
    after = np.maximum(shapes.rows[:, None] - bends[None, :], 0.0)
    ones = np.ones_like(shapes.rows)
    design = np.column_stack([shapes.context, ones, shapes.rows, after])
    alpha, delta, gamma, *steeper = robust_fit(design, shapes.seconds).tolist()
    knots = np.unique([0.0, *bends, measured[-1], measured[-1] + 1.0])
    seconds = delta + gamma * knots + np.maximum(knots[:, None] - bends, 0.0) @ np.array(steeper)
    return StepTime(alpha, tuple(int(n) for n in knots), tuple(seconds.tolist()))


def fit_table(shapes: Shapes) -> StepTime:
    """``alpha * context + f(rows)`` with a knot at each measured row count, f never falling.

    f is written as a sum of increments; that none is below 0 makes it monotone, so one
    non-negative least squares solves for alpha and an isotonic f at once.
    """
    knots = np.unique(shapes.rows)
    steps = (shapes.rows[:, None] >= knots[None, :]).astype(np.float64)
    alpha, *increments = robust_fit(
        np.column_stack([shapes.context, steps]), shapes.seconds
    ).tolist()
    return StepTime(
        alpha=alpha,
        rows=tuple(int(knot) for knot in knots),
        seconds=tuple(np.cumsum(increments).tolist()),
    )


def fit_stairs(shapes: Shapes, *, waits_for_host: bool) -> StepTime:
    """``alpha * context + gamma * rows + each * (parts - 1) + f(bucket) + padding``, and two more.

    ``cross`` is for each row and each token of its own request's context. Rows are filled up to a
    bucket, and f never falls from one to the next. Where a bucket is not full, ``padding`` seconds
    are added, 0 or more: some kernels give such rows a pass of their own. So a full bucket may take
    less than a row fewer. What the host does goes by requests and rows.
    Several requests take a constant more than one, which f includes: ranks run ahead by the draft's
    steps of one request, those of several wait for the host.
    Attention goes by parts: requests, or tiles of one request's rows where these are more. How many
    rows a tile has follows from heads that a profile does not name: the best of ``TILES`` is taken,
    the first of those that no timing tells apart, however a machine rounds.
    In the first bucket blocks are dealt out to requests by powers of two, for ``doubling`` seconds
    each; more rows fill a chip by themselves. Where several requests wait for the host, as a
    draft's do, that hides it.
    Buckets beyond the rows that were timed cost as much more for each row as the last one that was
    (``_untimed_too``). More rows than the largest bucket run in several forwards.
    """
    halves = not waits_for_host
    times = (_stairs(shapes, tile, halves=halves) for tile in TILES)
    return min(times, key=lambda time: round(miss(time, shapes), 9))


def _stairs(shapes: Shapes, tile: int, *, halves: bool) -> StepTime:
    """Stairs with tiles of so many rows, 0 for a request's rows together; with ``doubling``?"""
    largest = shapes.rows.max()
    first = [bucket for bucket in BUCKETS if bucket < largest]
    parts = np.maximum(shapes.requests, shapes.rows / tile) if tile else shapes.requests
    doublings = np.log2(shapes.requests) * (shapes.rows <= FEW_ROWS) * halves
    design = np.column_stack(
        [
            shapes.context,
            shapes.rows * shapes.context / shapes.requests,
            shapes.rows,
            parts - 1.0,
            doublings,
            (~np.isin(shapes.rows, BUCKETS)).astype(np.float64),
            (shapes.requests > 1).astype(np.float64),
            np.ones_like(shapes.rows),
            *((shapes.rows > bucket).astype(np.float64) for bucket in first),
        ]
    )
    alpha, cross, gamma, each, doubling, padding, several, *steps = robust_fit(
        design, shapes.seconds
    ).tolist()
    heights = _untimed_too(several + np.cumsum(steps))
    rows: list[int] = []
    seconds: list[float] = []
    for low, bucket, height in zip((0, *BUCKETS), BUCKETS, heights, strict=False):
        rows += [low + 1, bucket - 1, bucket]
        seconds += [height + padding + gamma * (low + 1), height + padding + gamma * (bucket - 1)]
        seconds.append(height + gamma * bucket)
    rows += [BUCKETS[-1] + 1, 2 * BUCKETS[-1]]
    seconds += [seconds[-1] + seconds[0], 2.0 * seconds[-1]]
    return StepTime(
        alpha,
        tuple(rows),
        tuple(map(float, seconds)),
        cross=cross,
        each=each,
        tile=tile,
        doubling=doubling,
    )


def _untimed_too(heights: Floats) -> Floats:
    """(B,) seconds of all buckets, from those of the first ones.

    Each bucket has twice the rows of the one before. Products of many rows run tile by tile, so
    that from some bucket on each row costs the same, and a bucket twice as much more.
    """
    rise = heights[-1] - heights[-2] if len(heights) > 1 else 0.0
    doublings = 2.0 ** np.arange(1, len(BUCKETS) - len(heights) + 1)
    return np.append(heights, heights[-1] + rise * np.cumsum(doublings))


def fit_stream_stairs(shapes: Shapes, *, waits_for_host: bool = False) -> StepTime:
    """Stairs, and by rows what steps of one request were timed above or below them.

    Ranks run ahead by the draft's steps of one request, so that its rows do not wait for the host,
    as those of several do; the target's one row is less than a bucket, too. That is no matter of
    stairs, and a stream's steps have few numbers of rows, which are all timed: there the timings
    count, and a form for what lies between them. Two to eight rows fill the same bucket, and each
    is timed a few times on a host that varies: they are on one line.
    """
    time = fit_stairs(shapes, waits_for_host=waits_for_host)
    one = shapes.only(shapes.requests == 1)
    if not len(one.rows):
        return time
    beyond = one.seconds - time.of_arrays(one.rows, one.context)
    rows, place = np.unique(one.rows, return_inverse=True)
    # Of the same rows, timed at several contexts: what the context takes of one request alone.
    context, left = (each - (np.bincount(place, each) / np.bincount(place))[place]
                     for each in (one.context, beyond))  # fmt: skip
    alpha = max(float(context @ left) / max(float(context @ context), 1.0), -time.alpha)
    beyond = beyond - alpha * one.context
    seconds = np.array([np.median(beyond[place == i]) for i in range(len(rows))])
    is_shared = (rows > 1) & (rows <= BUCKETS[0])
    if is_shared.sum() > 1:
        stairs = time.of_arrays(rows, 0.0)
        shared = is_shared[place]
        straight = _usual_line(one.rows[shared], (beyond + stairs[place])[shared])
        seconds = np.where(is_shared, straight(rows) - stairs, seconds)
    first = int(np.searchsorted(rows, 2.0))
    if 0 < first < len(rows) and rows[first] > 2:  # else halfway to one row, which takes less
        rows, seconds = np.insert(rows, first, 2.0), np.insert(seconds, first, seconds[first])
    knots = (*map(int, rows), int(rows[-1]) + 1)  # the last goes on
    return replace(time, alone=StepTime(alpha, knots, tuple(map(float, (*seconds, seconds[-1])))))


def _usual_line(x: Floats, y: Floats) -> Callable[[Floats], Floats]:
    """The line of the median slope between two points, through the median of what it leaves."""
    first, second = np.nonzero(x[:, None] < x[None, :])
    slope = np.median((y[second] - y[first]) / (x[second] - x[first]))
    start = np.median(y - slope * x)
    return lambda places: start + slope * places
