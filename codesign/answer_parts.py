"""Parts of an answer, as draft and target agree more often the longer it gets.

Greedy answers of an 8B inflated from SmolLM2, drafted by a 1B: a chain of three emits 2.4 tokens a
round in the first 64 tokens, then 2.7, and 3.0 from 128 on. So what was recorded 64 to 127 tokens
into answers is replayed there, as if it were a kind of prompt of its own; the last part has no end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import AcceptanceProfile, Recording

PART_TOKENS = 64
_MOST_PARTS = 4
_FEWEST_RECORDINGS = 4  # that reach the end of a part
_FROM = " from token "


@functools.lru_cache(maxsize=4)
def in_parts(profile: AcceptanceProfile) -> AcceptanceProfile:
    """The recordings cut into parts, each a kind of prompt of its own; see ``part_names``.

    A kind of which few recordings are longer than a part stays whole.
    """
    if all(_num_parts(group) == 1 for group in profile.recordings.values()):
        return profile
    parts: dict[str, list[Recording]] = {}
    for kind, group in profile.recordings.items():
        last = _num_parts(group) - 1
        for recording in group:
            for number in range(min(last, (len(recording.ranks) - 1) // PART_TOKENS) + 1):
                first = number * PART_TOKENS
                end = None if number == last else first + PART_TOKENS
                name = f"{kind}{_FROM}{first}" if number else kind
                parts.setdefault(name, []).append(recording.part(first, end))
    return AcceptanceProfile({name: tuple(group) for name, group in parts.items()})


def _num_parts(group: Sequence[Recording]) -> int:
    reached = sorted((len(r.ranks) for r in group), reverse=True)[:_FEWEST_RECORDINGS]
    if len(reached) < _FEWEST_RECORDINGS:
        return 1
    return min(max(reached[-1] // PART_TOKENS, 1), _MOST_PARTS)


def part_names(kind: str, profile: AcceptanceProfile) -> list[str]:
    """What the parts of a kind of prompt are called, from the beginning of an answer on.

    Args:
        kind: As it was recorded; "" for all.
        profile: From ``in_parts``, or as it was recorded.
    """
    found = [name.partition(_FROM) for name in profile.recordings]
    starts = {int(start) for known, _, start in found if start.isdigit() and kind in ("", known)}
    return [kind, *[f"{kind}{_FROM}{start}" for start in sorted(starts)]]


def part_of_all(name: str) -> str:
    """What the part of a kind is called when all kinds are taken together."""
    _, mark, start = name.partition(_FROM)
    return mark + start


def tokens_of_parts(output_tokens: NDArray[np.int64], num_parts: int) -> NDArray[np.int64]:
    """(R, P) tokens of each part, of answers of (R,) ``output_tokens`` tokens."""
    beyond_RP = output_tokens[:, None] - PART_TOKENS * np.arange(num_parts)
    most_P = np.array([PART_TOKENS] * (num_parts - 1) + [np.iinfo(np.int64).max])
    return np.clip(beyond_RP, 0, most_P)
