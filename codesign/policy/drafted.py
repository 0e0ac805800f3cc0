"""One request on the draft's side of the round protocol: committed tokens and the tree on them.

See codesign/policy/draft_side.py. Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from codesign.policy.interface import Progress
from codesign.policy.messages import Admission, ExpansionRows, RequestCandidates, RequestVerdict
from codesign.policy.tree import DraftTree


@dataclass(slots=True)
class Drafted:
    """Draft state of one request: committed tokens and the tree.

    And its progress: when its first token was told, the tokens committed then, its own target.
    While the policy stays at rest tokens are committed alone: the tree follows with the next look.
    """

    committed: list[int]
    tree: DraftTree
    slo_tpot: float | None
    first_at: float | None = None
    first_len: int = 0

    @classmethod
    def admitted(cls, admission: Admission, tree_type: Callable[..., DraftTree]) -> Drafted:
        """A request that has emitted nothing; its tree is a root, the prompt's last token."""
        tree = tree_type(
            admission.tokens[-1],
            base_len=len(admission.tokens),
            max_depth=max(admission.max_new_tokens - 1, 0),
        )
        return cls(list(admission.tokens), tree, admission.slo_tpot)

    def commit(self, entry: RequestVerdict, now: float) -> None:
        """Take in the tokens of a verdict that was told at ``now``, in seconds."""
        committed = self.committed
        assert entry.base_len == len(committed), "verdict out of step"
        committed += entry.tokens
        if self.first_at is None:
            self.first_at, self.first_len = now, len(committed)

    def catch_up(self) -> tuple[int, ...]:
        """Re-root the tree at the last committed token.

        Returns:
            Slots that survive, in their new order; none of a tree without any, as all are at rest.
        """
        told = self.committed[self.tree.base_len :]
        if not told:
            return ()
        reroot = self.tree.reroot(told)
        return reroot.promoted + reroot.kept

    def progress(self, now: float) -> Progress:
        """Seconds since the first token, and tokens since, at ``now``."""
        if self.first_at is None:
            return Progress(slo_tpot=self.slo_tpot)
        tokens = len(self.committed) - self.first_len
        return Progress(now - self.first_at, tokens, self.slo_tpot)

    def expand(self, request_id: int, nodes: Sequence[int]) -> ExpansionRows:
        """Rows of a draft forward over nodes; committed tokens without a KV row before the root."""
        tree = self.tree
        context = tree.prefix_len + tree.num_expanded
        missing = self.committed[tree.prefix_len : -1] if tree.slots[0] < 0 else []
        tree.expand(nodes)
        root, own, depths = tree.base_len - 1, tree.tokens, tree.depths
        tokens, positions, visible = missing, [*range(root - len(missing), root)], []
        for node in nodes:
            tokens.append(own[node])
            positions.append(root + depths[node])
            visible.append(tree.visible_slots(node))
        return ExpansionRows(
            request_id,
            tuple(tokens),
            tuple(positions),
            tuple(nodes),
            None if nodes[0] == 0 else tuple(visible),
            context,
            tree.trust(nodes),
        )

    def candidates(self, request_id: int, nodes: Sequence[int]) -> RequestCandidates:
        """The rows to verify of a tree, of which ``nodes`` were selected."""
        selection = self.tree.select(nodes)
        return RequestCandidates(
            request_id,
            len(self.committed),
            selection.tokens,
            selection.parents,
            selection.chances,
        )
