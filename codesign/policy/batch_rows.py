"""Rows of a batch's forwards: what they cost, and what the nodes are worth that may fill them.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from codesign.policy.budget_tree import BudgetTree

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choice:
    """The best nodes to verify, of those that are drafted.

    Attributes:
        value: Expected tokens per second; see ``BatchTree._value``.
        rate: Tokens that a second is worth.
        tokens: Expected tokens.
        rows: Nodes beside the roots.
        level: Least weight, urgency times chance, of a chosen node.
    """

    value: float
    rate: float
    tokens: float
    rows: int
    level: float


class RowPrices:
    """Seconds of forwards by their rows, worked out once."""

    def __init__(self, seconds: Callable[[float, float], float]) -> None:
        self._seconds = seconds
        self._fixed = np.empty(0)
        self._per_context = np.empty(0)

    def __call__(self, first: int, count: int, context: int) -> Floats:
        """(count + 1,) seconds of forwards of ``first``, ..., ``first + count`` rows."""
        if first + count >= len(self._fixed):
            size = 2 * (first + count) + 64
            fixed = [self._seconds(rows, 0.0) for rows in range(size)]
            far = [self._seconds(rows, 4096.0) for rows in range(size)]
            self._fixed = np.array(fixed)
            self._per_context = (np.array(far) - self._fixed) / 4096.0
        part = slice(first, first + count + 1)
        return self._fixed[part] + context * self._per_context[part]


def worth_of_nodes(trees: Sequence[BudgetTree], urgency: Floats | None, most: int) -> Floats:
    """(N,) urgency times chance of all drafted nodes, descending.

    Args:
        trees: B of them.
        urgency: (B,) weight of a token of each; None where all are 1.
        most: Nodes of one tree that count, the root among them.
    """
    weights = [tree.log_weights for tree in trees]
    sizes = [len(own) for own in weights]
    if max(sizes, default=0) > most:
        weights = [own if len(own) <= most else _heaviest(own, most) for own in weights]
        sizes = [len(own) for own in weights]
    worth = np.exp(np.fromiter(chain.from_iterable(weights), float, sum(sizes)))
    if urgency is None:
        worth.sort()
        return worth[::-1][len(sizes) :]  # no node is worth more than a root: those come first
    worth *= np.repeat(urgency, sizes)
    is_node = np.ones(len(worth), bool)
    is_node[np.cumsum([0, *sizes[:-1]])] = False
    worth = worth[is_node]
    worth.sort()
    return worth[::-1]


def _heaviest(log_weights: Sequence[float], most: int) -> list[float]:
    return sorted(log_weights, reverse=True)[:most]
