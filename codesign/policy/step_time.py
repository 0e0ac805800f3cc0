"""Seconds of a step, as a function of what the step does.

Both papers write a forward as T = alpha * context + gamma * rows + delta. On some machines the cost
of a row is not constant (a matrix-vector product becomes a matrix product), so ``gamma * rows`` may
be replaced by a table over rows where the line is off by more than 5 % (codesign.fit). Long prompts
add a term for rows times context, as each row of a chunk attends to all that stands before it.

Source:
    SpecServe, equations 2 to 6 (papers' form).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codesign.policy.host_cost import SEVERAL

BUCKETS = (8, 16, 32, 64, 128)  # rows that a forward on ranks is filled up to: one costs what 8 do
FEW_ROWS = BUCKETS[0]  # attention of more fills a chip, however few requests they belong to
MOST_AHEAD = 8.0  # requests of the largest batch that profiles serve plainly
_MOST_AHEAD = 0.5  # of a step without context that it may take less: none takes less than nothing


def filled_up(rows: int) -> int:
    """Rows of the forward on ranks that so many are filled up to; more than fit one stay alone."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), rows)


class _Segments:
    """Slots of what a ``StepTime`` works out once, kept out of its fields and its file."""

    __slots__ = ("_arrays", "_first", "_inner", "_segments")

    _first: float  # fewer rows than these cost as much as these
    _inner: tuple[int, ...]  # knots between two segments
    _segments: tuple[tuple[float, float, float], ...]  # (rows, seconds, seconds per row) each
    _arrays: tuple[NDArray[np.float64], NDArray[np.float64]]  # both for many forwards


