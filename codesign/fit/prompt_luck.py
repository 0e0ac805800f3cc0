"""How far acceptance on some prompts may be from that on others like them.

Prompts differ: of a draft distilled for its target, the rounds that an answer of 48 tokens takes
vary by 22 % from prompt to prompt. Recorded ones are a sample, and those that are served another.
Both are drawn again and again from the recordings, each kind of prompt by itself.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import AcceptanceProfile, Recording

_CHAIN = 3  # draft tokens per round of the chain that stands for every policy
_DRAWS = 400
Floats = NDArray[np.float64]


def acceptance_error(profile: AcceptanceProfile) -> float:
    """Relative standard error of the tokens that a round of a chain emits, over the requests."""
    served = {kind: len(group) for kind, group in profile.recordings.items()}
    return _spread(profile, served, is_served=False)


def served_error(profile: AcceptanceProfile, served: Mapping[str, int]) -> float:
    """The same of the difference between these recordings and so many other requests.

    Args:
        profile: What was recorded.
        served: Requests by kind of prompt; a kind that was not recorded is like all of them.
    """
    return _spread(profile, served, is_served=True)


def _spread(profile: AcceptanceProfile, served: Mapping[str, int], *, is_served: bool) -> float:
    by_kind = {kind: _rounds_per_token(group) for kind, group in profile.recordings.items()}
    every = np.concatenate(list(by_kind.values()))
    if len(every) < 2:
        return 0.0
    generator = np.random.default_rng(0)
    expected, found = np.zeros(_DRAWS), np.zeros(_DRAWS)
    for kind, count in served.items():
        rates_N = by_kind.get(kind, every)
        if len(rates_N) < 2:
            rates_N = every
        again_DN = generator.choice(rates_N, (_DRAWS, len(rates_N)))
        # A few values drawn again vary less than those that they stand for.
        scale = np.sqrt(len(rates_N) / max(len(rates_N) - 1, 1))
        expected += count * (rates_N.mean() + scale * (again_DN.mean(axis=1) - rates_N.mean()))
        if is_served:
            others_DC = generator.choice(rates_N, (_DRAWS, count))
            found += count * (rates_N.mean() + scale * (others_DC.mean(axis=1) - rates_N.mean()))
        else:
            found += count * rates_N.mean()
    return float(np.std(np.log(found / expected), ddof=1)) if expected.min() > 0 else 0.0


def _rounds_per_token(recordings: tuple[Recording, ...]) -> Floats:
    """(N,) rounds a token when a chain replays each recording."""
    return np.array([_rounds(r.ranks == 0) / len(r.ranks) for r in recordings], np.float64)


def _rounds(agreed: NDArray[np.bool_]) -> int:
    at = rounds = 0
    while at < len(agreed):
        run = 0
        while run < _CHAIN and at + run < len(agreed) and agreed[at + run]:
            run += 1
        at += run + 1
        rounds += 1
    return rounds
