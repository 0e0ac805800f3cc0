"""Trees that share the rows of the batch, and the time of a round.

The policy maximises expected tokens per second of a round: (requests + chances of the nodes that
are verified) / seconds, as predicted by the fitted step times. What follows from that:

- Rows. All requests' nodes, sorted by path chance, are taken as long as the quotient rises. The
  chance of the last one is the price of a row, the same for all requests.
- Draft forwards that the target waits for. One more is made if the best quotient with it, at the
  confidences seen lately, is above the best one without. Only leaves whose children may be worth a
  row take part. Asynchronous, this decides whether a batch waits for its requests that missed.
- Draft forwards beside the verification, asynchronous only: as many as fit, by the step times; one
  that does not fit is made if it promises more tokens than the time that it is late would yield.
- No draft at all where that has the best quotient: plain decoding, without a tree to move. Coming
  back needs ``MARGIN`` more. The prompt (or what it missed) of a request that was never drafted for
  is run only if the tokens that it is still expected to emit will save more time than that takes.
- Urgency. A token of a request that falls behind its TPOT target counts more, up to ``MOST_URGENT``
  times, unless it is too far behind. Rows go to it first; nobody else gets none.

Chances are calibrated online (codesign/policy/online_calibration.py).

Must not import torch or read a clock.

Source:
    This project. Goodput of a round: SpecServe; best-first trees beside the verification:
    SwiftSpec; rows by path chance and need: AdaServe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import log
from typing import Any, cast

import numpy as np

from codesign.policy.batch_rows import (
    NEVER,
    Choice,
    Floats,
    RowPrices,
    gains_ahead,
    leaves_above,
    prospects,
    worth_of_nodes,
)
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import MAX_TREE_ROWS, Progress, Speculation, context_rows
from codesign.policy.online_calibration import OnlineCalibration
from codesign.policy.spec import SpeculationSpec
from codesign.policy.traffic import Traffic
from codesign.policy.tree import DraftTree

Leaves = list[list[int]]

COLD = 16  # missing tokens from which running them is a decision of its own
MARGIN = 0.02  # of goodput that drafting must promise after a round without
MOST_URGENT = 2.0  # weight of a token of a request that is behind its target
HOPELESS = 1.5  # times its target per token, from which a request counts like any other
FEWEST_CHOICES = 4  # children of a node
MOST_AWAITED = 2  # draft forwards that an asynchronous round may wait for
WAITING = 8.0  # running requests that one counts for whose prompt shares the rounds' forwards
_FULL = 0.9  # share of time from which prompts are taken to wait for ever
_MOST_POWER = 50.0
_SURE = 1e-9  # of equal log chances: parents stand with their children


class BatchTree(Speculation):
    """See the module's text.

    Args:
        spec: Most rows and leaves of a request, most forwards of a round.
        goodput: Step times and the TPOT target.
        calibration: Of the fit; where the online one starts.
    """

    is_batch_coupled = True
    needs_progress = True
    decides = True

    def __init__(
        self, spec: SpeculationSpec, goodput: Goodput, calibration: Calibration | None = None
    ) -> None:
        super().__init__()
        self.calibration = OnlineCalibration(calibration)
        self.tree_type = partial(BudgetTree, calibration=self.calibration)
        self.fanout = max(spec.width, FEWEST_CHOICES)
        self.overlap = spec.max_overlap
        self.traffic = Traffic(
            lambda rows: goodput.target_seconds(rows, 0.0), hears_late=not spec.is_async
        )
        self._spec = spec
        self._goodput = goodput
        self._verifying = RowPrices(goodput.target_seconds)
        self._drafting = RowPrices(goodput.draft_seconds)
        self._was_plain = True
        self._num_rounds = 0
        self._begin_round(0, 0, np.ones(0))

    def _begin_round(self, batch: int, context: int, urgency: Floats) -> None:
        self._batch, self._context, self._urgency = batch, context, urgency
        self._verifying.extra = self._goodput.target_each * max(batch - 1, 0)
        self._drafting.extra = self._goodput.draft_each * max(batch - 1, 0)
        self._spent = 0.0  # seconds of draft forwards that the target waits for
        self._beside = 0.0  # seconds of those beside the verification
        self._budget = 0.0  # seconds of the verification
        self._draft_rows: float | None = None  # seconds of a row for each request
        self._saved = 0.0  # seconds per token of each request, by drafting for all
        self._tokens = float(urgency.sum()) + batch - len(urgency)  # of the roots
        self._is_urgent = self._tokens > batch
        prompt_rows, num_waiting = self.sharing
        self._base = batch + prompt_rows  # rows of the target's forward without any draft
        self._stall, self._power = self.traffic.stall, 1.0
        if prompt_rows and batch:
            self._power += WAITING * num_waiting / batch / (1.0 - min(self.traffic.share, _FULL))
            self._power = min(self._power, _MOST_POWER)
        seconds = self._verifying.of(self._base, context)
        self._plain_seconds = max(seconds + self._stall, _SURE)
        self._plain = self._value(self._tokens, seconds) if batch else 0.0
        rate = self._power * self._tokens / self._plain_seconds
        self._choice = Choice(self._plain, rate, self._tokens, 0, 1.0)
        self._may_draft = True
        self._stride = 1 + batch // 16  # one in so many requests teaches the calibration

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        own = cast("Sequence[BudgetTree]", trees)
        num_beside, rows_beside = self.beside
        batch, context = len(trees) + num_beside, context_rows(trees) + rows_beside
        self.traffic.observe(own, self.now, self.sharing)
        self._begin_round(batch, context, self._urgencies(own, progress, batch, context))
        if own:
            mean = sum([tree.confidence for tree in own]) / len(own)
            self.calibration.confidence += 0.1 * (mean - self.calibration.confidence)

    def _value(self, tokens: Any, seconds: Any) -> Any:
        """Tokens per second, the stall between rounds counted.

        Where prompts share the forward, each further second of the round is one of those that wait
        for them, too: their number raises the price of time, not that of tokens. ``WAITING`` was
        found by simulation: with 1, 3 and 8 the mean latency of three traces fell each time.
        """
        if self._power == 1.0:
            return tokens / (seconds + self._stall)
        return tokens / self._plain_seconds / (seconds / self._plain_seconds) ** self._power

    def _urgencies(
        self, trees: Sequence[BudgetTree], progress: Sequence[Progress], batch: int, context: int
    ) -> Floats:
        """(B,) weight of a token of each request."""
        run = self._goodput.slo_tpot
        if run is None and all(one.slo_tpot is None for one in progress):
            return np.ones(len(trees))
        step = self._verifying.of(batch, context)
        weights = np.ones(len(trees))
        for i, one in enumerate(progress):
            target = one.slo_tpot or run
            if target and one.elapsed + step > target * (one.tokens + 1):
                weights[i] = _urgency(one, target, step)
        return weights

    # Draft forwards that the target waits for.

    def leaves(self, trees: Sequence[DraftTree], done: int) -> Leaves:
        own = cast("Sequence[BudgetTree]", trees)
        if done:
            self._spent += self._drafting.of(self._last_rows, self._context)
        else:
            self._cold = [
                i
                for i, tree in enumerate(own)
                if not tree.num_expanded and tree.base_len - tree.prefix_len > COLD
            ]
        self._choice = self._choose(own)
        most = MOST_AWAITED if self._spec.is_async else self._spec.expansions
        if done >= most or not own:
            return [[] for _ in own]
        left = 1 if self._spec.is_async else most - done
        margin = MARGIN if self._was_plain and not done else 0.0
        leaves = self._worthwhile(own, left, margin)
        self._last_rows = sum([len(nodes) for nodes in leaves])
        return leaves

    def _worthwhile(self, trees: Sequence[BudgetTree], left: int, margin: float) -> Leaves:
        """Leaves of the next forward; none if it does not pay."""
        leaves: Leaves = [[] for _ in trees]
        confidence, tops = prospects(trees)
        self._cold = [i for i in self._cold if not trees[i].num_expanded]
        if self._spec.is_async and self._cold:
            # What a request missed is run beside the verification: it may be long.
            tops[self._cold] = NEVER
        gains = self._urgency * np.exp(tops) * confidence
        level = self._level(len(trees), is_drafted=False)
        taken = gains[gains >= level]
        if not len(taken):
            return leaves
        least = self._choice.value * (1.0 + margin)
        value = self._next_value(taken)
        if value <= least or self._cold:
            value = self._best_ahead(gains, confidence, level, left)
        if value > least and self._leave_cold(trees, gains):
            value = self._best_ahead(gains, confidence, level, left)  # of those that are left
        if value <= least:
            return leaves
        level = self._level(len(trees), is_drafted=True)
        paying = (gains >= level).nonzero()[0]
        bounds = np.log(level / gains[paying]) + tops[paying]
        width = self._spec.width
        for i, bound in zip(paying.tolist(), bounds.tolist(), strict=True):
            tree = trees[i]
            ranked = tree.open
            if (len(ranked) == 1 or ranked[1][0] < bound) and tree.num_expanded < MAX_TREE_ROWS:
                leaves[i] = [ranked[0][1]]  # most often: its likeliest leaf pays, no other does
            else:
                leaves[i] = leaves_above(tree, width, bound)
        return leaves

    def _leave_cold(self, trees: Sequence[BudgetTree], gains: Floats) -> bool:
        """Take the gain from requests for which running what they missed costs more than it saves.

        Returns:
            Whether there are any.
        """
        if not self._cold:
            return False
        # Both are seconds of the machine: prompts that stall this round take as long either way.
        saved, prompt = self._saved / self._batch, self._goodput.draft_prompt_seconds
        left_of, left = self.traffic.expected_left, []
        for i in self._cold:
            tree = trees[i]
            if left_of(tree) * saved <= prompt(tree.base_len - 1 - tree.prefix_len):
                left.append(i)
        gains[left] = 0.0
        return bool(left)

    def _is_worth_reading(self) -> bool:
        """The same of a prompt that begins now, at what drafting saves in this round."""
        seconds = self._spent + self._budget + self._goodput.overhead
        saved = self._plain_seconds - self._stall - self._tokens * seconds / self._choice.tokens
        prompt = self._goodput.draft_prompt_seconds(self.traffic.mean_prompt)
        return saved * self.traffic.expected_left() > prompt * self._batch

    def _next_value(self, taken: Floats) -> float:
        """Value with one more forward, over the likeliest leaf of each request that pays."""
        choice, context = self._choice, self._context
        seconds = self._spent + self._drafting.of(len(taken), context)
        rows = self._base + choice.rows + len(taken)
        seconds += self._verifying.of(rows, context) + self._goodput.overhead
        return self._value(choice.tokens + float(taken.sum()), seconds)

    def _best_ahead(self, gains: Floats, confidence: Floats, level: float, left: int) -> float:
        """Largest value with 1 to ``left`` more forwards, at each request's mean confidence.

        Also finds the seconds that such rounds save for every token of each request.
        """
        choice = self._choice
        gains_DB = gains_ahead(gains, confidence, left)
        is_taken_DB = gains_DB >= level
        rows_D = is_taken_DB.sum(axis=1)
        tokens_D = choice.tokens + (gains_DB * is_taken_DB).sum(axis=1).cumsum()
        total_D = choice.rows + rows_D.cumsum()
        target = self._verifying(self._base, int(total_D[-1]), self._context)[total_D]
        draft_D = self._drafting(0, max(len(gains), 1), self._context)[rows_D].cumsum()
        seconds_D = self._spent + draft_D + target + self._goodput.overhead
        values_D = np.where(rows_D > 0, self._value(tokens_D, seconds_D), 0.0)
        plain = self._plain_seconds - self._stall
        self._saved = plain - self._tokens * float((seconds_D / tokens_D).min())
        return float(values_D.max())

    def _level(self, num: int, *, is_drafted: bool) -> float:
        """Price of a further row in tokens: its seconds at what a second yields now.

        Args:
            num: Rows over which the seconds of one are averaged.
            is_drafted: Its row in a draft forward is counted, too.
        """
        first, context = self._base + self._choice.rows, self._context
        target, draft = self._verifying.of, self._drafting.of
        seconds = target(first + num, context) - target(first, context)
        if is_drafted:
            if self._draft_rows is None:  # the same in all of a round
                self._draft_rows = draft(num + 1, context) - draft(1, context)
            seconds += self._draft_rows
        return max(seconds / num * self._choice.rate, _SURE)

    # Rows.

    def _choose(self, trees: Sequence[BudgetTree]) -> Choice:
        """The nodes of the best quotient: the heaviest of all requests."""
        worth = worth_of_nodes(trees, self._urgency if self._is_urgent else None, self._spec.rows)
        if not len(worth) and not self._spent:
            return self._choice  # the roots alone
        tokens = np.full(len(worth) + 1, self._tokens)
        tokens[1:] += worth.cumsum()
        seconds = self._verifying(self._base, len(worth), self._context) + self._spent
        seconds[0 if self._spent else 1 :] += self._goodput.overhead
        values = self._value(tokens, seconds)
        best = int(values.argmax())
        level = float(worth[best - 1]) if best else np.inf
        rate = self._power * float(tokens[best]) / (float(seconds[best]) + self._stall)
        return Choice(float(values[best]), rate, float(tokens[best]), best, level)

    def select(self, trees: Sequence[DraftTree]) -> Leaves:
        own = cast("Sequence[BudgetTree]", trees)
        chosen = self._best_nodes(own) if self._choice.rows else [[0] for _ in own]
        for i in range(self._num_rounds % self._stride, len(own), self._stride):
            own[i].sent = chosen[i]
        self._num_rounds += 1
        num_rows = sum([len(nodes) for nodes in chosen]) - len(own)
        self._was_plain = not num_rows and not self._spent
        self._budget = self._verifying.of(self._base + num_rows, self._context)
        if self._spec.is_async:
            self._plan_beside(own)
        self.rests = self._was_plain and not self.overlap
        self.reads_prompts = not self.rests and (self._spec.is_async or self._is_worth_reading())
        return chosen

    def _best_nodes(self, trees: Sequence[BudgetTree]) -> Leaves:
        """The nodes of the choice, root included."""
        chosen: Leaves = []
        level, most = self._choice.level, self._spec.rows
        common = log(level) - _SURE
        for tree, urgency in zip(trees, self._urgency.tolist(), strict=True):
            bound = common if urgency == 1.0 else log(level / urgency) - _SURE
            weights = tree.log_weights
            if bound > 0.0 or len(weights) == 1:
                chosen.append([0])
                continue
            nodes = [n for n, weight in enumerate(weights) if weight >= bound]
            if len(nodes) > most:
                nodes = sorted(nodes, key=weights.__getitem__, reverse=True)[:most]
            chosen.append(nodes)
        return chosen

    # Draft forwards beside the verification.

    def _plan_beside(self, trees: Sequence[BudgetTree]) -> None:
        """Whether to draft at all."""
        confidence = np.array([tree.confidence for tree in trees])
        self._may_draft = bool(trees) and (
            not self._was_plain or self._pays_in_the_end(self._urgency * confidence, confidence)
        )
        self.overlap = self._spec.expansions if self._may_draft else 0

    def _pays_in_the_end(self, gains: Floats, confidence: Floats) -> bool:
        """Whether trees that cost nothing would beat plain decoding."""
        depth = max(int(self._budget / max(self._drafting.of(len(gains), 0), 1e-9)), 1)
        gains_DB = gains_ahead(gains, confidence, min(depth, self._spec.expansions))
        worth = -np.sort(-gains_DB.ravel())
        seconds = self._verifying(self._base, len(worth), self._context) + self._goodput.overhead
        values = self._value(self._tokens + np.concatenate(([0.0], worth.cumsum())), seconds)
        return bool(values[1:].max(initial=0.0) > self._plain * (1.0 + MARGIN))

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> Leaves:
        own = cast("Sequence[BudgetTree]", trees)
        stop: Leaves = [[] for _ in own]
        if not self._may_draft:
            return stop
        value = self._choice.rate
        draft, context = self._drafting.of, self._context
        row_seconds = (draft(len(own) + 1, context) - draft(1, context)) / max(len(own), 1)
        level = max(row_seconds * value, _SURE)
        confidence, tops = prospects(own)
        gains = self._urgency * confidence
        bounds = np.minimum(np.log(level / np.maximum(gains, _SURE)), 0.0)
        leaves: Leaves = [[] for _ in own]
        prompts = 0.0
        for i in (tops >= bounds).nonzero()[0].tolist():
            tree = own[i]
            if not tree.num_expanded and tree.missing >= COLD and tree.base_len > tree.first_len:
                seconds = prompts + self._goodput.draft_prompt_seconds(tree.missing)
                if not self._is_worth_delay(tree, gains[i], self._beside + seconds - self._budget):
                    continue
                prompts = seconds
            leaves[i] = leaves_above(tree, self._spec.width, bounds[i])
        num_rows = sum([len(nodes) for nodes in leaves])
        seconds = draft(num_rows, context)
        late = self._beside + seconds - max(self._budget, self._beside)
        gain = float((gains * np.exp(tops))[[i for i, nodes in enumerate(leaves) if nodes]].sum())
        if not num_rows or (late * value > gain and not prompts):
            self._may_draft = False
            return stop
        self._beside += seconds + prompts
        return leaves

    def _is_worth_delay(self, tree: BudgetTree, gain: float, late: float) -> bool:
        """Whether drafting for a request will yield more than running what it missed delays all."""
        num_rounds = self.traffic.expected_left(tree) / (1.0 + gain)
        return gain * num_rounds > self._choice.rate * late


def _urgency(one: Progress, target: float, step: float) -> float:
    """Weight of the tokens of a request that is owed more than one: how many, within bounds."""
    if one.elapsed > HOPELESS * target * (one.tokens + 1):
        return 1.0
    return min((one.elapsed + step) / target - one.tokens, MOST_URGENT)
