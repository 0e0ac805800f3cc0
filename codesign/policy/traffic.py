"""What a batch's policy has seen of the requests: how long answers are, what prompts take.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp

from codesign.policy.budget_tree import BudgetTree

START_OUTPUT = 64.0  # tokens that a request is expected to emit, until some have finished
_MEMORY = 0.05  # weight of a finished request in that mean
_HORIZON = 5.0  # seconds over which the share of time that prompts take is averaged
_BURST = 3.0


class Traffic:
    """Takes in the batch of every round.

    Args:
        prompt_seconds: ``f(rows)`` of prompts of so many rows.

    Attributes:
        mean_output: Tokens that a request emits.
        share: Of the time, that prompts take lately.
        stall: Seconds of prompts that are there already and run after this round; 0 where prompts
            share the rounds' forwards.
    """

    def __init__(self, prompt_seconds: Callable[[int], float]) -> None:
        self.mean_output = START_OUTPUT
        self.share = 0.0
        self.stall = 0.0
        self._prompt_seconds = prompt_seconds
        self._known: list[BudgetTree] = []
        self._prompt_time, self._all_time = 0.0, _HORIZON  # seconds lately, older ones faded
        self._last_now = 0.0
        self._is_shared = False  # prompts share forwards, they do not run between rounds

    def observe(self, trees: Sequence[BudgetTree], now: float, *, is_shared: bool) -> None:
        """A round starts with these requests.

        Foresees the prompts that run after it, whatever is decided about it. They are those that
        come while this round's prompts run: the share of that time that prompts have taken lately.
        In steady traffic all rounds have such a stall now and then, so that it says nothing of this
        one; the share's power leaves it to bursts.

        Args:
            trees: Of the batch.
            now: Seconds since the start of the run.
            is_shared: Prompts share this round's forward.
        """
        prompt_rows = self._learn_lengths(trees)
        seconds = self._prompt_seconds(prompt_rows) if prompt_rows else 0.0
        passed = max(now - self._last_now, 0.0)
        faded = exp(-passed / _HORIZON)
        self._prompt_time = faded * self._prompt_time + seconds
        self._all_time = faded * self._all_time + passed
        self._last_now = now
        self._is_shared = self._is_shared or is_shared
        self.share = min(self._prompt_time / self._all_time, 1.0)
        self.stall = 0.0 if self._is_shared else self.share**_BURST * seconds

    def _learn_lengths(self, trees: Sequence[BudgetTree]) -> int:
        """Take in how many tokens those have emitted that are gone; prompt rows of the new ones."""
        known = self._known
        if len(trees) == len(known) and all(a is b for a, b in zip(trees, known, strict=True)):
            return 0
        here, before = set(map(id, trees)), set(map(id, known))
        for tree in known:
            if id(tree) not in here:
                emitted = tree.base_len - tree.first_len
                self.mean_output += _MEMORY * (emitted - self.mean_output)
        self._known = list(trees)
        return sum([tree.first_len for tree in trees if id(tree) not in before])
