"""Draft forwards of a batch beside the verification: whether, which leaves, and which prompts.

As many are made as fit, by the step times; one that does not fit is made if it promises more tokens
than the time that it is late would yield.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from codesign.policy.batch_ahead import beats_plain
from codesign.policy.batch_round import LEAST, BatchRound
from codesign.policy.batch_rows import leaves_above, no_leaves, prospects
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.goodput import Goodput
from codesign.policy.spec import SpeculationSpec
from codesign.policy.traffic import COLD, Traffic


class DraftingBeside:
    """Decides about the draft forwards of a round that the target does not wait for.

    Args:
        spec: Most leaves of a request, most forwards.
        goodput: What prompts of the draft take.
        traffic: How long answers are.
        this: The round; its ``verification`` is set before a forward is asked for.

    Attributes:
        may_draft: No forward of this round was found not to pay.
    """

    def __init__(
        self, spec: SpeculationSpec, goodput: Goodput, traffic: Traffic, this: BatchRound
    ) -> None:
        self._spec, self._goodput, self._traffic, self._round = spec, goodput, traffic, this
        self.may_draft = True

    def plan(self, trees: Sequence[BudgetTree], *, is_plain: bool, margin: float) -> int:
        """Most forwards of this round.

        Args:
            trees: Of the batch.
            is_plain: The target verifies no node, so that nothing may be worth drafting.
            margin: Share of plain decoding's value that drafting must then promise above it.
        """
        most = self._spec.expansions
        self.may_draft = bool(trees)
        if trees and is_plain:
            self.may_draft = beats_plain(
                self._round, [tree.confidence for tree in trees], most, margin
            )
        return most if self.may_draft else 0

    def leaves(self, trees: Sequence[BudgetTree], rate: float) -> list[list[int]]:
        """Leaves of the next forward; none from the first one on that does not pay.

        Args:
            trees: Of the batch.
            rate: Tokens that a second is worth.
        """
        if not self.may_draft:
            return no_leaves(trees)
        this = self._round
        confidence, tops = prospects(trees)
        leaves, prompts = self._worthwhile(trees, confidence, tops, rate)
        num_rows = sum(map(len, leaves))
        seconds = this.draft.forward(num_rows, this.context)
        moving = this.draft.of(num_rows, this.context) - seconds  # after the verification
        late = max(this.beside + seconds - max(this.verification, this.beside), 0.0) + moving
        pairs = zip(leaves, confidence, tops, strict=True)
        gain = sum([chance * exp(top) for nodes, chance, top in pairs if nodes])
        if not num_rows or (late * rate > gain and not prompts):
            self.may_draft = False
            return no_leaves(trees)
        this.beside += seconds + prompts
        return leaves

    def _worthwhile(
        self,
        trees: Sequence[BudgetTree],
        confidence: Sequence[float],
        tops: Sequence[float],
        rate: float,
    ) -> tuple[list[list[int]], float]:
        """Leaves whose children may be worth a row, and seconds of the prompts run with them.

        Args:
            trees: B of them.
            confidence: (B,) each request's mean confidence.
            tops: (B,) log chance of its likeliest leaf.
            rate: Tokens that a second is worth.
        """
        this, goodput = self._round, self._goodput
        level = this.draft_row(len(trees), rate)
        leaves = no_leaves(trees)
        prompts = 0.0
        for i, (gain, top) in enumerate(zip(confidence, tops, strict=True)):
            bound = min(log(level / max(gain, LEAST)), 0.0)
            if top < bound:
                continue
            tree = trees[i]
            # A new request's prompt runs while the target runs it, too.
            if tree.missing >= COLD and tree.emitted:
                seconds = prompts + goodput.draft_prompt_seconds(tree.missing)
                seconds -= goodput.draft_prompts_once if prompts else 0.0
                late = this.beside + seconds - this.verification
                # What drafting for it will yield, against what running what it missed delays all.
                rounds = float(self._traffic.expected_left(tree.emitted)) / (1.0 + gain)
                if gain * rounds <= rate * late:
                    continue
                prompts = seconds
            leaves[i] = leaves_above(tree, self._spec.width, bound)
        return leaves, prompts
