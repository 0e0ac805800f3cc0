"""Rows of a batch's forwards: what they cost, and what the nodes are worth that may fill them.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log

import numpy as np
from numpy.typing import NDArray

from codesign.policy.budget_tree import BudgetTree
from codesign.policy.interface import MAX_TREE_ROWS

Floats = NDArray[np.float64]

NEVER = -100.0  # log chance
SURE = 1e-9  # of equal log chances: parents stand with their children


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
    """Seconds of forwards by their rows, worked out once.

    Attributes:
        extra: Seconds of every forward beside those, which depend on the number of requests.
    """

    def __init__(self, seconds: Callable[[float, float], float]) -> None:
        self.extra = 0.0
        self._seconds = seconds
        self._fixed = np.empty(0)
        self._per_context = np.empty(0)
        # Of the prices at hand, which a round asks for again and again: context, extra.
        self._context: tuple[int, float] = (-1, 0.0)
        self._prices = np.empty(0)

    def of(self, rows: int, context: int) -> float:
        """Seconds of one forward."""
        return self._seconds(rows, context) + self.extra

    def __call__(self, first: int, count: int, context: int) -> Floats:
        """(count + 1,) seconds of forwards of ``first``, ..., ``first + count`` rows."""
        if first + count >= len(self._fixed):
            size = 2 * (first + count) + 64
            fixed = [self._seconds(rows, 0.0) for rows in range(size)]
            far = [self._seconds(rows, 4096.0) for rows in range(size)]
            self._fixed = np.array(fixed)
            self._per_context = (np.array(far) - self._fixed) / 4096.0
            self._context = (-1, 0.0)
        if (context, self.extra) != self._context:
            self._prices = self._fixed + (context * self._per_context + self.extra)
            self._prices.flags.writeable = False
            self._context = (context, self.extra)
        return self._prices[first : first + count + 1]


def worth_of_nodes(trees: Sequence[BudgetTree], urgency: Floats | None, most: int) -> Floats:
    """(N,) urgency times chance of all drafted nodes, descending.

    Args:
        trees: B of them.
        urgency: (B,) weight of a token of each; None where all are 1.
        most: Nodes of one tree that count, the root among them.
    """
    weights = [tree.log_weights for tree in trees]
    sizes = list(map(len, weights))
    if sum(sizes) == len(sizes):
        return np.empty(0)  # roots alone
    if max(sizes) > most:
        weights = [own if len(own) <= most else _heaviest(own, most) for own in weights]
        sizes = list(map(len, weights))
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


def best_nodes(
    trees: Sequence[BudgetTree], urgency: Floats, choice: Choice, most: int
) -> list[list[int]]:
    """The nodes of a choice, root included, at most ``most`` of a tree."""
    if not choice.rows:
        return [[0] for _ in trees]
    chosen: list[list[int]] = []
    common = log(choice.level) - SURE
    bounds = [common if one == 1.0 else log(choice.level / one) - SURE for one in urgency.tolist()]
    for tree, bound in zip(trees, bounds, strict=True):
        weights = tree.log_weights
        if bound > 0.0 or len(weights) == 1:
            chosen.append([0])
            continue
        nodes = [n for n, weight in enumerate(weights) if weight >= bound]
        if len(nodes) > most:
            nodes = sorted(nodes, key=weights.__getitem__, reverse=True)[:most]
        chosen.append(nodes)
    excess = sum([len(nodes) for nodes in chosen]) - len(trees) - choice.rows
    if excess > 0:
        _leave_equals(trees, chosen, bounds, excess)
    return chosen


def _leave_equals(
    trees: Sequence[BudgetTree], chosen: list[list[int]], bounds: Sequence[float], excess: int
) -> None:
    """Take away so many of the nodes that are worth as much as the least: a row may cost a lot.

    The youngest of a tree go first, so that none stays without its parent.
    """
    for tree, nodes, bound in zip(trees, chosen, bounds, strict=True):
        weights = tree.log_weights
        for node in sorted(nodes[1:], reverse=True):
            if not excess:
                return
            if weights[node] <= bound + 2 * SURE:
                nodes.remove(node)
                excess -= 1


def gains_ahead(gains: Floats, confidence: Floats, depth: int) -> Floats:
    """(D, B) gains of a request's next leaves, one below another."""
    gains_DB = np.empty((depth, len(gains)))
    gains_DB[0], gains_DB[1:] = gains, confidence
    return np.multiply.accumulate(gains_DB, axis=0, out=gains_DB)


def prospects(trees: Sequence[BudgetTree]) -> tuple[Floats, Floats]:
    """(B,) each request's mean confidence, and the log chance of its likeliest leaf."""
    confidence = np.array([tree.confidence for tree in trees])
    tops = [tree.open[0][0] if tree.open else NEVER for tree in trees]
    return confidence, np.array(tops)


def leaves_above(tree: BudgetTree, width: int, bound: float) -> list[int]:
    """The heaviest nodes that may run, of this log weight and above."""
    if tree.num_expanded + width > MAX_TREE_ROWS:
        width = MAX_TREE_ROWS - tree.num_expanded
    nodes = []
    for weight, node in tree.open[:width]:
        if weight < bound:
            break
        nodes.append(node)
    return nodes


def _heaviest(log_weights: Sequence[float], most: int) -> list[float]:
    return sorted(log_weights, reverse=True)[:most]
