"""Other ways to draft beside the verification: outcomes beforehand, and small trees in a row.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.policy.cost import Calibration
from codesign.policy.interface import MAX_TREE_ROWS, Speculation, likeliest_path, to_run
from codesign.policy.rerun_tree import RerunTree
from codesign.policy.spec import SpeculationSpec
from codesign.policy.tree import UNEXPANDED, DraftTree, Reroot


class OutcomeTree(RerunTree):
    """A tree that keeps its tokens but not its KV rows when it moves: SSD runs them once more."""

    def _move_root(self, verified: Sequence[int]) -> Reroot:
        """Nothing but the promoted rows survives."""
        found = super()._move_root(verified)
        self.slots = [UNEXPANDED] * len(self)
        self.num_expanded = 0
        return Reroot(found.is_hit, found.promoted, ())


class Outcomes(Speculation):
    """SSD: a chain for each likely outcome of the verification, ready before the verdict.

    While the target verifies a chain of ``depth`` tokens, the draft model runs the chain once more
    for the choices at every position (the glue forward), takes at each position the ``outcomes``
    likeliest tokens beside the drafted one, and continues each of them ``depth`` steps. If the
    verdict ends in one of them, its chain is sent without a wait. Otherwise a chain is drafted just
    in time, while the other requests of the batch wait too.

    What is simpler than in SSD: after a miss the glue forward is one row, as the chain's KV rows
    are still there; the same number of outcomes at each position; verification by walking.

    Source:
        SSD (Saguaro), as released.
    """

    asks = True
    tree_type = OutcomeTree

    def __init__(self, depth: int, outcomes: int, calibration: Calibration | None) -> None:
        super().__init__(calibration)
        self._depth = depth
        self._outcomes = outcomes
        self.fanout = outcomes + 1
        self.overlap = 1 + depth

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        return [self._just_in_time(tree) for tree in trees]

    def _just_in_time(self, tree: DraftTree) -> list[int]:
        chain = self._chain(tree)
        is_short = len(chain) <= self._depth and tree.depths[chain[-1]] < tree.max_depth
        return to_run(tree, chain) if is_short else []

    def _chain(self, tree: DraftTree) -> list[int]:
        return likeliest_path(tree)[: self._depth + 1]

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [self._glue(tree) or to_run(tree, self._ahead(tree)) for tree in trees]

    def _glue(self, tree: DraftTree) -> list[int]:
        return to_run(tree, self._chain(tree))

    def _ahead(self, tree: DraftTree) -> list[int]:
        """The outcomes and their chains, less the last token of those that are whole.

        All but one token of each have KV rows, unless a verdict has moved the tree in between.
        """
        chain = self._chain(tree)
        nodes = []
        for node in chain:
            beside = [child for child in tree.children[node] if child not in chain]
            for outcome in beside[: self._outcomes]:
                nodes += likeliest_path(tree, outcome)[: self._depth]
        return nodes

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [self._chain(tree) for tree in trees]


class MicroBatchTree(DraftTree):
    """A tree that is dropped unless the target's tokens lead through (or to) its ``tip``.

    Attributes:
        tip: Node below which the next micro-batches were drafted.
    """

    def __init__(self, root_token: int, *, base_len: int, max_depth: int) -> None:
        self.tip = 0
        super().__init__(root_token, base_len=base_len, max_depth=max_depth)

    def _move_root(self, verified: Sequence[int]) -> Reroot:
        """A partial match counts as a miss."""
        to_tip = self.path(self.tip)
        tokens = [self.tokens[node] for node in to_tip[1:]]
        common = min(len(tokens), len(verified))
        found = super()._move_root(verified)
        self.tip = 0
        if found.is_hit and tokens[:common] != list(verified[:common]):
            self._reset(self.tokens[0])
            return Reroot(False, found.promoted, ())
        return found


class MicroBatches(Speculation):
    """PipeInfer: one small tree after another, each below the last one's likeliest end.

    What is modelled: the target is one stage, so one tree is verified at a time and those behind
    it wait in the draft model's process; a tree that does not continue what the target said is
    dropped with all that follow. After a miss the root goes alone, as PipeInfer's single-token run
    does, while drafting starts again.

    Source:
        PipeInfer, arXiv:2407.11798: asynchronous speculation, micro-batches, cancellation.
    """

    asks = True
    tree_type = MicroBatchTree

    def __init__(self, spec: SpeculationSpec, calibration: Calibration | None) -> None:
        super().__init__(calibration)
        self._rows = spec.rows
        self._width = spec.width
        self.overlap = spec.expansions
        self.fanout = max(spec.width, spec.rows - 1)

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [self._below_tip(tree) for tree in trees]

    def _below_tip(self, tree: DraftTree) -> list[int]:
        assert isinstance(tree, MicroBatchTree), "trees are made with this policy's tree_type"
        below = {tree.tip}
        for node in range(tree.tip + 1, len(tree)):  # parents come before children
            if tree.parents[node] in below:
                below.add(node)
        room = min(self._width, MAX_TREE_ROWS - tree.num_expanded)
        return [node for node in tree.leaves(len(tree)) if node in below][: max(room, 0)]

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        chosen = [tree.best(self._rows) for tree in trees]
        for tree, nodes in zip(trees, chosen, strict=True):
            assert isinstance(tree, MicroBatchTree), "trees are made with this policy's tree_type"
            sent = set(nodes)
            tree.tip = next(node for node in reversed(likeliest_path(tree)) if node in sent)
        return chosen
