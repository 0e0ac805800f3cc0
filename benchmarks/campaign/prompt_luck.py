"""What a campaign's prompts may do to acceptance, of which others like them were recorded.

Recorded requests are a sample, and those that are served another. Where both ask the same
questions, what a question does to acceptance is the same in both. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.fit.prompt_luck import rounds_per_token


@dataclass(frozen=True, slots=True)
class PromptLuck:
    """Relative standard errors of the tokens that a round emits.

    Attributes:
        recorded: Of what the recordings say of prompts like those that are served.
        served: Of the requests served, around all that are like them.
    """

    recorded: float
    served: float


def prompt_luck(
    profile: AcceptanceProfile,
    served: Mapping[str, int],
    *,
    questions: Mapping[int, int] | None = None,
    in_turn: bool = False,
    rounds: Mapping[int, float] | None = None,
    alike: Mapping[str, float] | None = None,
) -> PromptLuck:
    """What recordings leave open of so many other requests.

    Args:
        profile: What was recorded.
        served: Requests by kind of prompt; a kind that was not recorded is like all of them.
        questions: Question of each recorded request, where those that are served ask the same
            ones with other words around them; None where nothing is known of theirs.
        in_turn: They ask each question once before any twice.
        rounds: A token of each recorded request, under the policy that serves: a deep chain makes
            twice as much of luck as a flat tree (see alone.py). None for a chain of three.
        alike: Of each kind, how many requests have the mean one's very prompt, itself counted: they
            have one answer. None for no other.
    """
    every = tuple(r for group in profile.recordings.values() for r in group)
    total = recorded = found = 0.0
    for kind, count in served.items():
        group = profile.recordings.get(kind, ())
        group = group if len(group) > 1 else every
        if len(group) < 2:
            return PromptLuck(0.0, 0.0)
        spread = _Spread.of(group, questions or {}, rounds)
        total += count * spread.mean
        recorded += count**2 * spread.of_recorded
        same = (alike or {}).get(kind, 1.0)
        found += count**2 * spread.of_served(count, in_turn=in_turn, alike=same)
    return PromptLuck(*(float(np.sqrt(variance)) / total for variance in (recorded, found)))


@dataclass(frozen=True, slots=True)
class _Spread:
    """Rounds a token of a kind of prompt: mean, and variances between and within questions."""

    mean: float
    questions: float
    words: float
    num_questions: int
    num_recorded: int
    is_known: bool

    @classmethod
    def of(
        cls,
        group: tuple[Recording, ...],
        questions: Mapping[int, int],
        rounds: Mapping[int, float] | None,
    ) -> _Spread:
        rates_N = rounds_per_token(group)
        if rounds is not None:
            rates_N = np.array([rounds[recording.request] for recording in group])
        asked = [questions.get(recording.request, -1) for recording in group]
        groups = [rates_N[np.array(asked) == question] for question in dict.fromkeys(asked)]
        freedom = len(rates_N) - len(groups)
        mean, count = float(rates_N.mean()), len(rates_N)
        if -1 in asked or freedom < 1 or len(groups) < 2:
            return cls(mean, float(rates_N.var(ddof=1)), 0.0, count, count, False)
        words = sum(float(((part - part.mean()) ** 2).sum()) for part in groups) / freedom
        between = float(np.var([part.mean() for part in groups], ddof=1))
        between = max(between - words * len(groups) / count, 0.0)
        return cls(mean, between, words, len(groups), count, True)

    @property
    def of_recorded(self) -> float:
        """Variance of the mean of the recorded; of known questions only that of their words."""
        between = 0.0 if self.is_known else self.questions / self.num_questions
        return between + self.words / self.num_recorded

    def of_served(self, count: int, *, in_turn: bool, alike: float) -> float:
        """Variance of the mean of so many requests."""
        by_question = 1.0 / count
        if self.is_known and in_turn:  # only those beyond whole turns are a choice of questions
            beyond = count % self.num_questions
            by_question = beyond / count**2 * (1.0 - beyond / self.num_questions)
        return by_question * self.questions + self.words * alike / count
