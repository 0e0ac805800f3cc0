"""Chains whose length follows predicted goodput, request by request: SpecServe.

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from codesign.policy.batch_round import FEW, FULL, Worth
from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Progress
from codesign.policy.online_calibration import KNOWN
from codesign.policy.repeating import Repeating, likeliest_children
from codesign.policy.resting import LONGEST_REST
from codesign.policy.row_prices import numbers
from codesign.policy.slo_room import SloRoom
from codesign.policy.spec import SpeculationSpec
from codesign.policy.traffic import COLD, Traffic, rows_behind
from codesign.policy.tree import DraftTree

INITIAL_CONFIDENCE = 0.6  # SpecServe's start value of the running mean


class SpecServe(Repeating):
    """Chains whose length follows predicted goodput, for the whole batch and per request.

    Adaptive drafter: predict the goodput of one more step with the running mean confidence; if it
    does not fall, draft the step, and correct with the confidences seen. Confidence-prior verifier:
    of all drafted tokens verify the set with the largest goodput, most likely first; this set is
    what the drafter predicts, too. Both stay within the seconds that the SLO leaves a round
    (slo_room.py).

    Beyond the paper, a round is priced with the prompts that it delays (batch_round.py), the target
    is one of a request's whole answer, and the draft runs a prompt only if drafting saves
    ``needed_return`` times that (repeating.py). The mean confidence starts at what a fit knows.

    Source:
        SpecServe, Algorithms 1 to 3. The verifier takes the best prefix of the tokens sorted by
        path chance, which is what popping the smallest while goodput rises leads to. A step that
        turned out not to pay ends the drafting, but is verified like any other, as it is in the
        released code: its seconds are spent.
    """

    is_batch_coupled = True
    needs_progress = True
    decides = True

    def __init__(
        self,
        spec: SpeculationSpec,
        goodput: Goodput,
        calibration: Calibration | None,
        confidence: float | None,
    ) -> None:
        super().__init__(goodput, calibration)
        self.traffic = Traffic(
            goodput.prompt_seconds,
            goodput.draft_prompt_seconds,
            hears_late=True,
            answer_tokens=goodput.answer_tokens,
        )
        self._spec = spec
        self._num_confidence = 1 if confidence is None else KNOWN
        start = INITIAL_CONFIDENCE if confidence is None else confidence
        self._sum_confidence = self._num_confidence * start
        self._plain_seconds = 0.0  # of a plain round and the prompts between such, at the last look
        self._room = self._room_of((), ())  # seconds that a round with draft tokens may take
        self._num_forbidden = 0  # looks one after another by which any draft token takes longer
        self._best = 0.0
        self._missing: list[int] = []  # tokens that the draft has not run, of each request
        self._running: list[int] = []  # requests that took part in the last draft forward
        # Of each request: nodes whose confidences are taken in, and the chance of the last one.
        self._sizes: list[int] = []
        self._ends: list[float] = []
        # Of each draft token: its chance, its request, its depth; in the order in which they came.
        self._chances: list[float] = []
        self._owners: list[int] = []
        self._depths: list[int] = []

    @property
    def mean_confidence(self) -> float:
        """Running mean of the confidences seen, at first a fit's or ``INITIAL_CONFIDENCE``."""
        return self._sum_confidence / self._num_confidence

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        if self._begins_repeat(trees, progress):
            return
        batch, context = self._begin_looks(trees, self._num_confidence)
        self._missing = [tree.missing for tree in trees]
        plain = self._goodput.seconds(batch=batch, context=context, steps=0, draft_tokens=0)
        self._plain_seconds = plain / (1.0 - min(self.traffic.share, FULL))
        self._room = self._room_of(progress, self._missing)
        self._take_all(trees)
        self._best = self._value(self._chances)

    def _take_all(self, trees: Sequence[DraftTree]) -> None:
        """Take in what is left of the chains of the last round."""
        self._sizes = [len(tree.tokens) for tree in trees]
        self._ends = [1.0] * len(trees)
        self._chances, self._owners, self._depths = [], [], []
        for i in [i for i, size in enumerate(self._sizes) if size > 1]:
            self._chances += map(math.exp, trees[i].log_weights[1:])
            self._ends[i] = self._chances[-1]
            self._owners += [i] * (self._sizes[i] - 1)
            self._depths += range(1, self._sizes[i])

    def _allows(
        self, seconds: float, trees: Sequence[DraftTree], progress: Sequence[Progress]
    ) -> bool:
        return self._room_of(progress, [tree.missing for tree in trees]).allows(seconds)

    def _room_of(self, progress: Sequence[Progress], missing: Sequence[int]) -> SloRoom:
        return SloRoom(
            progress if self._spec.slo_aware else (),
            missing,
            common=self._goodput.slo_tpot,
            plain=self._plain_seconds,
            confidence=self.mean_confidence,
            traffic=self.traffic,
        )

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        if self.repeats:
            return self._likeliest_leaves(trees, done)
        stop: list[list[int]] = [[]] * len(trees)
        if done and not self._correct(trees):
            return stop
        running, missing = self._running, [0] * len(trees)  # what stands before a root ran with it
        num_forbidden = self._num_forbidden
        if not done:
            self._num_forbidden = 0
            missing = self._missing
            costly = self._find_costly(trees, missing) if self._spec.adaptive_drafter else set()
            running = [i for i, t in enumerate(trees) if i not in costly and t.slots[-1] < 0]
        # By length, not by ``done``: verified only in part, a chain may live on in the next round.
        sizes, most = self._sizes, self._spec.max_depth
        running = [i for i in running if sizes[i] <= most and sizes[i] <= trees[i].max_depth]
        if not running:
            return stop
        mean, ends, this = self.mean_confidence, self._ends, self._round
        rows = len(running) + sum(rows_behind([missing[i] for i in running]))
        seconds = this.draft.of(rows, this.context + this.batch * done)
        chances = self._chances + [ends[i] * mean for i in running]
        predicted = self._value(chances, seconds + this.look)
        if not done and predicted < 0:
            self._num_forbidden = num_forbidden + 1
        if predicted < 0 or (self._spec.adaptive_drafter and predicted < self._best):
            return stop
        this.wait_for(seconds, this.look)
        self._running, leaves = running, stop
        for i in running:
            leaves[i] = [sizes[i] - 1]
        return leaves

    def _correct(self, trees: Sequence[DraftTree]) -> bool:
        """Take in the confidences of the last step; whether drafting may go on."""
        sizes, ends = self._sizes, self._ends
        running = [i for i in self._running if len(trees[i].tokens) > sizes[i]]
        self._running = running
        weights = [trees[i].log_weights for i in running]
        confidences = [math.exp(own[-1] - own[-2]) for own in weights]
        self._sum_confidence = sum(confidences, self._sum_confidence)
        self._num_confidence += len(running)
        chances = [math.exp(own[-1]) for own in weights]
        self._chances += chances
        self._owners += running
        self._depths += [sizes[i] for i in running]
        for i, chance in zip(running, chances, strict=True):
            sizes[i] += 1
            ends[i] = chance
        before, self._best = self._best, self._value(self._chances)
        return not self._spec.adaptive_drafter or self._best >= before

    def _find_costly(self, trees: Sequence[DraftTree], missing: Sequence[int]) -> set[int]:
        """Requests that miss so many rows in the draft that running them does not pay."""
        cold = [i for i, tokens in enumerate(missing) if tokens >= COLD]
        if not cold:
            return set()
        batch, saved = self._round.batch, self._saved(len(trees))
        lasting = self._lasting(batch * saved)
        if 2 * len(cold) < len(trees):
            others = self._saved(len(trees) - 1)
            saved = self._saved_by_newcomer(batch * saved, batch * others)
        return set(self._costly(trees, cold, lasting * saved))

    def _saved(self, num: int) -> float:
        """Share of one request in the seconds per token that drafting saves, with the best length.

        Args:
            num: Requests that are drafted for.
        """
        this, mean = self._round, self.mean_confidence
        drafting, fixed = this.draft.of(num, this.context), this.overhead + this.stall
        tokens, fastest = this.roots, math.inf
        for steps in range(1, self._spec.max_depth + 1):
            accepted = num * mean**steps  # to the end: its last token is behind
            tokens += accepted
            seconds = this.target.of(this.num_base + steps * num, this.context)
            seconds += this.draft.of(num + accepted, this.context) + (steps - 1) * drafting
            seconds += steps * this.look
            fastest = min(fastest, (seconds + fixed) / tokens)
        return this.plain_seconds / this.batch - fastest

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        if self.repeats:
            return likeliest_children(trees)
        this, num = self._round, len(self._chances)
        worth, rows = [this.roots, *sorted(self._chances, reverse=True)], num
        if self._spec.confidence_prior:
            rows = self._best_rows(worth if num <= FEW else numbers(worth))
        elif self._value(self._chances) < 0:
            rows = 0  # tokens left over from the last round may be too many by themselves
        counts = self._counts_of(rows, worth[rows])
        chosen = [list(range(1 + count)) for count in counts]
        self.rests = not (this.awaited or num)
        if self._spec.adaptive_drafter:
            self._verified = trees, this.roots + sum(worth[1 : 1 + rows]), rows
            if self.rests:
                # A target forbids for a round or two, as a rule: only then a rest grows.
                most = self._num_forbidden or LONGEST_REST
                look = self._goodput.host.look(this.batch)
                self.begin_rest(look, this.plain_forward(), most)
        return chosen

    def _best_rows(self, worth: Worth) -> int:
        """How many tokens are verified with most goodput, within the seconds allowed."""
        this = self._round
        rows = this.best(worth).rows
        if rows and not self._room.allows(this.target.at(rows) + this.fixed):
            rows = this.best(worth, self._room.longest).rows
        return rows

    def _counts_of(self, rows: int, least: float) -> list[int]:
        """How many tokens of each chain are verified: those of the ``least`` chance and above.

        Of equal ones the deepest are left out where they are too many.
        """
        if rows == len(self._chances):
            return [size - 1 for size in self._sizes]
        counts = [0] * len(self._sizes)
        if not rows:
            return counts
        for chance, i in zip(self._chances, self._owners, strict=True):
            if chance >= least:
                counts[i] += 1
        excess = sum(counts) - rows
        if excess:
            found = zip(self._chances, self._depths, self._owners, strict=True)
            equals = sorted([(depth, i) for chance, depth, i in found if chance == least])
            for _, i in equals[-excess:]:
                counts[i] -= 1
        return counts

    def _is_worth_reading(self) -> bool:
        saved = self._saved(len(self._sizes))
        return self.traffic.left_at_first * saved > self.traffic.reading

    def _value(self, chances: list[float], more: float = 0.0) -> float:
        """Expected tokens per second of a round, -1 where it is too long.

        Args:
            chances: Of every draft token; verified are those that ``select`` would take, one at
                least if there is any.
            more: Seconds of a further draft forward.
        """
        this, num = self._round, len(chances)
        if not (num or more or this.awaited):
            return this.plain.value
        fixed = this.fixed + more
        seconds = this.target.at(num) + fixed
        is_allowed = not num or self._room.allows(seconds)
        if not (num and self._spec.confidence_prior):
            return this.value(this.roots + sum(chances), seconds) if is_allowed else -1.0
        longest = math.inf if is_allowed else self._room.longest
        worth = [this.roots, *sorted(chances, reverse=True)]
        if num <= FEW:
            return this.best_number(worth, this.target.listed(num), fixed, longest)[2]
        seconds_N = this.target(num)[1:] + fixed
        values_N = this.value(numbers(worth).cumsum()[1:], seconds_N)
        return float(values_N[seconds_N <= longest].max(initial=-1.0))
