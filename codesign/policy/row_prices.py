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
_Row = tuple[float, float]  # seconds without context of so many rows, for each token of it
_Known = tuple[Floats, Floats, Floats, list[_Row]]
_NONE_KNOWN: _Known = _NOTHING, _NOTHING, _NOTHING, []


class RowPrices:
    """Seconds of one model's forwards by their rows, in the round at hand.

    Args:
        step: Seconds of a forward.
        each: Seconds that the host takes for each row above the base.
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
            self._fixed, self._per_context, self._above, self._firsts = known
            self._num_found = len(self._fixed)
            self._longest = 0
        self._prices = _NOTHING  # from ``base`` on; worked out when first asked for
        self._listed: list[float] = []  # the same
        self._single: dict[int, float] = {}  # the same, of those that were asked for by ``at``

    def forward(self, rows: float, context: int) -> float:
        """Seconds of one forward."""
        if not isinstance(rows, int):
            return self._step(rows, context, self._batch) + self._more
        if rows >= self._num_found:
            self._find(rows)
        return context * self._per_context.item(rows) + self._more + self._fixed.item(rows)

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
            first, last = self._base + known, self._base + count + _NEXT
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
            self._single[count] = price = self.of(self._base + count, self._context)
        return price

    def _work_out(self, count: int) -> None:
        # At once as many as in rounds before; of more there will be more.
        self._longest = max(self._longest, count + _SPARE // 2 if len(self._prices) else count + 1)
        first, end = self._base, self._base + self._longest
        if end > self._num_found:
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
        self._known[self._batch] = self._fixed, self._per_context, self._above, self._firsts
        self._num_found = len(rows)


def numbers(found: Sequence[float]) -> Floats:
    """An array of these, read-only; half as long as by numpy's own ways from a list."""
    return np.frombuffer(pack(f"{len(found)}d", *found))
