"""Seconds of one model's forwards by their rows, in the round at hand.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

import numpy as np
from numpy.typing import NDArray

from codesign.policy.cost import StepTime

Floats = NDArray[np.float64]

_FAR = 4096.0  # tokens of context by which its price is found
_SPARE, _NEXT = 256, 8  # rows beyond those that are asked for: more will be, ever and in a round
_FIRSTS = 320  # rows whose prices are listed from a list
_NOTHING: Floats = np.empty(0)
_Part = tuple[float, float]  # of a price: without context, for each token of it
_Known = tuple[Floats, Floats, Floats, list[_Part], _Part, _Part]
_NONE_KNOWN: _Known = _NOTHING, _NOTHING, _NOTHING, [], (0.0, 0.0), (0.0, 0.0)


class RowPrices:
    """Seconds of one model's forwards by their rows, in the round at hand.

    Args:
        step: Seconds of a forward.
        each: Seconds that the host takes for each row above the base.

    Attributes:
        num_found: Rows, up to which prices were asked for or are known besides.
    """

    def __init__(self, step: StepTime, each: float = 0.0) -> None:
        self._step, self.each = step, each
        self._known: dict[int, _Known] = {}  # see ``_find``; by requests
        self._batch = -1  # none yet
        self._longest = 0  # list of prices that was asked for lately
        self.begin(0, 0, 0)

    def begin(self, batch: int, context: int, base: int, more: float = 0.0) -> None:
        """A round of so many requests and KV rows.

        Args:
            batch: Requests.
            context: KV rows of all of them.
            base: Rows at which lists of prices start.
            more: Seconds of whatever else runs with each forward.
        """
        self._context, self._base, self._more = context, base, more
        if batch != self._batch:
            self._batch = batch
            known = self._known.get(batch, _NONE_KNOWN)
            self._fixed, self._per_context, self._above, self._firsts = known[:4]
            self._rise, self._fall = known[4:]
            self.num_found = len(self._fixed)
            self._longest = 0
        self._prices = _NOTHING  # from ``base`` on; worked out when first asked for
        self._listed: list[float] = []  # the same
        self._single: dict[int, float] = {}  # the same, of those that were asked for by ``at``

    def forward(self, rows: float, context: int) -> float:
        """Seconds of one forward."""
        if not isinstance(rows, int):
            return self._step(rows, context, self._batch) + self._more
        if rows >= len(self._firsts):
            if rows >= self.num_found:
                self._find(rows)
            return context * self._per_context.item(rows) + self._more + self._fixed.item(rows)
        fixed, per_context = self._firsts[rows]
        return context * per_context + self._more + fixed

    def of(self, rows: float, context: int) -> float:
        """Seconds of one forward, and what the host takes for its rows."""
        seconds = self.forward(rows, context)
        return seconds + self.each * (rows - self._base) if rows > self._base else seconds

    def __call__(self, count: int) -> Floats:
        """(count + 1,) the same of 0, ..., ``count`` rows above the base; read-only."""
        if count >= len(self._prices):
            self._work_out(count)
        return self._prices[: count + 1]

    def listed(self, count: int) -> list[float]:
        """The same in a list, to the last digit, and maybe prices of more rows; read-only."""
        if count >= (known := len(self._listed)):
            # At first no more: a round's first look asks for few, and others are foreseen.
            first, last = self._base + known, self._base + count + (_NEXT if known else 1)
            if last > len(self._firsts):
                self._listed = self(count).tolist()
                return self._listed
            context, more, each = self._context, self._more, self.each
            self._listed += [
                context * per_context + more + fixed + each * i
                for i, (fixed, per_context) in enumerate(self._firsts[first:last], known)
            ]
        return self._listed

    def at(self, count: int) -> float:
        """The last price of such a list, without the others."""
        if (price := self._single.get(count)) is None:
            if (rows := self._base + count) < len(self._firsts):
                fixed, per_context = self._firsts[rows]
                price = self._context * per_context + self._more + fixed + self.each * count
            else:
                price = self.of(rows, self._context)
            self._single[count] = price
        return price

    @property
    def rise(self) -> float:
        """Seconds by which a further row above the base makes a price higher, at least.

        Less than 0 where it may make it lower; of up to ``num_found`` rows.
        """
        fixed, per_context = self._rise
        return fixed + self._context * per_context + self.each

    @property
    def fall(self) -> float:
        """Seconds by which a price may be less than that of fewer rows, at most."""
        fixed, per_context = self._fall
        return fixed + self._context * per_context

    def _work_out(self, count: int) -> None:
        # At once as many as in rounds before; of more there will be more.
        self._longest = max(self._longest, count + _SPARE // 2 if len(self._prices) else count + 1)
        first, end = self._base, self._base + self._longest
        if end > self.num_found:
            self._find(end)
        prices = self._context * self._per_context[first:end]
        prices += self._more
        prices += self._fixed[first:end]
        if self.each:
            prices += self._above[: end - first]
        prices.flags.writeable = False
        self._prices = prices

    def _find(self, last: int) -> None:
        """Seconds without context of 0, 1, 2, .. rows, and those for each token of it."""
        rows = np.arange(2 * last + _SPARE)
        self._fixed = self._step.of_arrays(rows, 0.0, self._batch)
        far = self._step.of_arrays(rows, _FAR, self._batch)
        self._per_context = (far - self._fixed) / _FAR
        self._above = (self.each * rows).astype(np.float64, copy=False)
        firsts = self._fixed[:_FIRSTS].tolist(), self._per_context[:_FIRSTS].tolist()
        self._firsts = list(zip(*firsts, strict=True))
        own = max(min(self._batch, last), 1)  # the target's forwards have more rows
        self._rise = _least_rise(self._fixed[own:]), _least_rise(self._per_context[own:])
        self._fall = _most_fall(self._fixed[1:]), _most_fall(self._per_context[1:])
        self._known[self._batch] = (
            self._fixed, self._per_context, self._above, self._firsts, self._rise, self._fall,
        )  # fmt: skip
        self.num_found = len(rows)


def _least_rise(prices: Floats) -> float:
    return float(np.diff(prices).min())


def _most_fall(prices: Floats) -> float:
    return float((np.maximum.accumulate(prices) - prices).max())


def numbers(found: Sequence[float]) -> Floats:
    """An array of these, read-only; half as long as by numpy's own ways from a list."""
    return np.frombuffer(pack(f"{len(found)}d", *found))
