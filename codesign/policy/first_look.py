"""What the first look of a round needs of trees that are roots alone, found before the verdict.

How sure the draft has been of a request, the target's tokens do not change. So where a round begins
with roots alone, as most serial ones do, what their leaves gain is known while the target still
verifies the nodes of the round before, when the host has time.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf

from codesign.policy.batch_ahead import with_gains
from codesign.policy.batch_round import Worth
from codesign.policy.budget_tree import BudgetTree


class FirstLook:
    """How sure the draft is of each request before it runs, and what roots gain by that.

    All is found when first needed, or by ``find``.

    Args:
        trees: B of them; what the draft answers next is not asked about.

    Attributes:
        trees: The same.
    """

    def __init__(self, trees: Sequence[BudgetTree]) -> None:
        self.trees = list(trees)

    def is_of(self, trees: Sequence[BudgetTree]) -> bool:
        """Whether it is about these trees."""
        return self.trees == trees  # the same objects: trees are not compared by their nodes

    @cached_property
    def confidence(self) -> list[float]:
        """(B,) mean confidence of each; read-only."""
        return [tree.confidence for tree in self.trees]

    @cached_property
    def drafted_for(self) -> list[float]:
        """The same of those that the draft has run for."""
        return [tree.confidence for tree in self.trees if tree.prefix_len]

    @cached_property
    def _nodes(self) -> Worth:
        return with_gains([inf], self.confidence)

    def find(self) -> None:
        """Find all of it now, as there is time."""
        _ = self.drafted_for, self._nodes

    def gains(self) -> list[float]:
        """(B,) gain of each tree's root, where none has a row, as of ``gains_of``; read-only."""
        depths = [tree.max_depth for tree in self.trees]
        if all(depths):
            return self.confidence
        pairs = zip(self.confidence, depths, strict=True)
        return [confidence if depth else 0.0 for confidence, depth in pairs]

    def with_gains(self, roots: float, gains: list[float]) -> Worth:
        """The function's result for roots alone that are worth so many tokens together."""
        if gains is not self.confidence:
            return with_gains([roots], gains)
        self._nodes[0] = roots
        return self._nodes
