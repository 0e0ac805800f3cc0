"""Verdicts and candidates as int32 tensors of fixed size, so that a message is one transfer.

Prompts, and parts of them to be run, vary in length: when there are any, a second tensor follows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from codesign.engine.draft_worker import DraftTimes
from codesign.policy.protocol import (
    Admission,
    Candidates,
    PromptRows,
    RequestCandidates,
    RequestVerdict,
    Verdict,
)

Words = NDArray[np.int32]
_TIMES = struct.Struct("<4d2q")
_TIME_WORDS = _TIMES.size // 4
_CLOCK, _CLOCK_WORDS = struct.Struct("<d"), struct.Struct("<2i")
_HEAD_WORDS = 12  # of a verdict
_TPOT_UNIT = 1e-6  # seconds
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
        """int32 words of a verdict: a request may have two entries, its first token and a round."""
        return _HEAD_WORDS + self.max_batch * (2 * 4 + self.max_rows + 1 + 4 + 1)

    @property
    def candidate_words(self) -> int:
        """int32 words of candidates with their times."""
        return 2 + _TIME_WORDS + self.max_batch * (3 + 3 * self.max_rows)


def encode_verdict(verdict: Verdict, limits: WireLimits) -> tuple[Words, Words]:
    """The message and the prompts that follow it (empty where there are none)."""
    prompts = [token for admission in verdict.admitted for token in admission.tokens]
    for part in verdict.prompts:  # a chunk may hold many parts of one request
        prompts += [part.request_id, part.end, len(part.tokens), *part.tokens]
    words = [
        verdict.round,
        len(verdict.requests),
        len(verdict.admitted),
        int(verdict.is_last),
        len(verdict.prompts),
        len(verdict.dropped),
        *verdict.beside,
        *verdict.sharing,
        *_CLOCK_WORDS.unpack(_CLOCK.pack(verdict.now)),
        *verdict.dropped,
    ]
    for entry in verdict.requests:
        words += [entry.request_id, entry.base_len, len(entry.tokens), int(entry.is_finished)]
        words += entry.tokens
    for admission in verdict.admitted:
        words += [admission.request_id, admission.max_new_tokens, len(admission.tokens)]
        words.append(round((admission.slo_tpot or 0.0) / _TPOT_UNIT))
    return _padded(words, limits.verdict_words), np.array(prompts, np.int32)


def decode_verdict(message: Words, prompts: Words) -> Verdict:
    """Inverse of ``encode_verdict``."""
    words = iter(message.tolist())
    round_number, num_requests, num_admitted, is_last, num_prompts, num_dropped = _take(words, 6)
    num_beside, rows_beside, prompt_rows, num_waiting, *clock = _take(words, 6)
    (now,) = _CLOCK.unpack(_CLOCK_WORDS.pack(*clock))
    dropped = tuple(_take(words, num_dropped))
    requests = []
    for _ in range(num_requests):
        request_id, base_len, num_tokens, is_finished = _take(words, 4)
        tokens = tuple(_take(words, num_tokens))
        requests.append(RequestVerdict(request_id, base_len, tokens, bool(is_finished)))
    tokens_left = iter(prompts.tolist())
    admitted = []
    for _ in range(num_admitted):
        request_id, max_new_tokens, num_tokens, slo_tpot = _take(words, 4)
        prompt = tuple(_take(tokens_left, num_tokens))
        admitted.append(
            Admission(request_id, prompt, max_new_tokens, slo_tpot * _TPOT_UNIT or None)
        )
    prompt_parts = []
    for _ in range(num_prompts):
        request_id, end, num_tokens = _take(tokens_left, 3)
        prompt_parts.append(PromptRows(request_id, tuple(_take(tokens_left, num_tokens)), end))
    return Verdict(
        round_number,
        tuple(requests),
        tuple(admitted),
        prompts=tuple(prompt_parts),
        dropped=dropped,
        is_last=bool(is_last),
        now=now,
        beside=(num_beside, rows_beside),
        sharing=(prompt_rows, num_waiting),
    )


def encode_candidates(candidates: Candidates, times: DraftTimes, limits: WireLimits) -> Words:
    """One message."""
    words = [candidates.round, len(candidates.requests), *(0,) * _TIME_WORDS]
    for entry in candidates.requests:
        words += [entry.request_id, entry.base_len, len(entry.tokens)]
        words += entry.tokens
        words += entry.parents
        words += [round(chance * _CHANCE_UNITS) for chance in entry.chances]
        words += [0] * (len(entry.tokens) - len(entry.chances))
    message = _padded(words, limits.candidate_words)
    _TIMES.pack_into(
        message.data, 2 * message.itemsize, times.idle_from, times.received, times.rerooted,
        times.answered, times.num_expansions, times.num_rows,
    )  # fmt: skip
    return message


def decode_candidates(message: Words) -> tuple[Candidates, DraftTimes]:
    """Inverse of ``encode_candidates``."""
    times = DraftTimes(*_TIMES.unpack_from(message.data, 2 * message.itemsize))
    round_number, num_requests = message[:2].tolist()
    words = iter(message[2 + _TIME_WORDS :].tolist())
    entries = []
    for _ in range(num_requests):
        request_id, base_len, num_rows = _take(words, 3)
        tokens = tuple(_take(words, num_rows))
        parents = tuple(_take(words, num_rows))
        units = _take(words, num_rows)
        chances = tuple([unit / _CHANCE_UNITS for unit in units]) if units[0] else ()
        entries.append(RequestCandidates(request_id, base_len, tokens, parents, chances))
    return Candidates(round_number, tuple(entries)), times


def _take(words: Iterator[int], count: int) -> list[int]:
    return list(islice(words, count))


def _padded(words: list[int], size: int) -> Words:
    assert len(words) <= size, f"message of {len(words)} words, limit {size}"
    message = np.zeros(size, np.int32)
    message[: len(words)] = words
    return message
