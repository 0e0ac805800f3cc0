"""Which recorded tokens a request plays: *stretches*, runs of them, one after another.

There are few of them, the same in every simulation, so that what a policy does on each need be
found only once (codesign.sim.tapes).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from codesign.acceptance import AcceptanceProfile
from codesign.answer_parts import PART_TOKENS, part_names
from codesign.sim.acceptance import load_recordings

# Tokens that a stretch stands for: an answer's first stretch is of its first part.
STRETCH_TOKENS = PART_TOKENS
_MOST_STRETCHES = 96  # of a kind of prompt
_FEWEST_STRETCHES = 8
_TIMES_RECORDED = 2  # stretches of a kind hold each token recorded of it about so often


class Stretches:
    """Runs of recorded tokens of each kind of prompt, the same in every simulation.

    Their starts are spread evenly over what was recorded and each runs on into the next recording,
    so that all of them together agree as often as the recordings did.

    Args:
        profile: What was recorded, in parts or not.
        categories: Kinds of prompt that are asked for, and parts of answers to them.
    """

    def __init__(self, profile: AcceptanceProfile, categories: Sequence[str]) -> None:
        self._profile = profile
        self._recordings = load_recordings(profile)
        self._tokens: dict[str, list[int]] = {}
        self.categories = tuple(categories)
        self._counts = [self._number_of(kind) for kind in categories]
        self._firsts = [0, *accumulate(self._counts)]
        self._paths: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self._firsts[-1]

    def first(self, category: str) -> int:
        """Number of the first stretch of a kind of prompt."""
        return self._firsts[self.categories.index(category)]

    def count(self, category: str) -> int:
        """Stretches of a kind of prompt."""
        return self._counts[self.categories.index(category)]

    def parts(self, category: str) -> list[str]:
        """The category and what follows it in an answer."""
        return [name for name in part_names(category, self._profile) if name in self.categories]

    def category(self, stretch: int) -> str:
        """Kind of prompt of a stretch."""
        return self.categories[bisect_right(self._firsts, stretch) - 1]

    def path(self, stretch: int, length: int, emitted_before: int = 0) -> list[int]:
        """Recorded tokens of a stretch from its start; longer ones begin like shorter ones."""
        found = self._paths.get(stretch, [])
        if len(found) < length:
            kind = self.category(stretch)
            recorded = self._recorded(kind)
            place = 2 * (stretch - self.first(kind)) + 1
            start = place * len(recorded) // (2 * self.count(kind))
            found = [recorded[(start + i) % len(recorded)] for i in range(length)]
            self._paths[stretch] = found
        return found[:length]

    def _recorded(self, category: str) -> list[int]:
        """Recorded tokens of a kind, recording after recording."""
        if category not in self._tokens:
            spans = self._recordings.spans.get(category, self._recordings.spans[""])
            self._tokens[category] = [token for span in spans for token in range(*span)]
        return self._tokens[category]

    def _number_of(self, category: str) -> int:
        wanted = -(-_TIMES_RECORDED * len(self._recorded(category)) // STRETCH_TOKENS)
        return min(max(wanted, _FEWEST_STRETCHES), _MOST_STRETCHES)


class Luck:
    """Which stretches each request of a trace plays.

    Args:
        stretches: What there is.
        categories: Kind of prompt of each request.
        output_tokens: Tokens that each emits.
        seed: Of the draws.
    """

    def __init__(
        self,
        stretches: Stretches,
        categories: Sequence[str],
        output_tokens: Sequence[int],
        seed: int,
    ) -> None:
        self._stretches = stretches
        # A third more than their tokens take, as a stretch that goes on another lacks its start.
        needed = np.asarray(output_tokens, np.int64) * 4 // (3 * STRETCH_TOKENS) + 2
        ends = np.concatenate(([0], np.cumsum(needed)))
        self._ends = ends.tolist()
        drawn = np.random.default_rng(seed).random(self._ends[-1])
        number = np.arange(self._ends[-1]) - np.repeat(ends[:-1], needed)  # within its request
        firsts, counts = np.zeros((2, self._ends[-1]), np.int64)
        kinds = np.repeat(np.asarray(categories, dtype=str), needed)
        for kind in set(categories):
            parts = [
                (stretches.first(name), stretches.count(name)) for name in stretches.parts(kind)
            ]
            here = kinds == kind
            part = np.minimum(number[here], len(parts) - 1)
            firsts[here], counts[here] = np.array(parts, np.int64)[part].T
        self._chosen = ((drawn * counts).astype(np.int64) + firsts).tolist()

    @classmethod
    def of(
        cls,
        profile: AcceptanceProfile,
        categories: Sequence[str],
        output_tokens: Sequence[int],
        seed: int,
    ) -> Luck:
        """Of the requests of a trace; a kind that was not recorded plays all recordings.

        Args:
            profile: What was recorded, in parts or not.
            categories: (R,) kind of prompt of each request.
            output_tokens: (R,) tokens that each emits.
            seed: Of the stretches drawn.
        """
        known = set(categories) & set(profile.recordings)
        kinds = [kind if kind in known else "" for kind in categories]
        reached = max(output_tokens, default=0) // STRETCH_TOKENS + 1
        names = [
            name for kind in sorted(set(kinds)) for name in part_names(kind, profile)[:reached]
        ]
        return cls(Stretches(profile, names), kinds, output_tokens, seed)

    @property
    def categories(self) -> tuple[str, ...]:
        """Kinds of prompt that there are stretches of."""
        return self._stretches.categories

    def stretches(self, request_id: int, emitted_before: int = 0) -> list[int]:
        """Stretches of a request, from the one that it is in after ``emitted_before`` tokens."""
        first = self._ends[request_id] + emitted_before // STRETCH_TOKENS
        return self._chosen[first : self._ends[request_id + 1]]

    def path(self, request_id: int, length: int, emitted_before: int = 0) -> list[int]:
        """Recorded token that each of ``length`` output positions replays."""
        path: list[int] = []
        for stretch in self.stretches(request_id, emitted_before):
            path += self._stretches.path(stretch, min(STRETCH_TOKENS, length - len(path)))
        return path
