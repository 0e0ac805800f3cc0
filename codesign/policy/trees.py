"""Policies of draft trees: fixed shape, best-first, or best-first with the verified ones in mind.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.policy.cost import Calibration
from codesign.policy.interface import MAX_TREE_ROWS, Speculation, first_to_run
from codesign.policy.spec import SpeculationSpec
from codesign.policy.tree import UNEXPANDED, DraftTree


class StaticTree(Speculation):
    """A tree of the same shape every round: so many children of each node at each level.

    Source:
        SpecInfer, arXiv:2305.09781: expansion configuration. Width 1 at every level is a chain.
    """

    asks = True

    def __init__(self, widths: Sequence[int], calibration: Calibration | None) -> None:
        super().__init__(calibration)
        self._widths = tuple(widths)
        self.fanout = max(widths)

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        depth = len(self._widths)
        return [first_to_run(tree, self._levels(tree)[:depth]) for tree in trees]

    def _levels(self, tree: DraftTree) -> list[list[int]]:
        """Nodes of the shape, root first, as far as they are drafted."""
        levels = [[0]]
        for width in self._widths:
            levels.append([child for n in levels[-1] for child in tree.children[n][:width]])
        return levels

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [[node for level in self._levels(tree) for node in level] for tree in trees]


class BestTree(Speculation):
    """SwiftSpec's tree: run the ``width`` heaviest leaves, verify the ``rows`` heaviest nodes.

    Serial: ``expansions`` forwards, then verify. Asynchronous: the forwards overlap the
    verification, and before sending only as many run as it takes to have ``rows`` nodes (after a
    miss: one).

    Source:
        SwiftSpec, Algorithm 1.
    """

    def __init__(self, spec: SpeculationSpec, calibration: Calibration | None) -> None:
        super().__init__(calibration)
        self._rows = spec.rows
        self._width = spec.width
        self._required = 0 if spec.is_async else spec.expansions
        self.overlap = spec.expansions if spec.is_async else 0
        # At most this many of one node's children can be among the next heaviest leaves or rows.
        self.fanout = max(spec.width, spec.rows - 1)
        self.grown = spec.width

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        return [
            self._heaviest(tree) if done < self._required or len(tree) < self._rows else []
            for tree in trees
        ]

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [self._heaviest(tree) for tree in trees]

    def following(self, tree: DraftTree, done: int) -> int:
        return max(self._required - done - 1, 0)

    def overlap_following(self, tree: DraftTree, done: int) -> int:
        return max(self.overlap - done - 1, 0)

    def _heaviest(self, tree: DraftTree) -> list[int]:
        return tree.leaves(min(self._width, MAX_TREE_ROWS - tree.num_expanded))

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [tree.best(self._rows) for tree in trees]


class InFlightTree(BestTree):
    """BestTree that is ready for every next root before it grows deeper below the likeliest.

    The next root is the first token beside the verified nodes, a child of one of them: it has its
    rows at once if it was run. So the nodes under verification and their children come first, the
    heaviest before others, and only then what lies deeper. BestTree goes by weight alone.
    """

    asks = True

    def __init__(self, spec: SpeculationSpec, calibration: Calibration | None) -> None:
        super().__init__(spec, calibration)
        self._sent: list[set[int]] = []

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        chosen = super().select(trees)
        self._sent = [set(nodes) for nodes in chosen]
        return chosen

    def overlap_following(self, tree: DraftTree, done: int) -> int:
        return 0  # the heaviest are not always next

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [self._nearest(tree, sent) for tree, sent in zip(trees, self._sent, strict=True)]

    def _nearest(self, tree: DraftTree, sent: set[int]) -> list[int]:
        if tree.slots[0] == UNEXPANDED:
            return self._heaviest(tree)  # the root, alone
        weights, parents = tree.log_weights, tree.parents

        def rank(node: int) -> tuple[bool, float]:
            return node not in sent and parents[node] not in sent, -weights[node]

        width = min(self._width, MAX_TREE_ROWS - tree.num_expanded)
        return sorted(tree.leaves(len(tree)), key=rank)[:width]
