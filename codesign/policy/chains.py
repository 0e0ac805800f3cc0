"""Chains of draft tokens: of fixed length, cut when unsure, or drafted beside the verification.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Speculation, chain_end, context_rows, last_confidence
from codesign.policy.tree import DraftTree


class FixedChain(Speculation):
    """A chain of fixed length, optionally cut after the first unsure token.

    The unsure token itself is still verified, so that its own draw never decides whether it is.

    Source:
        Leviathan et al., arXiv:2211.17192; dynamic length as in Hugging Face transformers.
    """

    grown = 1

    def __init__(self, max_depth: int, threshold: float, calibration: Calibration | None) -> None:
        super().__init__(calibration)
        self._max_depth = max_depth
        self._threshold = threshold
        self.asks = threshold > 0

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        return [chain_end(tree) if self._goes_on(tree) else [] for tree in trees]

    def _goes_on(self, tree: DraftTree) -> bool:
        if len(tree) == 1:
            return True
        # Not counted in ``done``: a stale message or a cut chain leaves tokens to the next round.
        return len(tree) <= self._max_depth and last_confidence(tree) >= self._threshold

    def following(self, tree: DraftTree, done: int) -> int:
        return 0 if self.asks else max(self._max_depth - len(tree), 0)

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [list(range(len(tree))) for tree in trees]


class ParallelChain(Speculation):
    """PEARL: the draft model adds ``max_depth`` tokens while the target verifies, always.

    Nothing is drafted between a verdict and the candidates. After a hit the chain goes on where
    the bonus token stands and what is left of it is verified (post-verify). After a miss the root
    goes alone, and what is drafted meanwhile is judged by the token that this yields (pre-verify).

    Source:
        PEARL, arXiv:2408.11850, with the target's own token for the position behind the chain,
        which PEARL leaves to the next round's first.
    """

    asks = True

    def __init__(self, max_depth: int, calibration: Calibration | None) -> None:
        super().__init__(calibration)
        self._max_depth = max_depth
        self.overlap = max_depth

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        # A chain in flight and as much again; more is left over only where answers were lost.
        return [chain_end(tree) if len(tree) <= 2 * self._max_depth else [] for tree in trees]

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [list(range(min(len(tree), self._max_depth + 1))) for tree in trees]


class FreeChain(ParallelChain):
    """AMUSD: a chain that grows without pause, verified as far as it has come.

    What is modelled: verifications follow one another at once, and the draft model makes as many
    forwards beside each as fit, by the step times. The target waits for a forward only when there
    is nothing to verify but the root. Rollback is the re-root.

    Source:
        AMUSD, arXiv:2410.17375.
    """

    is_batch_coupled = True

    def __init__(self, max_depth: int, goodput: Goodput, calibration: Calibration | None) -> None:
        super().__init__(max_depth, calibration)
        self._goodput = goodput.drafting(self.drafting)

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        return [chain_end(tree) if len(tree) == 1 else [] for tree in trees]

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        chosen = super().select(trees)
        draft_tokens = sum(len(nodes) for nodes in chosen) - len(trees)
        fitting = self._goodput.num_beside(
            batch=len(trees), context=context_rows(trees), draft_tokens=draft_tokens
        )
        self.overlap = min(max(fitting, 1), self._max_depth)
        return chosen
