"""Draft trees: what the draft model proposes for one request, round after round.

A tree is parallel flat lists in creation order. Node 0 is the root: the last token
that the target model has committed. Every other node is one draft token. A node is
*expanded* once the draft model has run on it: it then has a KV row (its slot) and
children. Unexpanded nodes are leaves: their tokens are known, and may be sent to the
target, but the draft model has not run on them.

Invariant: the draft's KV slab of the request is [prefix | expanded nodes in slot order].

Pure Python, because a tree has at most a few hundred nodes. Must not import torch, read a
clock or draw random numbers. The simulator and the engine both run this very class.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from codesign.policy.light import light

UNEXPANDED = -1
NO_PARENT = -1


@light
class Selection:
    """Nodes that the target is asked to verify, parents before children.

    Attributes:
        nodes: Node numbers in the tree; the first is the root.
        tokens: Token of each node.
        parents: Index *within the selection* of each node's parent; -1 for the root.
        chances: Of each node given its parent, 1 for the root; () for the root alone.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]


@light
class Reroot:
    """What became of the tree when the target's tokens arrived.

    Attributes:
        is_hit: All verified tokens were in the tree, so a subtree survives.
        promoted: Slots that join the prefix, in path order.
        kept: Slots that stay in the tree, in slot order.
    """

    is_hit: bool
    promoted: tuple[int, ...]
    kept: tuple[int, ...]


