"""Which nodes of a batch's trees fill the rows of its forwards: the heaviest ones.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import numpy as np

from codesign.policy.batch_round import FEW, Choice, Worth
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.interface import MAX_TREE_ROWS
from codesign.policy.row_prices import Floats, numbers

NEVER = -100.0  # log chance
SURE = 1e-9  # of equal log chances: parents stand with their children


def worth_of_nodes(
    trees: Sequence[BudgetTree], roots: float, most: int, urgency: Floats | None = None
) -> Worth:
    """(1 + N,) tokens that all roots are worth, then those of every drafted node, descending.

    Args:
        trees: B of them.
        roots: Tokens that all roots together are worth.
        most: Nodes of one tree that count, the root among them.
        urgency: (B,) weight of a token of each; None where all are 1.
    """
    nodes: list[float] = []
    for tree in trees:
        own = tree.log_weights
        nodes += own if len(own) <= most else sorted(own, reverse=True)[:most]
    if len(nodes) == len(trees):
        return [roots]  # nothing is drafted yet
    # Roots come first, as no node is worth more. The last of them stands for all.
    if len(nodes) <= FEW and urgency is None:
        few = sorted(map(exp, nodes), reverse=True)[len(trees) - 1 :]
        few[0] = roots
        return few
    worth = np.exp(numbers(nodes))
    if urgency is not None:
        sizes = [min(len(tree.log_weights), most) for tree in trees]
        worth *= np.repeat(urgency, sizes)
        worth[np.cumsum([0, *sizes[:-1]])] = np.inf
    worth.sort()
    worth = worth[::-1][len(trees) - 1 :]
    worth[0] = roots
    return worth


def best_nodes(
    trees: Sequence[BudgetTree], choice: Choice, most: int, urgency: Floats | None = None
) -> list[list[int]]:
    """The nodes of a choice, root included, at most ``most`` of a tree.

    Args:
        trees: (B,) of the batch.
        choice: How many nodes beside the roots, and the least weight of one.
        most: Nodes of one tree, root included.
        urgency: (B,) weight of a token of each request; None: all weigh the same.

    Returns:
        (B,) nodes of each tree.
    """
    if not choice.rows:
        return [[0] for _ in trees]
    bounds = [log(choice.level) - SURE] * len(trees)
    if urgency is not None:
        bounds = [log(choice.level / one) - SURE for one in urgency.tolist()]
    chosen = _nodes_above(trees, bounds)
    if max(map(len, chosen)) > most:
        chosen = [
            nodes if len(nodes) <= most else _heaviest(tree, nodes, most)
            for tree, nodes in zip(trees, chosen, strict=True)
        ]
    excess = sum(map(len, chosen)) - len(trees) - choice.rows
    if excess > 0:
        _leave_equals(trees, chosen, bounds, excess)
    return chosen


def _heaviest(tree: BudgetTree, nodes: list[int], most: int) -> list[int]:
    return sorted(sorted(nodes), key=tree.log_weights.__getitem__, reverse=True)[:most]


def _nodes_above(trees: Sequence[BudgetTree], bounds: Sequence[float]) -> list[list[int]]:
    """(B,) nodes of each tree of its least log weight and above, its root at least.

    A plain loop: of so few nodes it takes two thirds of what comprehensions do. Of the nodes that
    may still run, most of a tree, it reads those alone that are found, and one more.
    """
    found = []
    for tree, bound in zip(trees, bounds, strict=True):
        nodes, weights = [], tree.log_weights
        for node in tree.closed:
            if weights[node] >= bound:
                nodes.append(node)
        for weight, node in tree.open:
            if weight < bound:
                break
            nodes.append(node)
        found.append(nodes or [0])
    return found


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


def prospects(trees: Sequence[BudgetTree]) -> tuple[list[float], list[float]]:
    """(B,) each request's mean confidence, and the log chance of its likeliest leaf."""
    tops = [ranked[0][0] if (ranked := tree.open) else NEVER for tree in trees]
    return [tree.confidence for tree in trees], tops


def gains_of(trees: Sequence[BudgetTree]) -> list[float]:
    """(B,) gain of each tree's likeliest leaf, as in batch_ahead.py; 0 without any."""
    return [exp(ranked[0][0]) * tree.confidence if (ranked := tree.open) else 0.0 for tree in trees]


def leaves_worth(
    trees: Sequence[BudgetTree],
    width: int,
    gains: Sequence[float],
    level: float,
    *,
    are_roots: bool = False,
) -> list[list[int]]:
    """Leaves of each tree that gain so much, at most ``width`` of one.

    Args:
        trees: B of them.
        width: Leaves.
        gains: (B,) gain of each tree's likeliest leaf; another leaf gains in proportion.
        level: Least gain, above 0; at most the largest of ``gains``.
        are_roots: No tree has any other node.
    """
    if are_roots:
        if min(gains) >= level:
            return [[0]] * len(trees)  # one and the same list, too
        return [[0] if gain >= level else [] for gain in gains]
    leaves = no_leaves(trees)
    for i, gain in enumerate(gains):
        if gain < level:
            continue
        tree = trees[i]
        ranked = tree.open
        first, node = ranked[0]
        # Least log chance; a leaf that gains just the level is at it to the last digit.
        bound = log(level / gain) + first
        if (len(ranked) == 1 or ranked[1][0] < bound) and tree.num_expanded < MAX_TREE_ROWS:
            leaves[i] = [node]  # most often: its likeliest leaf pays, no other does
        else:
            leaves[i] = leaves_above(tree, width, bound)
    return leaves


def no_leaves(trees: Sequence[BudgetTree]) -> list[list[int]]:
    """As many empty lists: one and the same, to which nobody adds."""
    return [[]] * len(trees)


def leaves_above(tree: BudgetTree, width: int, bound: float) -> list[int]:
    """The heaviest nodes that may run, of this log weight and above.

    Args:
        tree: One request's.
        width: Most nodes.
        bound: Least log weight.
    """
    if tree.num_expanded + width > MAX_TREE_ROWS:
        width = MAX_TREE_ROWS - tree.num_expanded
    nodes = []
    for weight, node in tree.open[:width]:
        if weight < bound:
            break
        nodes.append(node)
    return nodes