@dataclass(frozen=True, slots=True)
class StepTime(_Segments):
    """Seconds of one forward: ``alpha * context + cross * rows * context + f(rows)``.

    Attributes:
        alpha: Seconds per token of context that the rows attend to.
        rows: Knots, ascending row counts; at least one.
        seconds: Seconds at each knot without context. Linear between knots; beyond the last knot
            the last slope goes on (with a single knot: ``gamma``).
        gamma: Seconds per row beyond a single knot.
        cross: Seconds per row and token of context: attention of a chunk of a long prompt over
            what stands before it. Of one request: rows of others do not attend to its context.
        apart: Prompts of several requests run one after another, each in a forward of its own.
        each: Seconds for each request beyond the first: what a host and attention do one by one.
        tile: Rows that attention takes together of one request. More of them are as much work as
            another request, so that ``each`` counts the tiles where there are more of those than
            requests. 0 where rows of a request make no difference.
        doubling: Seconds for each doubling of the requests, of at most ``FEW_ROWS`` rows: attention
            deals out its blocks by powers of two, so that each request has half as many.
        alone: What a forward of one request takes above or below all this, by rows and context;
            None where it takes what one of several does.
        ahead: Seconds that a forward of several requests takes less where each has one row, as in
            plain decoding: the host enqueues it while the one before it runs. At most half of what
            it takes without context, so that it goes on to cost ``alpha`` for each token of it.
        ahead_each: The same for each request beyond the first, up to ``MOST_AHEAD``.
    """

    alpha: float
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    gamma: float = 0.0
    cross: float = 0.0
    apart: bool = False
    each: float = 0.0
    tile: int = 0
    alone: StepTime | None = None
    doubling: float = 0.0
    ahead: float = 0.0
    ahead_each: float = 0.0

    def __post_init__(self) -> None:
        if len(self.rows) == 1:
            first, segments = -inf, ((float(self.rows[0]), self.seconds[0], self.gamma),)
        else:
            first = float(self.rows[0])
            segments = tuple(
                (float(r0), s0, (s1 - s0) / (r1 - r0))
                for (r0, s0), (r1, s1) in pairwise(zip(self.rows, self.seconds, strict=True))
            )
        object.__setattr__(self, "_first", first)
        object.__setattr__(self, "_inner", self.rows[1:-1])
        object.__setattr__(self, "_segments", segments)
        arrays = np.array(self._inner, np.float64), np.array(segments, np.float64).T
        object.__setattr__(self, "_arrays", arrays)

    def __reduce__(self) -> tuple[type[StepTime], tuple[object, ...]]:
        # What dataclasses generate restores the fields only.
        return StepTime, (
            self.alpha, self.rows, self.seconds, self.gamma, self.cross, self.apart, self.each,
            self.tile, self.alone, self.doubling, self.ahead, self.ahead_each,
        )  # fmt: skip

    @classmethod
    def linear(cls, *, alpha: float, gamma: float, delta: float, cross: float = 0.0) -> StepTime:
        """The papers' form, ``alpha * context + gamma * rows + delta``.

        Args:
            alpha: Seconds per token of context.
            gamma: Seconds per row.
            delta: Seconds of a forward without rows.
            cross: Seconds per row and token of context.
        """
        return cls(alpha=alpha, rows=(0,), seconds=(delta,), gamma=gamma, cross=cross)

    def scaled(self, factor: float) -> StepTime:
        """The same step on a machine that takes ``factor`` times as long."""
        return StepTime(
            alpha=self.alpha * factor,
            rows=self.rows,
            seconds=tuple(s * factor for s in self.seconds),
            gamma=self.gamma * factor,
            cross=self.cross * factor,
            apart=self.apart,
            each=self.each * factor,
            tile=self.tile,
            alone=None if self.alone is None else self.alone.scaled(factor),
            doubling=self.doubling * factor,
            ahead=self.ahead * factor,
            ahead_each=self.ahead_each * factor,
        )

    def later(self, seconds: float) -> StepTime:
        """The same step with so many seconds of something else."""
        return replace(self, seconds=tuple(s + seconds for s in self.seconds))

    def with_dearer_rows(self, seconds: float) -> StepTime:
        """The same step with so many seconds more for each row where several requests share it."""
        if not seconds:
            return self
        alone = self.alone or StepTime.linear(alpha=0.0, gamma=0.0, delta=0.0)
        more = tuple([s + seconds * n for n, s in zip(self.rows, self.seconds, strict=True)])
        less = tuple([s - seconds * n for n, s in zip(alone.rows, alone.seconds, strict=True)])
        alone = replace(alone, seconds=less, gamma=alone.gamma - seconds)
        return replace(self, seconds=more, gamma=self.gamma + seconds, alone=alone)

    def later_alone(self, seconds: float) -> StepTime:
        """The same step with so many seconds of something else where it is of one request."""
        if not seconds:
            return self
        alone = self.alone or StepTime.linear(alpha=0.0, gamma=0.0, delta=0.0)
        return replace(self, alone=alone.later(seconds))

    def of_arrays(
        self, rows: ArrayLike, context: ArrayLike, requests: ArrayLike = 1.0
    ) -> NDArray[np.float64]:
        """Seconds of many forwards, each to the last digit what a call gives; shapes broadcast.

        Args:
            rows: Rows of each forward, of all its requests.
            context: KV rows before it, of all its requests.
            requests: Among which both are shared equally; rows attend to their own request's
                context. None count as one.
        """
        counts, before = np.asarray(rows, np.float64), np.asarray(context, np.float64)
        among: NDArray[np.float64] = np.maximum(np.asarray(requests, np.float64), 1.0)
        inner, segments = self._arrays
        at = inner.searchsorted(counts, side="right")
        starts, fixed, slopes = (column[at] for column in segments)
        beyond = np.maximum(counts, self._first) - starts
        seconds = fixed + slopes * beyond + self.alpha * before
        if self.each:
            parts = among
            if self.tile:
                parts = np.maximum(parts, counts / self.tile)
            seconds = seconds + self.each * (parts - 1.0)
        if self.cross:
            seconds = seconds + self.cross * counts * before / among
        if self.doubling:
            seconds = seconds + self.doubling * np.where(counts <= FEW_ROWS, np.log2(among), 0.0)
        if self.ahead or self.ahead_each:
            less = self.ahead + self.ahead_each * (np.minimum(among, MOST_AHEAD) - 1.0)
            less = np.minimum(less, _MOST_AHEAD * (seconds - self.alpha * before))
            is_plain = (among >= SEVERAL) & (counts <= among)
            seconds = seconds - np.where(is_plain, less, 0.0)
        if self.alone is not None:
            seconds = seconds + np.where(among < SEVERAL, self.alone.of_arrays(counts, before), 0.0)
        return seconds

    def __call__(self, rows: float, context: float = 0.0, requests: float = 1.0) -> float:
        """Seconds of a forward of ``rows`` rows of all requests over ``context`` tokens in all.

        Rows and context are shared equally among the requests; rows attend to their own's. None
        count as one: a policy prices the rounds of an empty batch, too.
        """
        requests = requests if requests > 1.0 else 1.0
        r0, s0, slope = self._segments[bisect_right(self._inner, rows)]
        first = self._first
        seconds = s0 + slope * ((rows if rows > first else first) - r0) + self.alpha * context
        if self.each:
            parts = requests
            if self.tile and rows > requests * self.tile:
                parts = rows / self.tile
            seconds += self.each * (parts - 1.0)
        if self.cross:
            seconds += self.cross * rows * context / requests
        if self.doubling and requests > 1.0 and rows <= FEW_ROWS:
            seconds += self.doubling * _doublings(requests)
        if (self.ahead or self.ahead_each) and requests >= SEVERAL and rows <= requests:
            less = self.ahead + self.ahead_each * (min(requests, MOST_AHEAD) - 1.0)
            seconds -= min(less, _MOST_AHEAD * (seconds - self.alpha * context))
        if self.alone is not None and requests < SEVERAL:
            seconds += self.alone(rows, context)
        return seconds

    def of_prompts(self, prompts: Sequence[tuple[int, int]], others: int = 0) -> float:
        """Seconds of rows of several prompts, which do not attend to each other.

        With ``cross``, ``f`` holds what the rows of a prompt pay for those before them, which grows
        with their square: for two prompts it is paid twice, not four times.

        Args:
            prompts: Rows of each, and KV rows before them.
            others: Rows of requests that decode in the same forward; without their context. Not
                counted where prompts run apart, as they then have another forward.
        """
        if self.apart:
            return sum([self(rows, context) for rows, context in prompts])
        if not self.cross:
            rows, context = (sum(numbers) for numbers in zip((others, 0), *prompts, strict=True))
            return self(rows, context)
        fixed = self(0.0)
        parts = [self(rows, context) - fixed for rows, context in (*prompts, (others, 0)) if rows]
        return fixed + sum(parts)


@lru_cache(maxsize=256)
def _doublings(requests: float) -> float:
    """As NumPy says in ``of_arrays``: on some processors its last digit is not Python's."""
    return float(np.log2(requests))
