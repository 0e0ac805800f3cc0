"""Chains whose length follows predicted goodput: SpecServe and SmartSpec (TurboSpec).

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import (
    Progress,
    Speculation,
    chain_end,
    context_rows,
    last_confidence,
)
from codesign.policy.spec import SpeculationSpec
from codesign.policy.tree import DraftTree

INITIAL_CONFIDENCE = 0.6  # SpecServe's start value of the running mean
INITIAL_ACCEPTANCE = 0.7  # SmartSpec's start value of the moving acceptance rate
ACCEPTANCE_MEMORY = 200.0  # draft tokens that the moving rate remembers; SmartSpec: recent steps
PLAIN_BONUS = 1.1  # SmartSpec's released code: speculation must promise a tenth more


class SpecServe(Speculation):
    """Chains whose length follows predicted goodput, for the whole batch and per request.

    Adaptive drafter: predict the goodput of one more step with the running mean confidence; if it
    does not fall, draft the step, and correct with the confidences seen. Confidence-prior verifier:
    of all drafted tokens verify the set with the largest goodput, most likely first.

    Source:
        SpecServe, Algorithms 1 and 2. The verifier takes the best prefix of the tokens sorted by
        path chance, which is what popping the smallest while goodput rises leads to.
    """

    is_batch_coupled = True

    def __init__(
        self, spec: SpeculationSpec, goodput: Goodput, calibration: Calibration | None = None
    ) -> None:
        super().__init__(calibration)
        self._spec = spec
        self._goodput = goodput if spec.slo_aware else goodput.without_slo()
        self._sum_confidence = INITIAL_CONFIDENCE
        self._num_confidence = 1
        self._best = 0.0
        self._context = 0
        self._steps = 0  # draft forwards of this round
        self._worth: list[int] = []  # nodes of each tree up to the last step that paid

    @property
    def mean_confidence(self) -> float:
        """Running mean of the confidences seen, at first ``INITIAL_CONFIDENCE``."""
        return self._sum_confidence / self._num_confidence

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        self._context = context_rows(trees)
        self._best = self._estimate(len(trees), steps=0, chances=_draft_chances(trees))
        self._worth = [len(tree) for tree in trees]

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        stop: list[list[int]] = [[] for _ in trees]
        self._steps = done
        chances = _draft_chances(trees)
        if done and not self._correct(trees, done, chances):
            return stop
        # By length, not by ``done``: verified only in part, a chain may live on in the next round.
        leaves = [chain_end(tree) if len(tree) <= self._spec.max_depth else [] for tree in trees]
        if any(leaves) and (self._spec.adaptive_drafter or self._spec.slo_aware):
            mean = self.mean_confidence
            chances += [
                math.exp(tree.log_weights[leaf[0]]) * mean
                for tree, leaf in zip(trees, leaves, strict=True)
                if leaf
            ]
            predicted = self._estimate(len(trees), steps=done + 1, chances=chances)
            if predicted < 0 or (self._spec.adaptive_drafter and predicted < self._best):
                return stop
        return leaves

    def _correct(self, trees: Sequence[DraftTree], done: int, chances: list[float]) -> bool:
        """Take in the confidences of step ``done``; whether drafting may go on."""
        for tree, num_nodes in zip(trees, self._worth, strict=True):
            if len(tree) > num_nodes:
                self._sum_confidence += last_confidence(tree)
                self._num_confidence += 1
        goodput = self._estimate(len(trees), steps=done, chances=chances)
        if self._spec.adaptive_drafter and goodput < self._best:
            return False
        self._best = goodput
        self._worth = [len(tree) for tree in trees]
        return True

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        drafted = sorted(
            (-tree.log_weights[node], tree.depths[node], i, node)
            for i, (tree, num_nodes) in enumerate(zip(trees, self._worth, strict=True))
            for node in range(1, num_nodes)
        )
        chances = [math.exp(-d[0]) for d in drafted]
        if self._spec.confidence_prior:
            count = self._goodput.best_count(
                batch=len(trees), context=self._context, steps=self._steps, chances=chances
            )
            drafted = drafted[:count]
        elif self._estimate(len(trees), steps=self._steps, chances=chances) < 0:
            drafted = []  # tokens left over from the last round may be too many by themselves
        chosen = [[0] for _ in trees]
        for _, _, i, node in drafted:
            chosen[i].append(node)
        self.rests = not self._steps and all(len(tree) == 1 for tree in trees)
        return chosen

    def _estimate(self, batch: int, *, steps: int, chances: list[float]) -> float:
        return self._goodput(
            batch=batch,
            context=self._context,
            steps=steps,
            draft_tokens=len(chances),
            accepted=sum(chances),
        )


def _draft_chances(trees: Sequence[DraftTree]) -> list[float]:
    return [math.exp(weight) for tree in trees for weight in tree.log_weights[1:]]


class TurboSpec(Speculation):
    """SmartSpec: one chain length for the batch, of most goodput at the acceptance seen lately.

    The acceptance rate is that of judged tokens: accepted ones, and the first rejected one of each
    chain. It is a moving average, and holds still while nothing is drafted.

    Source:
        SmartSpec, arXiv:2406.14066 (TurboSpec): tokens of a round are (1 - a^(k+1)) / (1 - a).
        Plain decoding wins unless speculation promises ``PLAIN_BONUS`` times its goodput.
    """

    is_batch_coupled = True

    def __init__(
        self, max_depth: int, goodput: Goodput, calibration: Calibration | None = None
    ) -> None:
        super().__init__(calibration)
        self._max_depth = max_depth
        self._goodput = goodput.without_slo()
        self._accepted = INITIAL_ACCEPTANCE * ACCEPTANCE_MEMORY / 10  # a weak start value
        self._judged = ACCEPTANCE_MEMORY / 10
        self._sent: list[tuple[DraftTree, int, int]] = []  # tree, its base length, draft tokens
        self._length = 0

    @property
    def acceptance_rate(self) -> float:
        """Moving chance that a draft token is accepted, given that those before it are."""
        return self._accepted / self._judged

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        self._observe()
        rate = self.acceptance_rate
        batch, context = len(trees), context_rows(trees)
        chances = list(accumulate([rate] * self._max_depth, lambda a, b: a * b))
        goodputs = [
            self._goodput(
                batch=batch,
                context=context,
                steps=k,
                draft_tokens=batch * k,
                accepted=batch * sum(chances[:k]),
            )
            for k in range(self._max_depth + 1)
        ]
        goodputs[0] *= PLAIN_BONUS
        self._length = max(range(len(goodputs)), key=goodputs.__getitem__)

    def _observe(self) -> None:
        """Take in the verdicts on the last round's chains, as far as they are known."""
        for tree, base_len, num_sent in self._sent:
            num_emitted = tree.base_len - base_len
            if num_emitted and num_sent:  # a finished request's tree stays as it was
                self._accepted += num_emitted - 1
                self._judged += min(num_emitted, num_sent)
        self._sent = []
        if self._judged > ACCEPTANCE_MEMORY:
            self._accepted *= ACCEPTANCE_MEMORY / self._judged
            self._judged = ACCEPTANCE_MEMORY

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        return [chain_end(tree) if len(tree) <= self._length else [] for tree in trees]

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        chosen = [list(range(min(len(tree), self._length + 1))) for tree in trees]
        self.rests = not self._length and all(len(tree) == 1 for tree in trees)
        self._sent = [
            (tree, tree.base_len, len(nodes) - 1) for tree, nodes in zip(trees, chosen, strict=True)
        ]
        return chosen
