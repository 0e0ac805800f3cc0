"""Draft forwards of a batch that the target waits for: whether, and which leaves take part.

Of the first ones of a round the trees are roots alone, as a rule: first_look.py. What one more
promises: batch_ahead.py. Cold requests, of which the draft has not run the prompt, or has missed
many tokens since, take part if the tokens to come save ``needed_return`` times what running those
takes, by what drafting has saved lately (repeating.py).

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from codesign.policy.batch_ahead import (
    best_forwards,
    next_forward,
    saved_by_others,
    saved_usually,
    with_gains,
)
from codesign.policy.batch_round import Choice, Worth
from codesign.policy.batch_rows import gains_of, leaves_worth, no_leaves, worth_of_nodes
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.cost import Calibration
from codesign.policy.first_look import FirstLook
from codesign.policy.goodput import Goodput
from codesign.policy.online_calibration import OnlineCalibration
from codesign.policy.repeating import Repeating
from codesign.policy.spec import SpeculationSpec
from codesign.policy.traffic import COLD, Traffic, rows_behind
from codesign.policy.tree import DraftTree

Leaves = list[list[int]]
Promise = tuple[float, float]  # value of the round, and the least gain of a leaf worth its row

MARGIN = 0.02  # of goodput that drafting must promise after a round without
FEWEST_CHOICES = 4  # children of a node
MOST_AWAITED = 2  # draft forwards that an asynchronous round may wait for


class BatchDrafting(Repeating):
    """A policy that drafts for a batch as long as the value of its round rises.

    Args:
        spec: Most rows and leaves of a request, most forwards of a round.
        goodput: Step times.
        calibration: Of the fit; where the online one starts.
        confidence: Where the mean confidence starts.
    """

    def __init__(
        self,
        spec: SpeculationSpec,
        goodput: Goodput,
        calibration: Calibration | None = None,
        confidence: float | None = None,
    ) -> None:
        super().__init__(goodput, fanout=max(spec.width, FEWEST_CHOICES))
        self.calibration = OnlineCalibration(calibration, confidence)
        self.traffic = Traffic(
            goodput.prompt_seconds,
            goodput.draft_prompt_seconds,
            hears_late=not spec.is_async,
            answer_tokens=goodput.answer_tokens,
        )
        self._spec = spec
        self._was_plain = True
        self._are_roots = True  # of all trees, nothing else is drafted
        self._worth: Worth = []  # of the roots and of all drafted nodes
        self._named: Leaves = []  # of a draft forward that is not counted yet
        self._is_first = True  # of its round
        self._first = FirstLook(())
        self._next_first: FirstLook | None = None  # of the round that comes, as far as is known

    def _begin_drafting(self, trees: Sequence[BudgetTree]) -> None:
        """A round starts that looks at the trees, whose prices are known."""
        known, self._next_first = self._next_first, None
        self._first = known if known is not None and known.is_of(trees) else FirstLook(trees)
        self._choice = self._round.plain  # the best of what is drafted
        self._saved = 0.0  # seconds per token of each request, by drafting for all
        self._are_roots = True  # as far as is known
        self._named = []
        if not self._was_plain:
            # What new requests start with: of those that draft, so that a hard batch does not stay.
            self.calibration.take_in(self._first.drafted_for)

    @property
    def mean_confidence(self) -> float:
        """See ``Repeating``."""
        return self.calibration.confidence

    def leaves(self, trees: Sequence[DraftTree], done: int) -> Leaves:
        """See ``Speculation``."""
        if self.repeats:
            return self._likeliest_leaves(trees, done)
        own = cast("Sequence[BudgetTree]", trees)
        if done:
            self._await_forward()
            if self._cold:
                self._cold = [i for i in self._cold if not own[i].num_expanded]
        else:
            self._find_missing(own)
        self._choice = self._choose(own)
        most = MOST_AWAITED if self._spec.is_async else self._spec.expansions
        if done >= most or not own:
            return no_leaves(own)
        left = 1 if self._spec.is_async else most - done
        margin = MARGIN if self._was_plain and not done else 0.0
        self._named, self._is_first = self._worthwhile(own, left, margin), not done
        return self._named

    def _find_missing(self, trees: Sequence[BudgetTree]) -> None:
        """Whom the draft has not run for, and whose last token runs with the first forward."""
        missing = [tree.base_len - 1 - tree.prefix_len for tree in trees]
        most = max(missing) if missing else 0
        self._cold = [] if most < COLD else [i for i, n in enumerate(missing) if n >= COLD]
        self._behind = missing if most <= 1 else rows_behind(missing)
        # Of those that are not drafted for yet as many are foreseen as will be accepted.
        missed = sum(self._behind) + sum([trees[i].confidence for i in self._cold])
        self._round.run_behind(len(trees), missed)

    def _choose(self, trees: Sequence[BudgetTree]) -> Choice:
        """The nodes of the best quotient: the heaviest of all requests."""
        this = self._round
        if self._are_roots:  # a tree without a row is its root alone, whatever its nodes
            self._are_roots = not sum([tree.num_expanded for tree in trees])
        # Of the roots, and the chances of all drafted nodes.
        self._worth = [this.roots]
        if not self._are_roots:
            self._worth = worth_of_nodes(trees, this.roots, self._spec.rows)
        if len(self._worth) == 1 and not this.awaited:
            return this.plain
        return this.best(self._worth)

    def _worthwhile(self, trees: Sequence[BudgetTree], left: int, margin: float) -> Leaves:
        """Leaves of the next forward; none if it does not pay."""
        gains = self._first.gains() if self._are_roots else gains_of(trees)
        if self._cold:
            gains = gains.copy()
            if self._spec.is_async:
                # What they missed is run beside the verification: it may be long.
                for i in self._cold:
                    gains[i] = 0.0
        # Where nothing is drafted yet the first one alone may not pay, but several may. The second
        # most often pays: always with eight requests or more, and to 80 % with one.
        elif (self._round.num_forwards > 1 or left <= 1) and self._round.cannot_gain(
            len(self._worth), gains, self._choice.value
        ):
            return no_leaves(trees)
        least = self._choice.value * (1.0 + margin)
        value, level = self._promised(trees, gains, left, least)
        if value > least and self._cold:
            confidence = [tree.confidence for tree in trees]
            if self._leave_cold(trees, gains, confidence, left):
                if not any(gains):
                    return no_leaves(trees)
                value, level = self._promised_by_warm(trees, gains, left, least)
        if value <= least:
            return no_leaves(trees)
        level = min(level, max(gains))
        width, are_roots = self._spec.width, len(self._worth) == 1
        return leaves_worth(trees, width, gains, level, are_roots=are_roots)

    def _promised(
        self, trees: Sequence[BudgetTree], gains: list[float], left: int, least: float
    ) -> Promise:
        """What further forwards promise; where prompts are judged, what several save as well."""
        if self._cold:
            return self._best_ahead(gains, [tree.confidence for tree in trees], left)
        return self._promised_by_warm(trees, gains, left, least)

    def _promised_by_warm(
        self, trees: Sequence[BudgetTree], gains: list[float], left: int, least: float
    ) -> Promise:
        """What one more forward promises, or, where it matters, the best number of several."""
        if self._are_roots:
            nodes = self._first.with_gains(self._round.roots, gains)
        else:
            nodes = with_gains(self._worth, gains)
        found = next_forward(self._round, self._worth, nodes, gains, self._choice.rate)
        if found[0] > least or self._round.awaited or left <= 1:
            return found
        return self._best_ahead(gains, [tree.confidence for tree in trees], left)

    def _best_ahead(self, gains: list[float], confidence: list[float], left: int) -> Promise:
        """What 1 to ``left`` promise; also notes the seconds that such rounds save."""
        value, level, self._saved = best_forwards(
            self._round, self._worth, gains, confidence, left, self._choice.rate
        )
        return value, level

    def _leave_cold(
        self, trees: Sequence[BudgetTree], gains: list[float], confidence: list[float], most: int
    ) -> bool:
        """Take the gain from cold requests for which running what they missed does not pay.

        Returns:
            Whether there are any.
        """
        saved = self._saved_by_cold(gains, confidence, most) * self._lasting(self._saved)
        costly = self._costly(trees, self._cold, saved)
        for i in costly:
            gains[i] = 0.0
        return bool(costly)

    def _saved_by_cold(self, gains: list[float], confidence: list[float], most: int) -> float:
        """Seconds per token that drafting for a cold request saves.

        Its share of what drafting for all saves; beyond that for others, while this goes on.
        """
        this, share = self._round, self._saved / self._round.batch
        if self._spec.is_async or 2 * len(self._cold) >= len(gains):
            return share
        usual = saved_usually(this, len(gains), self.calibration.confidence, most) / this.batch
        if not self.traffic.repays_prompts(usual, is_drafting=not self._was_plain):
            return share
        others = saved_by_others(this, self._worth, gains, confidence, most, self._cold)
        return (self._saved - max(others, 0.0)) / len(self._cold)

    def _await_forward(self) -> int:
        """Count what the last draft forward takes, once: while it runs, or else behind it.

        Returns:
            Its rows, 0 if there is none that was not counted yet.
        """
        rows = sum(map(len, self._named))
        if rows:
            if self._is_first and any(self._behind):
                pairs = zip(self._behind, self._named, strict=True)
                rows += sum([more for more, nodes in pairs if nodes])
            self._round.wait_for(self._round.draft.at(rows))
            self._named = []
        return rows
