"""Draft heads that read the target's features (EAGLE): what that costs, serial and asynchronous.

A head predicts the next token from the last token and the target's feature of the one before. The
target's features are there for verified tokens alone; below them the head reads features that it
has predicted itself, and agrees with the target less the more of them it reads. Assumptions:

- Each own feature in a row leaves ``feature_decay`` of the acceptance (SpeculationSpec). The
  simulator applies it to acceptance that was recorded with true features (ExpansionRows.trust).
- Every verdict costs one forward over the newly verified tokens and the root, with true features,
  before anything is sent: serial or not, the head cannot go on without it.
- Asynchronous: what was drafted below the new root meanwhile is kept, with the choices at the root
  itself made anew; a kept branch that the head no longer names there is not sent.
- Moving the features costs what RoundCost.link says; the message's bytes are not priced by row.

Runs in the simulator only. Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from codesign.policy.cost import Calibration
from codesign.policy.rerun_tree import RerunTree
from codesign.policy.spec import SpeculationSpec
from codesign.policy.tree import UNEXPANDED, DraftTree, Reroot
from codesign.policy.trees import BestTree

_DROPPED = -100.0  # log chance of a branch that the root's second run does not name


class FeatureTree(RerunTree):
    """A tree whose rows count how many features in a row the head has predicted itself.

    Args:
        decay: Share of the acceptance that each of these features leaves.
        is_kept: A subtree survives a verdict. Otherwise the tree is drafted anew, as EAGLE does.

    Attributes:
        ages: Per node that was run, that number; 0 for the root.
    """

    def __init__(
        self,
        root_token: int,
        *,
        base_len: int,
        max_depth: int,
        decay: float = 1.0,
        is_kept: bool = True,
    ) -> None:
        self._decay = decay
        self._is_kept = is_kept
        super().__init__(root_token, base_len=base_len, max_depth=max_depth)

    def _reset(self, root_token: int) -> None:
        super()._reset(root_token)
        self.ages = [0]

    def trust(self, nodes: Sequence[int]) -> tuple[float, ...]:
        """Share of the acceptance that is left for the children of each node."""
        return tuple(self._decay ** self.ages[node] for node in nodes)

    def expand(self, nodes: Sequence[int]) -> None:
        """See DraftTree.expand."""
        super().expand(nodes)
        for node in nodes:
            self.ages[node] = self.ages[self.parents[node]] + 1 if node else 0

    def add_children(self, node: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """See DraftTree.add_children; the choices of a second run replace the first's weights."""
        if known := self.children[node]:
            said = dict(zip(tokens, log_probs, strict=True))
            own = {child: said.get(self.tokens[child], _DROPPED) for child in known}
            self._weigh_again(own)
        super().add_children(node, tokens, log_probs)
        self.ages += [0] * (len(self) - len(self.ages))

    def _weigh_again(self, own: dict[int, float]) -> None:
        """Set the log chances of some nodes given their parents, and pass them on."""
        self._renumbered()
        old = list(self.log_weights)
        for node in range(1, len(self)):
            parent = self.parents[node]
            step = own.get(node, old[node] - old[parent])
            self.log_weights[node] = self.log_weights[parent] + min(step, 0.0)

    def _move_root(self, verified: Sequence[int]) -> Reroot:
        """Of the path only the root's row was made with a true feature."""
        promoted = () if self.slots[0] == UNEXPANDED else (self.slots[0],)
        found = super()._move_root(verified)
        if not found.is_hit:
            return Reroot(False, promoted, ())
        if not self._is_kept:
            self._reset(self.tokens[0])
            return Reroot(False, promoted, ())
        if self.slots[0] == UNEXPANDED:
            return Reroot(True, promoted, found.kept)
        # The root has to be run again; its row was the first of those kept.
        self.slots = [slot - 1 if slot > 0 else UNEXPANDED for slot in self.slots]
        self.num_expanded -= 1
        return Reroot(True, promoted, found.kept[1:])

    def _keep_subtree(self, root: int) -> tuple[int, ...]:
        ages = [self.ages[node] for node in sorted(self.subtree(root))]
        kept = super()._keep_subtree(root)
        self.ages = ages
        return kept


class EagleTree(BestTree):
    """A best-first tree of a draft head that needs the target's features.

    Source:
        EAGLE-2, arXiv:2406.16858 (serial). Asynchronous: this module's assumptions.
    """

    def __init__(self, spec: SpeculationSpec, calibration: Calibration | None) -> None:
        super().__init__(spec, calibration)
        self.tree_type = partial(FeatureTree, decay=spec.feature_decay, is_kept=spec.is_async)

    def following(self, tree: DraftTree, done: int) -> int:
        return 0  # a root that is run again weighs its children anew

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        more = super().leaves(trees, done)
        return [
            [0] if tree.slots[0] == UNEXPANDED and tree.max_depth else nodes
            for tree, nodes in zip(trees, more, strict=True)
        ]
