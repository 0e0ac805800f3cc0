"""Where in the recordings policies are observed, and how lucky these places are.

A few hundred rounds emit 3 to 5 % more or fewer tokens a round than all recordings would. Perfect
drafts, whose rounds follow from the recordings without being played, are lucky in the same places.
By how much is known, and is taken out, which leaves about 2 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.answer_parts import part_of_all
from codesign.sim.acceptance import SyntheticDrafter
from codesign.sim.stretches import Stretches

WARM_UP = 2  # rounds in which a draft still reads the prompt, or has not drafted beside yet
NUM_TOKENS = 24  # that are observed in each place: recordings are short, and kinds of prompt differ
_NUM_PLACES = 48  # of all kinds; each has one at least
_DEEPEST = 8  # levels of a perfect draft
_FANOUTS = (1, 2)  # children of each of its nodes: chains, and trees
_MOST_TOKENS = NUM_TOKENS + (WARM_UP + 1) * (_DEEPEST + 1)  # that it passes through in a place


class Sample:
    """Places of each kind of prompt, spread evenly over what was recorded of it.

    Args:
        profile: What was recorded, with calibrated chances.
        shares: Of each kind, how much it matters.

    Attributes:
        places: Per kind, stretches whose beginnings are observed.
        drafter: Answers for the draft model there.
    """

    def __init__(self, profile: AcceptanceProfile, shares: Mapping[str, float]) -> None:
        self._profile, self._shares = profile, shares
        self._stretches = Stretches(profile, sorted(shares))
        self._ranks = np.concatenate([r.ranks for g in profile.recordings.values() for r in g])
        self.places = {kind: self._spread(kind) for kind in sorted(shares)}
        self.drafter = SyntheticDrafter(profile, 0, self._stretches.path)
        self._perfect = {kind: self._measured(kind) for kind in shares}

    def luck(self, kind: str, emitted: float, depth: int) -> float:
        """How many times as many tokens a round emits in a kind's places as on all it recorded.

        By a chain and a tree that are perfect and emit about as many as the policy.

        Args:
            kind: Of prompt.
            emitted: Mean tokens per round of a policy that was observed there.
            depth: Levels that it drafts in a round.
        """
        logs = []
        for on_all, here in self._perfect[kind][..., : max(depth, 1)]:
            nearest = int(np.argmin(np.abs(on_all - emitted)))
            logs.append(np.log(here[nearest] / on_all[nearest]))
        return float(np.exp(np.mean(logs)))

    def _spread(self, kind: str) -> list[int]:
        count = self._stretches.count(kind)
        num = min(max(round(self._shares[kind] * _NUM_PLACES), 1), count)
        first = self._stretches.first(kind)
        return [first + (2 * number + 1) * count // (2 * num) for number in range(num)]

    def _ranks_from(self, place: int) -> NDArray[np.int64]:
        """Of the tokens in a place, but for the first one, which comes with the prompt."""
        return self._ranks[self._stretches.path(place, 1 + _MOST_TOKENS)[1:]]

    def _measured(self, kind: str) -> NDArray[np.float64]:
        """(F, 2, L) tokens per round of perfect drafts: on all that was recorded, and here."""
        ranks = recorded_ranks(self._profile, kind)
        paths = [self._ranks_from(place) for place in self.places[kind]]
        found = np.empty((len(_FANOUTS), 2, _DEEPEST))
        for (number, fanout), length in product(enumerate(_FANOUTS), range(1, _DEEPEST + 1)):
            here = [_seen(rounds_of(path, length, fanout)) for path in paths]
            on_all = np.mean(rounds_of(ranks, length, fanout))
            found[number, :, length - 1] = on_all, np.concatenate(here).mean()
        return found


def recorded_ranks(profile: AcceptanceProfile, kind: str) -> NDArray[np.int64]:
    """(N,) ranks of all tokens recorded of a kind, one recording after another.

    Args:
        profile: What was recorded.
        kind: Category, "" for all, or a part of answers.
    """
    return np.concatenate([recording.ranks for recording in _recorded(profile, kind)])


def agreement_runs(
    profile: AcceptanceProfile, kind: str, fanout: int = 1
) -> list[NDArray[np.int64]]:
    """Per recording and position, how many tokens in a row from there a perfect draft could have.

    Args:
        profile: What was recorded.
        kind: As for ``recorded_ranks``.
        fanout: Ranks of the draft's choices that may carry the target's token.
    """
    recorded = _recorded(profile, kind)
    return [_run_lengths((r.ranks >= 0) & (r.ranks < fanout)) for r in recorded]


def _recorded(profile: AcceptanceProfile, kind: str) -> list[Recording]:
    groups = profile.recordings.items()
    return [r for name, group in groups if kind in (name, part_of_all(name)) for r in group]


def rounds_of(ranks: NDArray[np.int64], length: int, fanout: int = 1) -> list[int]:
    """Tokens of each round of a perfect draft, from the first recorded token to the last.

    Behind the last token the first one follows, as where simulations play recordings.

    Args:
        ranks: (N,) of the tokens that the target emits.
        length: Tokens of the draft's chain.
        fanout: Ranks of its choices that may carry the target's token.
    """
    agreed = (ranks >= 0) & (ranks < fanout)
    runs = _run_lengths(np.resize(agreed, len(agreed) + length))
    steps = (np.minimum(runs[: len(agreed)], length) + 1).tolist()
    rounds: list[int] = []
    at = 0
    while at < len(steps):
        rounds.append(steps[at])
        at += steps[at]
    return rounds


def _run_lengths(agreed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(N,) length of the run of True that starts at each position, 0 where there is False."""
    positions = np.arange(len(agreed))
    ends = np.where(agreed, len(agreed), positions)
    return np.minimum.accumulate(ends[::-1])[::-1] - positions


def _seen(rounds: list[int]) -> list[int]:
    """Those that an observation has, of a request that begins with them."""
    rest = rounds[WARM_UP:]
    return rest[: int(np.searchsorted(np.cumsum(rest), NUM_TOKENS)) + 1]
