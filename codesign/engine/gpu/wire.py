"""Verdicts and candidates as int32 words, one message each.

The words of prompts, and of parts of them to be run, come last in a verdict.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from codesign.engine.draft_worker import DraftTimes
from codesign.engine.gpu.mailbox import Words
from codesign.policy.protocol import (
    Admission,
    Candidates,
    PromptRows,
    RequestCandidates,
    RequestVerdict,
    Verdict,
)

_TIMES = struct.Struct("<4d2q")
_TIME_WORDS = _TIMES.size // 4
_TIME_BITS = struct.Struct(f"<{_TIME_WORDS}i")
_DOUBLE, _DOUBLE_WORDS = struct.Struct("<d"), struct.Struct("<2i")
_HEAD_WORDS = 12  # of a verdict
_CHANCE_UNITS = 1 << 20


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Sizes that both ends agree on.

    Attributes:
        max_batch: Most requests in a message.
        max_rows: Most candidate rows of a request, which bounds the tokens of a verdict too.
    """

    max_batch: int
    max_rows: int

    @property
    def verdict_words(self) -> int:
        """Most int32 words of a verdict, prompts not counted.

        A request may have two entries, its first token and a round.
        """
        return _HEAD_WORDS + self.max_batch * (2 * 4 + self.max_rows + 1 + 5 + 1)

    @property
    def candidate_words(self) -> int:
        """Most int32 words of candidates with their times."""
        return 2 + _TIME_WORDS + self.max_batch * (3 + 3 * self.max_rows)


def encode_verdict(verdict: Verdict, limits: WireLimits) -> Words:
    """One message."""
    words = [
        verdict.round,
        len(verdict.requests),
        len(verdict.admitted),
        int(verdict.is_last),
        len(verdict.prompts),
        len(verdict.dropped),
        *verdict.beside,
        *verdict.sharing,
        *_words_of(verdict.now),
        *verdict.dropped,
    ]
    for entry in verdict.requests:
        words += [entry.request_id, entry.base_len, len(entry.tokens), int(entry.is_finished)]
        words += entry.tokens
    for admission in verdict.admitted:
        words += [admission.request_id, admission.max_new_tokens, len(admission.tokens)]
        words += _words_of(admission.slo_tpot or 0.0)
    _check_length(words, limits.verdict_words)
    for admission in verdict.admitted:
        words += admission.tokens
    for part in verdict.prompts:  # a chunk may hold many parts of one request
        words += (part.request_id, part.end, len(part.tokens), *part.tokens)
    return _message(words)


def decode_verdict(message: Words) -> Verdict:
    """Inverse of ``encode_verdict``."""
    words = _Reader(message)
    round_number, num_requests, num_admitted, is_last, num_prompts, num_dropped = words.take(6)
    num_beside, rows_beside, prompt_rows, num_waiting, *clock = words.take(6)
    dropped = tuple(words.take(num_dropped))
    requests = []
    for _ in range(num_requests):
        request_id, base_len, num_tokens, is_finished = words.take(4)
        tokens = tuple(words.take(num_tokens))
        requests.append(RequestVerdict(request_id, base_len, tokens, bool(is_finished)))
    admissions = [words.take(5) for _ in range(num_admitted)]
    admitted = [
        Admission(
            request_id, tuple(words.take(num_tokens)), max_new_tokens, _double_of(slo_tpot) or None
        )
        for request_id, max_new_tokens, num_tokens, *slo_tpot in admissions
    ]
    prompt_parts = []
    for _ in range(num_prompts):
        request_id, end, num_tokens = words.take(3)
        prompt_parts.append(PromptRows(request_id, tuple(words.take(num_tokens)), end))
    return Verdict(
        round_number,
        tuple(requests),
        tuple(admitted),
        prompts=tuple(prompt_parts),
        dropped=dropped,
        is_last=bool(is_last),
        now=_double_of(clock),
        beside=(num_beside, rows_beside),
        sharing=(prompt_rows, num_waiting),
    )


def encode_candidates(candidates: Candidates, times: DraftTimes, limits: WireLimits) -> Words:
    """One message."""
    bits = _TIMES.pack(
        times.idle_from, times.received, times.rerooted, times.answered, times.num_expansions,
        times.num_rows,
    )  # fmt: skip
    words = [candidates.round, len(candidates.requests), *_TIME_BITS.unpack(bits)]
    for entry in candidates.requests:
        words += (entry.request_id, entry.base_len, len(entry.tokens))
        words += entry.tokens
        words += entry.parents
        words += [round(chance * _CHANCE_UNITS) for chance in entry.chances]
        words += (0,) * (len(entry.tokens) - len(entry.chances))
    _check_length(words, limits.candidate_words)
    return _message(words)


def decode_candidates(message: Words) -> tuple[Candidates, DraftTimes]:
    """Inverse of ``encode_candidates``."""
    words = _Reader(message)
    round_number, num_requests = words.take(2)
    times = DraftTimes(*_TIMES.unpack(_TIME_BITS.pack(*words.take(_TIME_WORDS))))
    entries = []
    for _ in range(num_requests):
        request_id, base_len, num_rows = words.take(3)
        tokens, parents = tuple(words.take(num_rows)), tuple(words.take(num_rows))
        units = words.take(num_rows)
        chances = tuple([unit / _CHANCE_UNITS for unit in units]) if units[0] else ()
        entries.append(RequestCandidates(request_id, base_len, tokens, parents, chances))
    return Candidates(round_number, tuple(entries)), times


class _Reader:
    """Takes words from the front of a message."""

    def __init__(self, message: Words) -> None:
        self._words = message.tolist()
        self._at = 0

    def take(self, count: int) -> list[int]:
        start = self._at
        self._at = end = start + count
        return self._words[start:end]


def _words_of(value: float) -> tuple[int, int]:
    return _DOUBLE_WORDS.unpack(_DOUBLE.pack(value))


def _double_of(words: Sequence[int]) -> float:
    return _DOUBLE.unpack(_DOUBLE_WORDS.pack(*words))[0]


def _check_length(words: list[int], limit: int) -> None:
    assert len(words) <= limit, f"message of {len(words)} words, limit {limit}"


def _message(words: list[int]) -> Words:
    return np.frombuffer(array("i", words), np.int32)  # np.array takes four times as long
