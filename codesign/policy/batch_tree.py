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
  times, unless it is too far behind, when rows are shared out: they go to it first; nobody else
  gets none. What is drafted does not depend on it: forwards that all pay for would serve few.

Chances are calibrated online (codesign/policy/online_calibration.py).

Must not import torch or read a clock.

Source:
    This project. Goodput of a round: SpecServe; best-first trees beside the verification:
    SwiftSpec; rows by path chance and need: AdaServe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from codesign.policy.batch_rows import (
    NEVER,
    SURE,
    Choice,
    Floats,
    RowPrices,
    best_nodes,
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
_MOST_AHEAD = 256  # nodes that are foreseen: of large batches few forwards ever pay
_MEMORY = 0.02  # weight of a round in the mean confidence


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
        self._urgency = np.ones(0)
        self._begin_round(0, 0)

    def _begin_round(self, batch: int, context: int) -> None:
        self._batch, self._context = batch, context
        self._verifying.extra = self._goodput.target_each * max(batch - 1, 0)
        self._drafting.extra = self._goodput.draft_each * max(batch - 1, 0)
        self._spent = 0.0  # seconds of draft forwards that the target waits for
        self._beside = 0.0  # seconds of those beside the verification
        self._budget = 0.0  # seconds of the verification
        self._draft_rows: float | None = None  # seconds of a row of a draft forward
        self._worth: Floats = np.empty(0)  # of all nodes, descending
        self._saved = 0.0  # seconds per token of each request, by drafting for all
        self._tokens = float(batch)  # of the roots
        prompt_rows, num_waiting = self.sharing
        self._base = batch + prompt_rows  # rows of the target's forward without any draft
        self._stall, self._power = self.traffic.stall, 1.0
        if prompt_rows and batch:
            self._power += WAITING * num_waiting / batch / (1.0 - min(self.traffic.share, _FULL))
            self._power = min(self._power, _MOST_POWER)
        seconds = self._verifying.of(self._base, context)
        self._plain_seconds = max(seconds + self._stall, SURE)
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
        self._begin_round(batch, context)
        self._urgency = self._urgencies(own, progress, batch, context)
        if own:
            self._learn_confidence(own)

    def _learn_confidence(self, trees: Sequence[BudgetTree]) -> None:
        """What new requests start with: of those that draft, so that a hard batch does not stay."""
        found = [tree.confidence for tree in trees if tree.prefix_len]
        if found and not self._was_plain:
            mean = sum(found) / len(found)
            self.calibration.confidence += _MEMORY * (mean - self.calibration.confidence)

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
        gains = np.exp(tops) * confidence
        least = self._choice.value * (1.0 + margin)
        value, level = self._next_value(gains)
        # Where nothing is drafted yet the first forward alone may not pay, but several may.
        if self._cold or (value <= least and not self._spent and left > 1):
            value, level = self._best_ahead(gains, confidence, left)
        if value > least and self._leave_cold(trees, gains):
            value, level = self._best_ahead(gains, confidence, left)  # of those that are left
        if value <= least:
            return leaves
        level = min(level, float(gains.max()))
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

    def _next_value(self, gains: Floats) -> tuple[float, float]:
        """Value with one more forward, and the least gain of a leaf that is worth its row then.

        The children compete with all nodes that are there: where a step costs the same up to some
        number of rows, they take the place of the least of those that fill it.
        """
        worth = np.concatenate((self._worth, gains))
        worth.sort()
        worth = worth[::-1]
        num, fixed = len(gains), self._spent + self._goodput.overhead
        draft = self._drafting(0, num, self._context)
        target = self._verifying(self._base, len(worth), self._context)[1:]
        tokens = self._tokens + worth.cumsum()
        best = int(self._value(tokens, target + (fixed + draft[num])).argmax())
        level = max(float(worth[best]), SURE)
        rows = int((gains >= level).sum())
        if not rows:
            return 0.0, level
        seconds = float(target[best] + draft[rows]) + fixed
        value = float(self._value(float(tokens[best]), seconds))
        return value, self._least_gain(worth, best + 1, num)

    def _best_ahead(self, gains: Floats, confidence: Floats, left: int) -> tuple[float, float]:
        """The same with 1 to ``left`` more forwards, whichever is best.

        Each is over a request's likeliest leaf, at its mean confidence. Also finds the seconds that
        such rounds save for every token of each request.
        """
        left = min(left, max(_MOST_AHEAD // max(len(gains), 1), 1))
        gains_DB = gains_ahead(gains, confidence, left)
        worth = np.concatenate((self._worth, gains_DB.ravel()))
        depth = np.repeat(np.arange(left + 1), [len(self._worth), *[len(gains)] * left])
        order = worth.argsort()[::-1]
        worth, depths = worth[order], np.arange(1, left + 1)
        is_there_DN = depth[order] <= depths[:, None]
        tokens_DN = self._tokens + (is_there_DN * worth).cumsum(axis=1)
        target_DN = self._verifying(self._base, len(worth), self._context)[
            is_there_DN.cumsum(axis=1)
        ]
        draft = self._drafting(0, max(len(gains), 1), self._context)
        fixed = self._spent + self._goodput.overhead
        all_D = fixed + depths * draft[len(gains)]
        best_D = self._value(tokens_DN, target_DN + all_D[:, None]).argmax(axis=1)
        level_D = np.maximum(worth[best_D], SURE)
        rows_DD = (gains_DB >= level_D[:, None, None]).sum(axis=2)
        drafting_D = np.where(np.tri(left, dtype=bool), draft[rows_DD], 0.0).sum(axis=1)
        tokens_D = tokens_DN[depths - 1, best_D]
        seconds_D = fixed + drafting_D + target_DN[depths - 1, best_D]
        values_D = np.where(rows_DD[:, 0] > 0, self._value(tokens_D, seconds_D), 0.0)
        plain = self._plain_seconds - self._stall
        self._saved = plain - self._tokens * float((seconds_D / tokens_D).min())
        best = int(values_D.argmax())
        count = int(is_there_DN[best, : best_D[best] + 1].sum())
        level = self._least_gain(worth[is_there_DN[best]], count, len(gains))
        return float(values_D[best]), level

    def _least_gain(self, worth: Floats, count: int, num: int) -> float:
        """Least gain of a leaf that is worth its row in the next draft forward.

        Without it the target's row goes to the best of the nodes that are left out, or is saved.

        Args:
            worth: Of all nodes, descending, with those that the forward is to make.
            count: How many of them would be verified.
            num: Requests.
        """
        target = self._verifying(self._base, count, self._context)
        saved = float(target[count] - target[count - 1]) * self._choice.rate
        other = float(worth[count]) if count < len(worth) else 0.0
        return max(float(worth[count - 1]), max(other, saved) + self._row_price(num), SURE)

    def _row_price(self, num: int) -> float:
        """Tokens that the seconds of a row of a draft forward would yield."""
        if self._draft_rows is None:  # the same in all of a round
            draft = self._drafting.of
            self._draft_rows = (draft(num + 1, self._context) - draft(1, self._context)) / num
        return max(self._draft_rows * self._choice.rate, SURE)

    # Rows.

    def _choose(self, trees: Sequence[BudgetTree]) -> Choice:
        """The nodes of the best quotient: the heaviest of all requests."""
        self._worth = worth = worth_of_nodes(trees, None, self._spec.rows)
        if not len(worth) and not self._spent:
            return self._choice  # the roots alone
        return self._best(worth, self._tokens)

    def _best(self, worth: Floats, roots: float) -> Choice:
        """Of nodes of this worth, descending, beside roots that are worth so much."""
        tokens = np.full(len(worth) + 1, roots)
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
        choice = self._choice
        if choice.rows and (self._urgency > 1.0).any():
            worth = worth_of_nodes(own, self._urgency, self._spec.rows)
            choice = self._best(worth, float(self._urgency.sum()) + self._batch - len(own))
        chosen = best_nodes(own, self._urgency, choice, self._spec.rows)
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

    # Draft forwards beside the verification.

    def _plan_beside(self, trees: Sequence[BudgetTree]) -> None:
        """Whether to draft at all."""
        confidence = np.array([tree.confidence for tree in trees])
        self._may_draft = bool(trees) and (
            not self._was_plain or self._pays_in_the_end(confidence, confidence)
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
        level = max(row_seconds * value, SURE)
        confidence, tops = prospects(own)
        gains = confidence
        bounds = np.minimum(np.log(level / np.maximum(gains, SURE)), 0.0)
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
