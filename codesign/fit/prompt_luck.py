"""How far acceptance on some prompts may be from that on others like them.

Prompts differ: of a draft distilled for its target, the rounds that an answer of 48 tokens takes
vary by 22 % from prompt to prompt, and the recorded ones are a sample.

Must not import torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.answer_parts import in_parts, part_names

_CHAIN = 3  # draft tokens per round of the chain that stands for every policy
_DRAWS = 400
Floats = NDArray[np.float64]


def acceptance_error(profile: AcceptanceProfile) -> float:
    """Relative standard error of the tokens that a round of a chain emits, over the requests."""
    served = {kind: len(group) for kind, group in profile.recordings.items()}
    by_kind = {kind: rounds_per_token(group) for kind, group in profile.recordings.items()}
    every = np.concatenate(list(by_kind.values()))
    if len(every) < 2:
        return 0.0
    generator = np.random.default_rng(0)
    expected, found = np.zeros(_DRAWS), 0.0
    for kind, count in served.items():
        rates_N = by_kind[kind] if len(by_kind[kind]) > 1 else every
        again_DN = generator.choice(rates_N, (_DRAWS, len(rates_N)))
        # A few values drawn again vary less than those that they stand for.
        scale = np.sqrt(len(rates_N) / (len(rates_N) - 1))
        expected += count * (rates_N.mean() + scale * (again_DN.mean(axis=1) - rates_N.mean()))
        found += count * rates_N.mean()
    return float(np.std(np.log(found / expected), ddof=1)) if expected.min() > 0 else 0.0


def parts_covariance(profile: AcceptanceProfile) -> tuple[tuple[float, ...], ...]:
    """(P, P) covariance of the relative errors of tokens a round in the P parts of an answer.

    Drawing recordings again, within their kinds, gives the same in the limit of many draws. Few
    recordings reach late parts, so these have large errors; parts of the same recordings have
    errors that go together, which is in the covariance and not assumed. Assumed: requests are of
    the kinds of prompt that were recorded, as often as these were.

    Args:
        profile: As it was recorded.

    Returns:
        Parts in the order of an answer; empty if answers are whole.
    """
    parts = in_parts(profile)
    num_parts = len(part_names("", parts))
    if num_parts == 1:
        return ()
    kinds = profile.recordings
    keys = [(kind, r.request) for kind, group in kinds.items() for r in group]
    row_of = {key: row for row, key in enumerate(keys)}
    rates = {name: rounds_per_token(group) for name, group in parts.recordings.items()}
    errors_NP = np.zeros((len(keys), num_parts))
    for part in range(num_parts):
        # Of a kind that stays whole, or has fewer parts, the last goes on, as it is replayed.
        names = {kind: part_names(kind, parts)[: part + 1][-1] for kind in kinds}
        every = np.concatenate([rates[name] for name in names.values()])
        total = sum(len(kinds[kind]) * rates[name].mean() for kind, name in names.items())
        for kind, name in names.items():
            rates_N, count = rates[name], len(rates[name])
            rows = [row_of[kind, r.request] for r in parts.recordings[name]]
            # A single one tells nothing of its kind; few vary less than those that they stand for.
            mean = rates_N.mean() if count > 1 else every.mean()
            scale = np.sqrt(count / max(count - 1, 1)) * len(kinds[kind]) / count
            errors_NP[rows, part] = scale * (rates_N - mean) / total
    return tuple(map(tuple, (errors_NP.T @ errors_NP).tolist()))


def rounds_per_token(recordings: tuple[Recording, ...]) -> Floats:
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