class DraftTree:
    """The draft tree of one request.

    Attributes:
        base_len: Committed tokens, root included; the root's position is ``base_len - 1``.
        max_depth: No node is deeper than this, since the request ends there.
        first_len: Committed tokens when it was admitted.
        prefix_len: KV rows of the draft in the request's prefix.
    """

    # A look at a batch reads some of these of each tree: slots lie in a third of a dict's memory.
    __slots__ = (
        "_open", "_visible", "base_len", "children", "depths", "first_len", "log_weights",
        "max_depth", "num_expanded", "parents", "prefix_len", "slots", "tokens",
    )  # fmt: skip

    def __init__(self, root_token: int, *, base_len: int, max_depth: int) -> None:
        self.base_len = self.first_len = base_len
        self.prefix_len = 0
        self.max_depth = max_depth
        self._reset(root_token)

    def _reset(self, root_token: int) -> None:
        self.tokens: list[int] = [root_token]
        self.parents: list[int] = [NO_PARENT]
        self.depths: list[int] = [0]
        self.log_weights: list[float] = [0.0]
        self.slots: list[int] = [UNEXPANDED]
        self.children: list[Sequence[int]] = [()]
        self.num_expanded = 0
        self._renumbered()

    def _renumbered(self) -> None:
        """Nodes or their weights are others now: forget what was found out about them."""
        self._open: list[int] | None = None  # leaves that may grow, as far as they are sorted
        self._visible: dict[int, tuple[int, ...]] = {}  # slots of paths, by expanded node

    def __len__(self) -> int:
        """Nodes, root included."""
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Committed tokens that the draft model has not run on, the root not counted."""
        return self.base_len - 1 - self.prefix_len

    @property
    def emitted(self) -> int:
        """Tokens committed since it was admitted."""
        return self.base_len - self.first_len

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        nodes = []
        while node != NO_PARENT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that carries a token, if there is one."""
        tokens = self.tokens
        for child in self.children[node]:
            if tokens[child] == token:
                return child
        return None

    def subtree(self, root: int) -> list[int]:
        """A node and all below it, level by level."""
        nodes, children = [root], self.children
        for node in nodes:  # grows as it goes
            nodes += children[node]
        return nodes

    def leaves(self, width: int) -> list[int]:
        """The ``width`` unexpanded nodes with the largest path weight that may still grow.

        A child's weight never exceeds its parent's, and children exist only below expanded
        nodes, so every leaf's parent has a KV row. Ties go to the older node.
        """
        if self._open is None and len(self.slots) == 1:
            self._open = [0] if self.slots[0] == UNEXPANDED and self.max_depth > 0 else []
        elif self._open is None:
            depths, deepest, slots = self.depths, self.max_depth, self.slots
            self._open = [
                n for n, slot in enumerate(slots) if slot == UNEXPANDED and depths[n] < deepest
            ]
        # Nearly sorted already, and stable, so that equal weights stay in creation order.
        if len(self._open) > 1:
            self._open.sort(key=self.log_weights.__getitem__, reverse=True)
        return self._open[:width]

    def expand(self, nodes: Sequence[int]) -> None:
        """Give ``nodes`` the next KV slots, in this order; the draft model runs on them now.

        A root is run with all that is missing before it.
        """
        if nodes and nodes[0] == 0:
            self.prefix_len = self.base_len - 1
        for slot, node in enumerate(nodes, self.num_expanded):
            self.slots[node] = slot
        count = len(nodes)
        self.num_expanded += count
        if self._open is not None:  # whoever asks for leaves runs the first of them
            if self._open[:count] == list(nodes):
                del self._open[:count]
            else:
                self._open = None

    def slot_parents(self) -> list[int]:
        """Slot of each expanded node's parent, in order of slots; -1 of the root."""
        slots, found = self.slots, [NO_PARENT] * self.num_expanded
        for slot, parent in zip(slots, self.parents, strict=True):
            if slot != UNEXPANDED and parent != NO_PARENT:
                found[slot] = slots[parent]
        return found

    def visible_slots(self, node: int) -> tuple[int, ...]:
        """Slots of the expanded nodes on the path to ``node``, its own included."""
        seen = self._visible.get(node)
        if seen is None:
            parent = self.parents[node]
            before = () if parent == NO_PARENT else self._visible.get(parent)
            if before is None:  # seldom
                before = self.visible_slots(parent)
            seen = (*before, self.slots[node])
            if UNEXPANDED not in seen:
                self._visible[node] = seen
        return seen

    def add_children(self, node: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add the draft model's choices below an expanded node, once per node.

        Args:
            node: An expanded node.
            tokens: Distinct token ids.
            log_probs: Natural logarithm of the chance of each; finite, at most 0.
        """
        DraftTree.add_answer(self, (node,), (tokens,), log_probs)  # not a subclass's own

    def add_answer(
        self, nodes: Sequence[int], tokens: Sequence[Sequence[int]], log_probs: Sequence[float]
    ) -> None:
        """``add_children`` of several nodes.

        Args:
            nodes: Expanded nodes.
            tokens: Of each, distinct token ids.
            log_probs: Of all these tokens, one node's after another's.
        """
        own, weights, parents = self.tokens, self.log_weights, self.parents
        depths, children, may_grow = self.depths, self.children, self._open
        start, at = len(own), 0
        for node, node_tokens in zip(nodes, tokens, strict=True):
            count, weight, depth = len(node_tokens), weights[node], depths[node] + 1
            new = range(len(own), len(own) + count)
            children[node] = new
            own += node_tokens
            parents += (node,) * count
            depths += (depth,) * count
            for log_prob in log_probs[at : at + count]:  # quicker than a list of a few
                weights.append(weight + log_prob)
            if may_grow is not None and depth < self.max_depth:
                may_grow += new
            at += count
        assert len(log_probs) == at == len(weights) - start, "one log probability per token"
        self.slots += (UNEXPANDED,) * at
        children += ((),) * at

    def trust(self, nodes: Sequence[int]) -> tuple[float, ...]:
        """Share of acceptance left per node; empty but in codesign/policy/features.py."""
        return ()

    def best(self, rows: int) -> list[int]:
        """The ``rows`` nodes with the largest path weight: always a connected tree, in order."""
        weights = self.log_weights
        if len(weights) <= rows:
            return list(range(len(weights)))
        least = sorted(weights, reverse=True)[rows - 1]
        nodes = [n for n, weight in enumerate(weights) if weight >= least]
        if len(nodes) > rows:  # the oldest of equal ones, as sorts are stable: parents first
            return sorted(sorted(nodes, key=weights.__getitem__, reverse=True)[:rows])
        return nodes

    def select(self, nodes: Sequence[int]) -> Selection:
        """Order ``nodes`` (connected, root included) so that parents come before children."""
        own, parents, weights = self.tokens, self.parents, self.log_weights
        ordered = tuple(sorted(nodes))
        index, tokens, rows = {0: 0}, [own[0]], [NO_PARENT]
        chances = [1.0] if len(ordered) > 1 else []
        for row, node in enumerate(ordered[1:], 1):
            parent = parents[node]
            index[node] = row
            tokens.append(own[node])
            rows.append(index[parent])
            chances.append(exp(weights[node] - weights[parent]))
        return Selection(ordered, tuple(tokens), tuple(rows), tuple(chances))

    def reroot(self, verified: Sequence[int]) -> Reroot:
        """Move the root to the last of the ``verified`` tokens and drop what lies beside its path.

        Args:
            verified: Tokens that the target emitted after the old root; the last one is the bonus
                token, whose target KV is not computed yet. At least one.

        Returns:
            What the KV slab must do. After a miss the tree is just the new root, and committed
            tokens without a KV row must still be run by the draft model before the root is.
        """
        found = self._move_root(verified)
        self.prefix_len += len(found.promoted)
        return found

    def _move_root(self, verified: Sequence[int]) -> Reroot:
        self.base_len += len(verified)
        self.max_depth = max(self.max_depth - len(verified), 0)
        slots, node, promoted = self.slots, 0, []
        for token in verified:
            if slots[node] != UNEXPANDED:
                promoted.append(slots[node])
            if (child := self.child(node, token)) is None:
                self._reset(verified[-1])
                return Reroot(is_hit=False, promoted=tuple(promoted), kept=())
            node = child
        if self.children[node] or slots[node] != UNEXPANDED:
            return Reroot(is_hit=True, promoted=tuple(promoted), kept=self._keep_subtree(node))
        self._reset(verified[-1])  # most often: a leaf, which leaves nothing to renumber
        return Reroot(is_hit=True, promoted=tuple(promoted), kept=())

    def _keep_subtree(self, root: int) -> tuple[int, ...]:
        """Make ``root`` node 0 and renumber its subtree; return the kept slots in slot order."""
        slots, parents, children, keep = self.slots, self.parents, self.children, self.subtree(root)
        keep.sort()  # creation order again: parents before children
        new_index = dict(zip(keep, range(len(keep)), strict=True))
        kept_slots = sorted([slots[n] for n in keep if slots[n] != UNEXPANDED])
        new_slot = dict(zip(kept_slots, range(len(kept_slots)), strict=True))
        new_slot[UNEXPANDED] = UNEXPANDED
        tokens, depths, weights = self.tokens, self.depths, self.log_weights
        weight, depth = weights[root], depths[root]
        self.parents = [NO_PARENT, *[new_index[parents[n]] for n in keep[1:]]]
        self.children = [[new_index[c] for c in children[n]] if children[n] else () for n in keep]
        self.tokens = [tokens[n] for n in keep]
        self.depths = [depths[n] - depth for n in keep]
        self.log_weights = [min(weights[n] - weight, 0.0) for n in keep]
        self.slots = [new_slot[slots[n]] for n in keep]
        self.num_expanded = len(kept_slots)
        self._renumbered()
        return tuple(kept_slots)
