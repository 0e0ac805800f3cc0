"""Verdicts and candidates as int32 tensors of fixed size, so that a message is one transfer.

Prompts of admitted requests vary in length: when there are any, a second tensor follows. Times and
targets of single requests are not sent: policies that read them draft in the target's process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from codesign.engine.draft_worker import DraftTimes
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestCandidates,
    RequestVerdict,
    Verdict,
)

Words = NDArray[np.int32]
_TIMES = struct.Struct("<4d2q")
_TIME_WORDS = _TIMES.size // 4


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
        return 5 + self.max_batch * (2 * 4 + self.max_rows + 1 + 3)

    @property
    def candidate_words(self) -> int:
        """int32 words of candidates with their times."""
        return 2 + _TIME_WORDS + self.max_batch * (3 + 2 * self.max_rows)


def encode_verdict(verdict: Verdict, limits: WireLimits) -> tuple[Words, Words]:
    """The message and the prompts that follow it (empty when none were admitted)."""
    prompts = [token for a in verdict.admitted for token in a.tokens]
    words = [
        verdict.round,
        len(verdict.requests),
        len(verdict.admitted),
        len(prompts),
        int(verdict.is_last),
    ]
    for entry in verdict.requests:
        words += [entry.request_id, entry.base_len, len(entry.tokens), int(entry.is_finished)]
        words += entry.tokens
    for admission in verdict.admitted:
        words += [admission.request_id, admission.max_new_tokens, len(admission.tokens)]
    return _padded(words, limits.verdict_words), np.array(prompts, np.int32)


def prompt_words(message: Words) -> int:
    """Words of the second tensor that follows a verdict."""
    return int(message[3])


def decode_verdict(message: Words, prompts: Words) -> Verdict:
    """Inverse of ``encode_verdict``."""
    words = iter(message.tolist())
    round_number, num_requests, num_admitted, _, is_last = _take(words, 5)
    requests = []
    for _ in range(num_requests):
        request_id, base_len, num_tokens, is_finished = _take(words, 4)
        tokens = tuple(_take(words, num_tokens))
        requests.append(RequestVerdict(request_id, base_len, tokens, bool(is_finished)))
    tokens_left = iter(prompts.tolist())
    admitted = []
    for _ in range(num_admitted):
        request_id, max_new_tokens, num_tokens = _take(words, 3)
        prompt = tuple(_take(tokens_left, num_tokens))
        admitted.append(Admission(request_id, prompt, max_new_tokens))
    return Verdict(round_number, tuple(requests), tuple(admitted), is_last=bool(is_last))


def encode_candidates(candidates: Candidates, times: DraftTimes, limits: WireLimits) -> Words:
    """One message."""
    words = [candidates.round, len(candidates.requests)]
    words += np.frombuffer(_TIMES.pack(*astuple(times)), np.int32).tolist()
    for entry in candidates.requests:
        words += [entry.request_id, entry.base_len, len(entry.tokens)]
        words += entry.tokens
        words += entry.parents
    return _padded(words, limits.candidate_words)


def decode_candidates(message: Words) -> tuple[Candidates, DraftTimes]:
    """Inverse of ``encode_candidates``."""
    times = DraftTimes(*_TIMES.unpack(message[2 : 2 + _TIME_WORDS].tobytes()))
    words = iter(message.tolist())
    round_number, num_requests = _take(words, 2)
    _take(words, _TIME_WORDS)
    entries = []
    for _ in range(num_requests):
        request_id, base_len, num_rows = _take(words, 3)
        tokens = tuple(_take(words, num_rows))
        parents = tuple(_take(words, num_rows))
        entries.append(RequestCandidates(request_id, base_len, tokens, parents))
    return Candidates(round_number, tuple(entries)), times


def _take(words: Iterator[int], count: int) -> list[int]:
    return [next(words) for _ in range(count)]


def _padded(words: list[int], size: int) -> Words:
    assert len(words) <= size, f"message of {len(words)} words, limit {size}"
    message = np.zeros(size, np.int32)
    message[: len(words)] = words
    return message
