"""Draft trees whose nodes may be run again.

Must not import torch, read a clock or draw random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.policy.tree import DraftTree


class RerunTree(DraftTree):
    """A tree whose nodes may be run again: a node without a KV row may have children already."""

    def add_children(self, node: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """See DraftTree.add_children; tokens that are there already stay, with what is below."""
        known = self.children[node]
        if not known:
            super().add_children(node, tokens, log_probs)
            return
        old = {self.tokens[child] for child in known}
        new = [pair for pair in zip(tokens, log_probs, strict=True) if pair[0] not in old]
        super().add_children(node, [token for token, _ in new], [chance for _, chance in new])
        self.children[node] = (*known, *self.children[node])

    def add_answer(
        self, nodes: Sequence[int], tokens: Sequence[Sequence[int]], log_probs: Sequence[float]
    ) -> None:
        """See DraftTree.add_answer; one by one, as each node may have children already."""
        at = 0
        for node, node_tokens in zip(nodes, tokens, strict=True):
            self.add_children(node, node_tokens, log_probs[at : at + len(node_tokens)])
            at += len(node_tokens)
