"""AdaServe: rows of the batch go first to requests that fall behind their own TPOT target.

Must not import torch or read a clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Progress, Speculation, context_rows, first_to_run
from codesign.policy.spec import SpeculationSpec
from codesign.policy.tree import DraftTree


class AdaServe(Speculation):
    """Beams per request, and a budget of rows for the whole batch.

    Drafting: a beam of ``width`` nodes per level, ``depth`` levels; both shrink as requests share
    the budget. Selection: first, most in need before others, each request gets its likeliest nodes
    until their expected number reaches the tokens that this step owes it; then the likeliest nodes
    of all requests fill the budget.

    Source:
        AdaServe, arXiv:2501.12162: needed tokens (elapsed + step) / TPOT - tokens so far; the sum
        over path chances, where its pseudo-code adds conditional ones. Depth and width follow its
        rule with the row budget for both of its budgets and no constants.
    """

    is_batch_coupled = True
    needs_progress = True
    asks = True

    def __init__(
        self, spec: SpeculationSpec, goodput: Goodput, calibration: Calibration | None
    ) -> None:
        super().__init__(calibration)
        self._spec = spec
        self.fanout = spec.width
        self._goodput = goodput.drafting(self.drafting)
        self._depth = 0
        self._width = 1
        self._needs: list[float] = []

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        batch, budget = max(len(trees), 1), self._spec.rows
        self._depth = min(max(budget // batch - 1, 0), self._spec.max_depth)
        self._width = min(max(budget // batch, 1), self._spec.width)
        step = self._goodput.seconds(
            batch=len(trees),
            context=context_rows(trees),
            steps=self._depth,
            draft_tokens=max(budget - len(trees), 0) if self._depth else 0,
        )
        self._needs = [self._needed_tokens(one, step) for one in progress] or [0.0] * len(trees)

    def _needed_tokens(self, progress: Progress, step: float) -> float:
        """Tokens that this step must yield, so that the request keeps its TPOT on average."""
        target = self._goodput.slo_tpot if progress.slo_tpot is None else progress.slo_tpot
        return 0.0 if target is None else (progress.elapsed + step) / target - progress.tokens

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        if done >= self._depth:
            return [[] for _ in trees]
        return [first_to_run(tree, self._beam(tree)[: self._depth]) for tree in trees]

    def _beam(self, tree: DraftTree) -> list[list[int]]:
        """The heaviest nodes of each level below those of the level before; the root first."""
        levels = [[0]]
        for _ in range(self._depth):
            below = [child for n in levels[-1] for child in tree.children[n]]
            below.sort(key=tree.log_weights.__getitem__, reverse=True)
            levels.append(below[: self._width])
        return levels

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        # Sorted by chance, a node's parent comes before it: every prefix is a connected tree.
        ranked = [self._ranked(tree) for tree in trees]
        chosen = [[0] for _ in trees]
        left = self._spec.rows - len(trees)
        for i in sorted(range(len(trees)), key=lambda i: -self._needs[i]):
            left -= self._serve(trees[i], ranked[i], chosen[i], self._needs[i], left)
        heap = [_offer(trees, ranked, chosen, i) for i in range(len(trees))]
        heap = [offer for offer in heap if offer is not None]
        heapq.heapify(heap)
        while heap and left > 0:
            _, i, node = heapq.heappop(heap)
            chosen[i].append(node)
            left -= 1
            if (offer := _offer(trees, ranked, chosen, i)) is not None:
                heapq.heappush(heap, offer)
        return chosen

    def _ranked(self, tree: DraftTree) -> list[int]:
        nodes = sorted(node for level in self._beam(tree) for node in level)
        nodes.sort(key=tree.log_weights.__getitem__, reverse=True)  # stable: parents first
        return nodes

    def _serve(
        self, tree: DraftTree, ranked: list[int], nodes: list[int], need: float, left: int
    ) -> int:
        """Add nodes to one request until it may expect what it needs; how many were added."""
        expected, need = 1.0, min(need, self._depth + 1)
        for node in ranked[1 : 1 + max(left, 0)]:
            if expected >= need:
                break
            nodes.append(node)
            expected += math.exp(tree.log_weights[node])
        return len(nodes) - 1


def _offer(
    trees: Sequence[DraftTree], ranked: list[list[int]], chosen: list[list[int]], i: int
) -> tuple[float, int, int] | None:
    """A request's likeliest node that is not chosen yet, as a heap entry."""
    at = len(chosen[i])
    if at == len(ranked[i]):
        return None
    node = ranked[i][at]
    return -trees[i].log_weights[node], i, node
