"""Chains of one length for the batch, by predicted goodput: SmartSpec (TurboSpec).

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Progress, chain_end, context_rows
from codesign.policy.resting import Resting
from codesign.policy.tree import DraftTree

INITIAL_ACCEPTANCE = 0.7  # SmartSpec's start value of the moving acceptance rate
ACCEPTANCE_MEMORY = 200.0  # draft tokens that the moving rate remembers; SmartSpec: recent steps
PLAIN_BONUS = 1.1  # SmartSpec's released code: speculation must promise a tenth more


class TurboSpec(Resting):
    """SmartSpec: one chain length for the batch, of most goodput at the acceptance seen lately.

    The acceptance rate is that of judged tokens: accepted ones, and the first rejected one of each
    chain. It is a moving average, and holds still while nothing is drafted.

    Source:
        SmartSpec, arXiv:2406.14066 (TurboSpec): tokens of a round are (1 - a^(k+1)) / (1 - a).
        Plain decoding wins unless speculation promises ``PLAIN_BONUS`` times its goodput.
    """

    is_batch_coupled = True

    def __init__(self, max_depth: int, goodput: Goodput, calibration: Calibration | None) -> None:
        super().__init__(calibration)
        self._max_depth = max_depth
        self._goodput = goodput.drafting(self.drafting)
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
        if self.rests:
            batch, context = len(trees), context_rows(trees)
            plain = self._goodput.seconds(batch=batch, context=context, steps=0, draft_tokens=0)
            self.begin_rest(self._goodput.host.look(batch), plain)
        self._sent = [
            (tree, tree.base_len, len(nodes) - 1) for tree, nodes in zip(trees, chosen, strict=True)
        ]
        return chosen
