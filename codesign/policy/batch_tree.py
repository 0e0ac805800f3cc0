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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from typing import cast

import numpy as np
from numpy.typing import NDArray

from codesign.policy.budget_tree import BudgetTree
from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import MAX_TREE_ROWS, Progress, Speculation, context_rows
from codesign.policy.online_calibration import OnlineCalibration
from codesign.policy.spec import SpeculationSpec
from codesign.policy.tree import DraftTree

Floats = NDArray[np.float64]
Leaves = list[list[int]]

MARGIN = 0.02  # of goodput that drafting must promise after a round without
COLD = 16  # missing tokens from which running them is a decision of its own
MOST_URGENT = 2.0  # weight of a token of a request that is behind its target
HOPELESS = 1.5  # times its target per token, from which a request counts like any other
FEWEST_CHOICES = 4  # children of a node
MOST_AWAITED = 2  # draft forwards that an asynchronous round may wait for
START_OUTPUT = 64.0  # tokens that a request is expected to emit, until some have finished
_MEMORY = 0.05  # weight of a finished request in that mean
_SURE = 1e-9  # of equal log chances: parents stand with their children


class RowPrices:
    """Seconds of forwards by their rows, worked out once."""

    def __init__(self, seconds: Callable[[float, float], float]) -> None:
        self._seconds = seconds
        self._fixed = np.empty(0)
        self._per_context = np.empty(0)

    def __call__(self, first: int, count: int, context: int) -> Floats:
        """(count + 1,) seconds of forwards of ``first``, ..., ``first + count`` rows."""
        if first + count >= len(self._fixed):
            size = 2 * (first + count) + 64
            fixed = [self._seconds(rows, 0.0) for rows in range(size)]
            far = [self._seconds(rows, 4096.0) for rows in range(size)]
            self._fixed = np.array(fixed)
            self._per_context = (np.array(far) - self._fixed) / 4096.0
        part = slice(first, first + count + 1)
        return self._fixed[part] + context * self._per_context[part]


@dataclass(frozen=True, slots=True)
class Choice:
    """The best nodes to verify, of those that are drafted.

    Attributes:
        value: Expected tokens per second.
        tokens: Expected tokens.
        rows: Nodes beside the roots.
        level: Least weight, urgency times chance, of a chosen node.
    """

    value: float
    tokens: float
    rows: int
    level: float


