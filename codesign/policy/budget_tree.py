"""Draft trees that know what they have cost and how right they were.

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import itemgetter

from codesign.policy.online_calibration import Judged, OnlineCalibration
from codesign.policy.tree import UNEXPANDED, DraftTree, Reroot

LEAST_CHANCE = math.log(0.02)  # of a sibling of the likeliest child; others never get a row
LEAST_PATH = math.log(0.01)  # the same, of all tokens that lead to it
_MEMORY = 0.1  # weight of a new confidence in a request's running mean
_WEIGHT = itemgetter(0)  # of a pair in ``open``


class BudgetTree(DraftTree):
    """A tree with calibrated weights, which teaches its calibration by what the target accepts.

    Args:
        calibration: Shared by all requests.

    Attributes:
        sent: The nodes under verification.
        confidence: Running mean chance of a node's likeliest child.
        open: (log weight, node) of every node that may still run, the heaviest first.
        closed: All other nodes, each behind its parent.
    """

    __slots__ = ("calibration", "closed", "confidence", "open", "sent")

    def __init__(
        self, root_token: int, *, base_len: int, max_depth: int, calibration: OnlineCalibration
    ) -> None:
        self.calibration = calibration
        self.sent: Sequence[int] = ()
        self.confidence = calibration.confidence
        super().__init__(root_token, base_len=base_len, max_depth=max_depth)

    def _reset(self, root_token: int) -> None:
        super()._reset(root_token)
        self.open = [(0.0, 0)] if self.max_depth else []
        self.closed: list[int] = [] if self.max_depth else [0]

    def expand(self, nodes: Sequence[int]) -> None:
        """See DraftTree.expand."""
        super().expand(nodes)
        slots = self.slots
        self.open = [pair for pair in self.open if slots[pair[1]] == UNEXPANDED]
        self.closed += nodes

    def leaves(self, width: int) -> list[int]:
        """See DraftTree.leaves."""
        return [node for _, node in self.open[:width]]

    def add_children(self, node: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """See DraftTree.add_children."""
        self.add_answer((node,), (tokens,), log_probs)

    def add_answer(
        self, nodes: Sequence[int], tokens: Sequence[Sequence[int]], log_probs: Sequence[float]
    ) -> None:
        """See DraftTree.add_answer; calibrates, and leaves out what would never get a row."""
        kept: list[Sequence[int]] = []
        known: list[float] = []
        at, first = 0, len(self.tokens)
        for node, node_tokens in zip(nodes, tokens, strict=True):
            weight, said = self.log_weights[node], log_probs[at : at + len(node_tokens)]
            chances = self.calibration.log_chances(said, max(LEAST_CHANCE, LEAST_PATH - weight))
            likeliest = math.exp(chances[0]) if chances else 0.0
            self.confidence += _MEMORY * (likeliest - self.confidence)
            kept.append(node_tokens[: len(chances)])
            start = first + len(known)
            if self.depths[node] + 1 < self.max_depth:
                self.open += [(weight + chance, start + i) for i, chance in enumerate(chances)]
            else:
                self.closed += range(start, start + len(chances))
            known += chances
            at += len(node_tokens)
        super().add_answer(nodes, kept, known)
        self.open.sort(key=_WEIGHT, reverse=True)  # stable: equal ones stay in creation order

    def reroot(self, verified: Sequence[int]) -> Reroot:
        """See DraftTree.reroot."""
        if len(self.sent) > 1:
            # What it has now is replaced by the move, not changed.
            judge = partial(
                _judged, self.sent, self.log_weights, self.children, self.tokens, verified
            )
            self.calibration.learn_later(judge)
        self.sent = ()
        found = super().reroot(verified)
        if found.is_hit:
            slots, weights, depths = self.slots, self.log_weights, self.depths
            self.open, self.closed = [], []
            for node, slot in enumerate(slots):
                if slot == UNEXPANDED and depths[node] < self.max_depth:
                    self.open.append((weights[node], node))
                else:
                    self.closed.append(node)
            self.open.sort(key=_WEIGHT, reverse=True)
        return found


def _judged(
    sent: Sequence[int],
    weights: Sequence[float],
    children: Sequence[Sequence[int]],
    tokens: Sequence[int],
    verified: Sequence[int],
) -> list[Judged]:
    """Every node that the target has judged: of those sent the children along its tokens."""
    were_sent = set(sent)
    judged: list[Judged] = []
    node = 0
    for token in verified:
        above, taken, is_likeliest = weights[node], -1, True
        for child in children[node]:
            if child in were_sent:
                is_taken = tokens[child] == token
                judged.append((weights[child] - above, is_likeliest, is_taken))
                if is_taken:
                    taken = child
            is_likeliest = False
        if taken < 0:
            break
        node = taken
    return judged
