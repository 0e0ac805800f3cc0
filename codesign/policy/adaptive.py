"""Chains whose length follows predicted goodput, request by request: SpecServe.

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from codesign.policy.batch_round import FULL
from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import (
    Progress,
    chain_end,
    context_rows,
    last_confidence,
)
from codesign.policy.repeating import Repeating, likeliest_children, likeliest_leaves
from codesign.policy.resting import LEARNED
from codesign.policy.spec import SpeculationSpec
from codesign.policy.traffic import COLD, Traffic, rows_behind
from codesign.policy.tree import DraftTree

INITIAL_CONFIDENCE = 0.6  # SpecServe's start value of the running mean


class SpecServe(Repeating):
    """Chains whose length follows predicted goodput, for the whole batch and per request.

    Adaptive drafter: predict the goodput of one more step with the running mean confidence; if it
    does not fall, draft the step, and correct with the confidences seen. Confidence-prior verifier:
    of all drafted tokens verify the set with the largest goodput, most likely first. Both stay
    within the seconds that the SLO leaves a round (``_allowed``).

    Beyond the paper, a round is priced with the prompts that it delays (batch_round.py), the target
    is one of a request's whole answer, and the draft runs a prompt only if drafting saves more.

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
        self, spec: SpeculationSpec, goodput: Goodput, calibration: Calibration | None = None
    ) -> None:
        super().__init__(goodput, calibration)
        self.traffic = Traffic(goodput.prompt_seconds, hears_late=True)
        self._spec = spec
        self._sum_confidence = INITIAL_CONFIDENCE
        self._num_confidence = 1
        self._longest = math.inf  # seconds that a round with draft tokens may take
        self._best = 0.0
        self._known: list[int] = []  # nodes of each tree whose confidences are taken in
        self._costly: set[int] = set()  # requests whose prompt the draft does not run now

    @property
    def mean_confidence(self) -> float:
        """Running mean of the confidences seen, at first ``INITIAL_CONFIDENCE``."""
        return self._sum_confidence / self._num_confidence

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        if self._begins_repeat(trees, progress):
            return
        num_beside, rows_beside = self.beside
        batch, context = len(trees) + num_beside, context_rows(trees) + rows_beside
        self.traffic.observe(trees, self.now, self.sharing)
        self._round.begin(
            batch,
            context,
            traffic=self.traffic,
            sharing=self.sharing,
            looking=self.looking if self._num_confidence > LEARNED else 0.0,
        )
        self._longest = self._allowed(progress)
        self._best = self._value(_draft_chances(trees))
        self._known = [len(tree) for tree in trees]
        self._costly = set()

    def _allowed(self, progress: Sequence[Progress]) -> float:
        """Seconds after which plain decoding would still keep every target that it can keep.

        Of the round a request may get one token only, as the paper has it. Its target is one of
        the mean of all its tokens: there are those that it has, and those that are expected. One
        that would miss its target with plain rounds from now on has nothing to lose.
        """
        if not self._spec.slo_aware:
            return math.inf
        this, left = self._round, self.traffic.expected_left(np.array([p.tokens for p in progress]))
        plain = self._goodput.seconds(
            batch=this.batch, context=this.context, steps=0, draft_tokens=0
        ) / (1.0 - min(self.traffic.share, FULL))
        rooms = [
            target * (one.tokens + 1 + more) - one.elapsed - plain * more
            for one, more in zip(progress, left.tolist(), strict=True)
            if (target := one.slo_tpot or self._goodput.slo_tpot) is not None
        ]
        return min([room for room in rooms if room >= plain], default=math.inf)

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        if self.repeats:
            return likeliest_leaves(trees, done)
        stop: list[list[int]] = [[] for _ in trees]
        chances = _draft_chances(trees)
        if done and not self._correct(trees, chances):
            return stop
        # By length, not by ``done``: verified only in part, a chain may live on in the next round.
        leaves = [chain_end(tree) if len(tree) <= self._spec.max_depth else [] for tree in trees]
        if not done and self._spec.adaptive_drafter:
            self._costly = self._find_costly(trees)
        for i in self._costly:
            leaves[i] = []
        if not any(leaves):
            return stop
        mean = self.mean_confidence
        chances += [
            math.exp(tree.log_weights[leaf[0]]) * mean
            for tree, leaf in zip(trees, leaves, strict=True)
            if leaf
        ]
        this = self._round
        named = [tree for tree, leaf in zip(trees, leaves, strict=True) if leaf]
        rows = len(named) + sum(map(rows_behind, named))
        seconds = this.draft.of(rows, this.context + this.batch * done)
        predicted = self._value(chances, seconds + this.look)
        if predicted < 0 or (self._spec.adaptive_drafter and predicted < self._best):
            return stop
        this.wait_for(seconds, this.look)
        return leaves

    def _correct(self, trees: Sequence[DraftTree], chances: list[float]) -> bool:
        """Take in the confidences of the last step; whether drafting may go on."""
        for tree, num_nodes in zip(trees, self._known, strict=True):
            if len(tree) > num_nodes:
                self._sum_confidence += last_confidence(tree)
                self._num_confidence += 1
        self._known = [len(tree) for tree in trees]
        before, self._best = self._best, self._value(chances)
        return not self._spec.adaptive_drafter or self._best >= before

    def _find_costly(self, trees: Sequence[DraftTree]) -> set[int]:
        """Requests that miss so many rows in the draft that running them does not pay."""
        cold = [i for i, tree in enumerate(trees) if tree.missing >= COLD]
        if not cold:
            return set()
        left = self.traffic.expected_left(np.array([trees[i].emitted for i in cold]))
        missing = [trees[i].missing for i in cold]
        pays = self._goodput.paying_prompts(missing, left * self._saved())
        return set(np.array(cold)[~pays].tolist())

    def _saved(self) -> float:
        """Seconds per token of one request that drafting for all saves, with the best length."""
        this, num = self._round, len(self._known)
        drafting = this.draft.of(num, this.context)
        tokens, fastest = this.roots, math.inf
        for steps in range(1, self._spec.max_depth + 1):
            accepted = num * self.mean_confidence**steps  # to the end: its last token is behind
            tokens += accepted
            seconds = this.target.of(this.num_base + steps * num, this.context)
            seconds += this.draft.of(num + accepted, this.context) + (steps - 1) * drafting
            seconds += steps * this.look
            fastest = min(fastest, (seconds + this.fixed) / tokens)
        return this.plain_seconds / this.batch - fastest

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        if self.repeats:
            return likeliest_children(trees)
        drafted = sorted(
            (-tree.log_weights[node], tree.depths[node], i, node)
            for i, tree in enumerate(trees)
            for node in range(1, len(tree))
        )
        chances = [math.exp(-d[0]) for d in drafted]
        this = self._round
        if self._spec.confidence_prior:
            drafted = drafted[: this.best(np.array([this.roots, *chances]), self._longest).rows]
        elif self._value(chances) < 0:
            drafted = []  # tokens left over from the last round may be too many by themselves
        chosen = [[0] for _ in trees]
        for _, _, i, node in drafted:
            chosen[i].append(node)
        self.rests = not this.awaited and all(len(tree) == 1 for tree in trees)
        if self._spec.adaptive_drafter:
            self.reads_prompts = not self.rests and self._is_worth_reading()
            accepted = sum([math.exp(-weight) for weight, *_ in drafted])
            self._weigh_looks(trees, this.roots + accepted, len(drafted))
            if self.rests:
                self.begin_rest(
                    self._goodput.host.look(this.batch), this.plain_seconds - this.stall
                )
        return chosen

    def _is_worth_reading(self) -> bool:
        """Whether the draft runs a prompt that begins now along with the target, part by part."""
        prompt = self._goodput.draft_prompt_seconds(self.traffic.mean_prompt)
        return float(self.traffic.expected_left()) * self._saved() > prompt

    def _value(self, chances: list[float], more: float = 0.0) -> float:
        """Expected tokens per second of a round that verifies all these, -1 where it is too long.

        Args:
            chances: Of every draft token.
            more: Seconds of a further draft forward.
        """
        this = self._round
        if not (chances or more or this.awaited):
            return this.plain.value
        seconds = this.target.of(this.num_base + len(chances), this.context) + this.fixed + more
        if chances and seconds > self._longest:
            return -1.0
        return this.value(this.roots + sum(chances), seconds)


def _draft_chances(trees: Sequence[DraftTree]) -> list[float]:
    return [math.exp(weight) for tree in trees for weight in tree.log_weights[1:]]
