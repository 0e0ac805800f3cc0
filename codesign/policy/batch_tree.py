"""Trees that share the rows of the batch, and the time of a round.

The policy maximises what a round is worth: (requests + chances of the nodes that are verified) /
seconds, by the fitted step times (codesign/policy/batch_round.py). What follows from that:

- Rows. All requests' nodes, sorted by path chance, are taken as long as the quotient rises. The
  chance of the last one is the price of a row, the same for all requests (batch_rows.py).
- Draft forwards that the target waits for. One more is made if the best quotient with it, at the
  confidences seen lately, is above the best one without (batch_drafting.py). Only leaves whose
  children may be worth a row take part. Asynchronous, this decides whether a batch waits for its
  requests that missed.
- Draft forwards beside the verification, asynchronous only: as many as fit (batch_beside.py).
- No draft at all where that has the best quotient: plain decoding, without a tree to move. Coming
  back needs ``MARGIN`` more.
- Looks at the batch take the host's time: after one by which plain decoding is best it rests
  (resting.py), and where looks gain less than they take it drafts without (repeating.py). A round
  with drafting takes one look longer. Those between its forwards do not count: they are about what
  the siblings are worth, which are not foreseen either.
- Prompts. Of a *cold* request the draft has not run the prompt, or has missed many tokens since.
  It runs them only if the tokens to come, as many as are expected (traffic.py), save
  ``needed_return`` times that: a share of what all save, or, while an average request repays its
  prompt so, what it adds.
- Urgency. A token of a request that falls behind its TPOT target counts more, up to ``MOST_URGENT``
  times, unless it is too far behind, when rows are shared out: they go to it first; nobody else
  gets none. What is drafted does not depend on it: forwards that all pay for would serve few.

Chances are calibrated online (online_calibration.py).

Must not import torch or read a clock.

Source:
    This project. Goodput of a round: SpecServe; best-first trees beside the verification:
    SwiftSpec; rows by path chance and need: AdaServe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from codesign.policy.batch_beside import DraftingBeside
from codesign.policy.batch_drafting import MARGIN, BatchDrafting, Leaves
from codesign.policy.batch_rows import best_nodes, worth_of_nodes
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.cost import Calibration
from codesign.policy.first_look import FirstLook
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Progress
from codesign.policy.repeating import likeliest_children
from codesign.policy.spec import SpeculationSpec
from codesign.policy.tree import DraftTree
from codesign.policy.urgency import Urgency


class BatchTree(BatchDrafting):
    """See the module's text.

    Args:
        spec: Most rows and leaves of a request, most forwards of a round.
        goodput: Step times and the TPOT target.
        calibration: Of the fit; where the online one starts.
        confidence: Where the mean confidence starts.
    """

    is_batch_coupled = True
    needs_progress = True
    decides = True

    def __init__(
        self,
        spec: SpeculationSpec,
        goodput: Goodput,
        calibration: Calibration | None = None,
        confidence: float | None = None,
    ) -> None:
        super().__init__(spec, goodput, calibration, confidence)
        self.tree_type = partial(BudgetTree, calibration=self.calibration)
        self.overlap = spec.max_overlap
        self.drafting_beside = DraftingBeside(spec, self._goodput, self.traffic, self._round)
        self._slo_tpot = goodput.slo_tpot
        self._num_rounds = 0

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        if self._begins_repeat(trees, progress):
            self._next_first = None  # the draft runs without a look
            return
        batch, context = self._begin_looks(trees, self.calibration.num_confidences)
        step = self._round.target.of(batch, context)
        self._urgency = Urgency(progress, step, self._slo_tpot)
        self.drafting_beside.may_draft = True
        self._begin_drafting(cast("Sequence[BudgetTree]", trees))

    def select(self, trees: Sequence[DraftTree]) -> Leaves:
        own = cast("Sequence[BudgetTree]", trees)
        chosen = likeliest_children(own) if self.repeats else self._best_nodes(own)
        stride = 1 + self._round.batch // 16  # one in so many requests teaches the calibration
        for i in range(self._num_rounds % stride, len(own), stride):
            own[i].sent = chosen[i]
        self._num_rounds += 1
        if not self.repeats:
            self._conclude(own, sum(map(len, chosen)) - len(own))
        return chosen

    def _best_nodes(self, trees: Sequence[BudgetTree]) -> Leaves:
        """The nodes of the best choice, or of one that urgent requests have more of."""
        this, choice = self._round, self._choice
        if not choice.rows:
            return [[0] for _ in trees]
        most, urgency = self._spec.rows, self._urgency.weights
        if urgency is not None:
            roots = float(urgency.sum()) + this.batch - len(trees)
            choice = this.best(worth_of_nodes(trees, roots, most, urgency))
        return best_nodes(trees, choice, most, urgency)

    def _conclude(self, own: Sequence[BudgetTree], num_rows: int) -> None:
        """What follows from a round that verifies so many nodes."""
        this = self._round
        self._was_plain = not num_rows and not this.awaited
        this.verification = this.target.forward(this.num_base + num_rows, this.context)
        if self._spec.is_async:
            self.overlap = self.drafting_beside.plan(own, is_plain=self._was_plain, margin=MARGIN)
        if not num_rows:  # a plan is of rounds with trees, this one may be by turns
            this.verification = this.plain_forward()
        self.rests = self._was_plain and not self.overlap
        if self.rests and len(self._worth) == 1:
            self.begin_rest(self._goodput.host.look(this.batch), this.verification)
        if self._spec.is_async:
            self.reads_prompts = not self.rests
        else:
            self._verified = own, self._choice.tokens, self._choice.rows

    def settle(self) -> None:
        if self._verified is not None:  # the target runs: what the next round begins with
            self._next_first = FirstLook(self._first.trees)
            self._next_first.find()
        super().settle()
        self.calibration.settle()
        if rows := self._await_forward():  # a draft forward runs: what the look behind it needs
            self._round.foresee(len(self._worth) + self.fanout * rows, len(self._behind))
            self._urgency.find()

    def _is_worth_reading(self) -> bool:
        this, choice = self._round, self._choice
        seconds = this.fixed + this.target.of(this.num_base + choice.rows, this.context)
        saved = this.saved(seconds / choice.tokens)
        return saved * self.traffic.left_at_first > self.traffic.reading * this.batch

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> Leaves:
        return self.drafting_beside.leaves(cast("Sequence[BudgetTree]", trees), self._choice.rate)
