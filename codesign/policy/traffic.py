"""What a batch's policy has seen of the requests: how long answers are, what prompts take.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import exp
from typing import Any

import numpy as np

from codesign.policy.tree import DraftTree

COLD = 16  # tokens missing in the draft from which running them is a decision of its own
START_OUTPUT = 96.0  # tokens that a request is expected to emit where no trace says how many
START_PROMPT = 512.0  # tokens of a prompt, until some have come
# Without drafting what the draft has run of those that are here is lost: half of what it saves, on
# average. The loss of a prompt that does not repay must be larger within two such batches.
REPAID = 0.8
_LENGTHS = 128  # of the last finished requests that are remembered
_MEMORY = 0.05  # weight of a request in the mean length of prompts
_HORIZON = 5.0  # seconds over which the share of time that prompts take is averaged
_BURST = 3.0


class Traffic:
    """Takes in the batch of every round.

    Args:
        prompt_seconds: ``f(rows)`` of prompts of so many rows.
        draft_prompt_seconds: The same of the draft; None where nobody asks what it takes.
        hears_late: Of a round the policy hears after the prompts before it have run, so that it
            knows how many have come meanwhile.
        answer_tokens: That a request is expected to emit, until some have finished.

    Attributes:
        mean_prompt: Tokens of a prompt.
        reading: Seconds of the draft over a prompt of so many.
        left_at_first: Tokens that a request is expected to emit when it starts.
        draft_prompt: Mean seconds of the draft over a prompt, of those seen.
        share: Of the time, that prompts take lately.
        stall: Seconds of prompts that are there already and run after this round; 0 where prompts
            share the rounds' forwards.
    """

    def __init__(
        self,
        prompt_seconds: Callable[[float], float],
        draft_prompt_seconds: Callable[[float], float] | None = None,
        *,
        hears_late: bool,
        answer_tokens: float = START_OUTPUT,
    ) -> None:
        self.mean_prompt = START_PROMPT
        self.reading = draft_prompt_seconds(START_PROMPT) if draft_prompt_seconds else 0.0
        self.draft_prompt = 0.0
        self.share = 0.0
        self.stall = 0.0
        self._prompt_seconds = prompt_seconds
        self._draft_prompt_seconds = draft_prompt_seconds
        self._num_prompts = 0
        self._hears_late = hears_late
        self._known: list[DraftTree] = []
        self._lengths: deque[int] = deque(maxlen=_LENGTHS)
        self._ranked = np.empty(0)  # ascending
        self._beyond = np.zeros(1)  # sum of these from each on
        self.left_at_first = self._first_guess = answer_tokens
        self._prompt_time, self._all_time = 0.0, _HORIZON  # seconds lately, older ones faded
        self._last_now = 0.0
        self._is_shared = False  # prompts share forwards, they do not run between rounds

    def observe(self, trees: Sequence[DraftTree], now: float, sharing: tuple[int, int]) -> None:
        """A round starts with these requests.

        Foresees the prompts that run after it, whatever is decided about it: those that have come
        while this round's prompts ran, where that is known, or else the share of this time that
        prompts have taken lately. In steady traffic all rounds have such a stall now and then, so
        that it says nothing of this one: factors of the share leave it to bursts.

        Args:
            trees: Of the batch.
            now: Seconds since the start of the run.
            sharing: As in protocol.Verdict.
        """
        shared_rows, num_waiting = sharing
        prompt_rows = self._learn_lengths(trees)
        seconds = self._prompt_seconds(prompt_rows) if prompt_rows else 0.0
        passed = max(now - self._last_now, 0.0)
        faded = exp(-passed / _HORIZON)
        self._prompt_time = faded * self._prompt_time + seconds
        self._all_time = faded * self._all_time + passed
        self._last_now = now
        self._is_shared = self._is_shared or shared_rows > 0
        self.share = min(self._prompt_time / self._all_time, 1.0)
        if self._is_shared:
            self.stall = 0.0
            return
        if self._hears_late:
            seconds = self._prompt_seconds(num_waiting * self.mean_prompt) if num_waiting else 0.0
        self.stall = self.share**_BURST * seconds

    def expected_left(self, emitted: Any) -> Any:
        """Tokens that requests still emit after so many: what those had left that were longer.

        Those that finished last; until they are many, those that are here, too. Their own limits
        are not looked at: most requests end long before.

        Args:
            emitted: Of a request, or an array of them.
        """
        shorter = self._ranked.searchsorted(emitted, side="right")
        count = len(self._ranked) - shorter
        return (self._first_guess + self._beyond[shorter] - emitted * count) / (1 + count)

    def repays_prompts(self, saved: float, *, is_drafting: bool) -> bool:
        """Whether drafting saves an average request what its prompt takes the draft.

        While others are drafted for, ``REPAID`` of it is enough.

        Args:
            saved: Seconds per token of the request.
            is_drafting: The last round had draft tokens.
        """
        needed = self.draft_prompt * (REPAID if is_drafting else 1.0)
        return saved * self.left_at_first > needed

    def _learn_lengths(self, trees: Sequence[DraftTree]) -> int:
        """Take in how many tokens those have emitted that are gone; prompt rows of the new ones."""
        known = self._known
        if list(trees) == known:  # the same objects: trees are not compared by their nodes
            return 0
        here, before = set(map(id, trees)), set(map(id, known))
        for tree in known:
            if id(tree) not in here:
                self._lengths.append(tree.emitted)
        if len(known) > len(here & before):
            self._rank(self._lengths)
            if len(self._lengths) < _LENGTHS:
                # Those that finish first are the short ones. The others count, too, with what is
                # expected of them by these.
                emitted = np.array([tree.emitted for tree in trees], float)
                self._rank([*self._lengths, *(emitted + self.expected_left(emitted))])
            self.left_at_first = float(self.expected_left(0))
        self._known = list(trees)
        prompts = [tree.first_len for tree in trees if id(tree) not in before]
        for length in prompts:
            self.mean_prompt += _MEMORY * (length - self.mean_prompt)
            if self._draft_prompt_seconds is not None:
                self._num_prompts += 1
                beyond = self._draft_prompt_seconds(length) - self.draft_prompt
                self.draft_prompt += beyond / min(self._num_prompts, _LENGTHS)
        if prompts and self._draft_prompt_seconds is not None:
            self.reading = self._draft_prompt_seconds(self.mean_prompt)
        return sum(prompts)

    def _rank(self, lengths: Sequence[float]) -> None:
        """Tokens of finished requests, for ``expected_left``."""
        self._ranked = np.sort(lengths)
        self._beyond = np.append(self._ranked[::-1].cumsum()[::-1], 0)


def rows_behind(missing: Sequence[int]) -> list[int]:
    """Rows that requests' roots bring along: the last token of a chain that was all accepted.

    What plain rounds left is run once, as a prompt is, and is no price of drafting on.

    Args:
        missing: Tokens that the draft model has not run on, of each.
    """
    return [1 if 0 < tokens < COLD else 0 for tokens in missing]