class BatchTree(Speculation):
    """See the module's text.

    Args:
        spec: Most rows and leaves of a request, most forwards of a round.
        goodput: Step times and the TPOT target.
        calibration: Of the fit; where the online one starts.
    """

    is_batch_coupled = True
    needs_progress = True

    def __init__(
        self, spec: SpeculationSpec, goodput: Goodput, calibration: Calibration | None = None
    ) -> None:
        super().__init__()
        self.calibration = OnlineCalibration(calibration)
        self.tree_type = partial(BudgetTree, calibration=self.calibration)
        self.fanout = max(spec.width, FEWEST_CHOICES)
        self.overlap = spec.max_overlap
        self.mean_output = START_OUTPUT
        self._spec = spec
        self._goodput = goodput
        self._verifying = RowPrices(goodput.target_seconds)
        self._drafting = RowPrices(goodput.draft_seconds)
        self._known: list[BudgetTree] = []
        self._was_plain = True
        self._num_rounds = 0
        self._begin_round(0, 0, np.ones(0))

    def _begin_round(self, batch: int, context: int, urgency: Floats) -> None:
        self._batch, self._context, self._urgency = batch, context, urgency
        self._spent = 0.0  # seconds of draft forwards that the target waits for
        self._beside = 0.0  # seconds of those beside the verification
        self._budget = 0.0  # seconds of the verification
        self._last_rows = 0  # of the last draft forward
        self._tokens = float(urgency.sum()) + batch - len(urgency)  # of the roots
        self._choice = Choice(0.0, self._tokens, 0, 1.0)
        self._may_draft = True
        self._stride = 1 + batch // 16  # one in so many requests teaches the calibration

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        own = cast("Sequence[BudgetTree]", trees)
        num_beside, rows_beside = self.beside
        batch, context = len(trees) + num_beside, context_rows(trees) + rows_beside
        self._learn_lengths(own)
        self._begin_round(batch, context, self._urgencies(own, progress, batch, context))
        if own:
            mean = sum([tree.confidence for tree in own]) / len(own)
            self.calibration.confidence += 0.1 * (mean - self.calibration.confidence)
        self._plain = self._tokens / float(self._verifying(batch, 0, context)[0]) if batch else 0.0

    def _learn_lengths(self, trees: Sequence[BudgetTree]) -> None:
        """Take in how many tokens the requests have emitted that are gone."""
        if len(trees) != len(self._known) or any(
            a is not b for a, b in zip(trees, self._known, strict=True)
        ):
            here = set(map(id, trees))
            for tree in self._known:
                if id(tree) not in here:
                    emitted = tree.base_len - tree.first_len
                    self.mean_output += _MEMORY * (emitted - self.mean_output)
            self._known = list(trees)

    def _urgencies(
        self, trees: Sequence[BudgetTree], progress: Sequence[Progress], batch: int, context: int
    ) -> Floats:
        """(B,) weight of a token of each request."""
        run = self._goodput.slo_tpot
        if run is None and all(one.slo_tpot is None for one in progress):
            return np.ones(len(trees))
        step = float(self._verifying(batch, 0, context)[0])
        weights = [_urgency(one, one.slo_tpot or run, step) for one in progress]
        return np.array(weights or [1.0] * len(trees))

    # Draft forwards that the target waits for.

    def leaves(self, trees: Sequence[DraftTree], done: int) -> Leaves:
        own = cast("Sequence[BudgetTree]", trees)
        if done:
            self._spent += float(self._drafting(self._last_rows, 0, self._context)[0])
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
        confidence = np.array([tree.confidence for tree in trees])
        tops = [tree.open[0][0] if tree.open and self._may_run(tree) else -100.0 for tree in trees]
        gains = self._urgency * np.exp(tops) * confidence
        value, depth = self._best_ahead(gains, confidence, left)
        if value <= self._choice.value * (1.0 + margin):
            return [[] for _ in trees]
        level = self._level(len(trees), draft_rows=depth)
        leaves: Leaves = []
        for tree, gain in zip(trees, gains.tolist(), strict=True):
            if gain < level or not self._is_worth_running(tree, value):
                leaves.append([])
            else:
                leaves.append(_leaves(tree, self._spec.width, tree.open[0][0] + log(level / gain)))
        return leaves

    def _may_run(self, tree: BudgetTree) -> bool:
        """Asynchronous, what a request missed is run beside the verification: it may be long."""
        return not (self._spec.is_async and tree.missing >= COLD)

    def _is_worth_running(self, tree: BudgetTree, value: float) -> bool:
        """Whether what a request has missed costs less than drafting for it will save."""
        if tree.missing < COLD:
            return True
        seconds = self._drafting(0, tree.missing, 0)
        gain = max(1.0 - self._plain / value, 0.0)
        saved = self.mean_output * gain * self._tokens / max(self._plain, 1e-9) / self._batch
        return saved > float(seconds[-1] - seconds[0])

    def _best_ahead(self, gains: Floats, confidence: Floats, left: int) -> tuple[float, int]:
        """Largest tokens per second with 1 to ``left`` more forwards, and with how many.

        Each request goes on along its likeliest leaf at its mean confidence.
        """
        batch, choice = self._batch, self._choice
        gains_DB = gains * confidence ** np.arange(left)[:, None]
        is_taken_DB = gains_DB >= self._level(len(gains), draft_rows=0)
        rows_D = is_taken_DB.sum(axis=1)
        tokens_D = choice.tokens + (gains_DB * is_taken_DB).sum(axis=1).cumsum()
        total_D = choice.rows + rows_D.cumsum()
        target = self._verifying(batch, int(total_D[-1]), self._context)[total_D]
        draft_D = self._drafting(0, max(len(gains), 1), self._context)[rows_D].cumsum()
        seconds_D = self._spent + draft_D + target + self._goodput.overhead
        values_D = np.where(rows_D > 0, tokens_D / seconds_D, 0.0)
        best = int(values_D.argmax())
        return float(values_D[best]), best + 1

    def _level(self, num: int, *, draft_rows: int) -> float:
        """Price of a further row in tokens: its seconds at what a second yields now.

        Args:
            num: Rows over which the seconds of one are averaged.
            draft_rows: Rows of draft forwards that go with it.
        """
        first = self._batch + self._choice.rows
        seconds = self._verifying(first, num, self._context)
        price = (seconds[-1] - seconds[0]) / num
        if draft_rows:
            drafting = self._drafting(1, num, self._context)
            price += (drafting[-1] - drafting[0]) / num
        return max(float(price) * max(self._choice.value, self._plain), _SURE)

    # Rows.

    def _choose(self, trees: Sequence[BudgetTree]) -> Choice:
        """The nodes of the best quotient: the heaviest of all requests."""
        most = self._spec.rows
        flat: list[float] = []
        counts = []
        for tree in trees:
            weights = tree.log_weights
            if len(weights) > most:
                weights = sorted(weights, reverse=True)[:most]
            flat += weights[1:]
            counts.append(len(weights) - 1)
        if not self._batch:
            return self._choice
        worth = np.exp(flat) * np.repeat(self._urgency, counts)
        worth = -np.sort(-worth)
        tokens = self._tokens + np.concatenate(([0.0], worth.cumsum()))
        seconds = self._verifying(self._batch, len(worth), self._context) + self._spent
        seconds[0 if self._spent else 1 :] += self._goodput.overhead
        values = tokens / seconds
        best = int(values.argmax())
        level = float(worth[best - 1]) if best else np.inf
        return Choice(float(values[best]), float(tokens[best]), best, level)

    def select(self, trees: Sequence[DraftTree]) -> Leaves:
        own = cast("Sequence[BudgetTree]", trees)
        choice, most = self._choice, self._spec.rows
        chosen: Leaves = []
        for tree, urgency in zip(own, self._urgency.tolist(), strict=True):
            nodes = [0]
            if choice.rows and len(tree) > 1:
                bound = log(choice.level / urgency) - _SURE
                weights = tree.log_weights
                nodes = [n for n, weight in enumerate(weights) if weight >= bound or not n]
                if len(nodes) > most:
                    nodes = sorted(nodes, key=weights.__getitem__, reverse=True)[:most]
            tree.sent = ()
            chosen.append(nodes)
        for i in range(self._num_rounds % self._stride, len(own), self._stride):
            own[i].sent = chosen[i]
        self._num_rounds += 1
        num_rows = sum([len(nodes) for nodes in chosen]) - len(own)
        self._was_plain = not num_rows and not self._spent
        if self._spec.is_async:
            self._plan_beside(own, num_rows)
        self.rests = self._was_plain and not self.overlap
        return chosen

    # Draft forwards beside the verification.

    def _plan_beside(self, trees: Sequence[BudgetTree], num_rows: int) -> None:
        """Whether to draft at all, and for how long."""
        self._budget = float(self._verifying(self._batch + num_rows, 0, self._context)[0])
        confidence = np.array([tree.confidence for tree in trees])
        self._may_draft = bool(trees) and (
            not self._was_plain or self._pays_in_the_end(self._urgency * confidence, confidence)
        )
        self.overlap = self._spec.expansions if self._may_draft else 0

    def _pays_in_the_end(self, gains: Floats, confidence: Floats) -> bool:
        """Whether trees that cost nothing would beat plain decoding."""
        depth = max(int(self._budget / max(float(self._drafting(len(gains), 0, 0)[0]), 1e-9)), 1)
        gains_DB = gains * confidence ** np.arange(min(depth, self._spec.expansions))[:, None]
        worth = -np.sort(-gains_DB.ravel())
        seconds = self._verifying(self._batch, len(worth), self._context) + self._goodput.overhead
        values = (self._tokens + np.concatenate(([0.0], worth.cumsum()))) / seconds
        return bool(values[1:].max(initial=0.0) > self._plain * (1.0 + MARGIN))

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> Leaves:
        own = cast("Sequence[BudgetTree]", trees)
        stop: Leaves = [[] for _ in own]
        if not self._may_draft:
            return stop
        value = max(self._choice.value, self._plain)
        rows = self._drafting(1, len(own), self._context)
        level = max(float(rows[-1] - rows[0]) / len(own) * value, _SURE)
        leaves = []
        gain, missing = 0.0, 0
        for tree, urgency in zip(own, self._urgency.tolist(), strict=True):
            bound = log(level / (urgency * max(tree.confidence, _SURE)))
            nodes = _leaves(tree, self._spec.width, min(bound, 0.0))
            if nodes:
                gain += urgency * exp(tree.open[0][0]) * tree.confidence
                missing += tree.missing if tree.base_len > tree.first_len else 0
            leaves.append(nodes)
        num_rows = sum([len(nodes) for nodes in leaves])
        seconds = float(self._drafting(num_rows + missing, 0, self._context)[0])
        late = self._beside + seconds - max(self._budget, self._beside)
        if not num_rows or late * value > gain * (self.mean_output if missing else 1.0):
            self._may_draft = False
            return stop
        self._beside += seconds
        return leaves


def _leaves(tree: BudgetTree, width: int, bound: float) -> list[int]:
    """The heaviest nodes that may run, of this log weight and above."""
    room = MAX_TREE_ROWS - tree.num_expanded
    return [node for weight, node in tree.open[: min(width, room)] if weight >= bound]


def _urgency(one: Progress, target: float | None, step: float) -> float:
    """Weight of a request's tokens: how many this step owes it, within bounds."""
    if target is None or one.elapsed > HOPELESS * target * (one.tokens + 1):
        return 1.0
    owed = (one.elapsed + step) / target - one.tokens
    return min(max(owed, 1.0), MOST_URGENT)
