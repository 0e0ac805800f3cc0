"""Verification by walking, with keyed noise.

The target model alone decides tokens: sample it at the root, follow the child that carries the
sampled token, stop where none does. The emitted tokens follow the target's law for every candidate
tree that does not look at this round's noise, so pruning, timing and SLO control cannot bias them.

Keyed noise: a sample is argmax(logits / T + Gumbel noise), and the noise depends on (seed, request,
position, token) alone. Speculative output therefore equals plain decoding token for token at any
temperature, and losslessness is an equality test.

NumPy only; must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codesign.errors import InputError
from codesign.policy.light import light

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target turns logits into a token.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose chance reaches this; 1 keeps all.
        seed: Key of the noise, with the request's number and the token's position.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise InputError(f"temperature must be 0 or above, got {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top_k must be 0 (all tokens) or above, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p must be in (0, 1], got {self.top_p}")


@light
class Walk:
    """The target's answer for one request.

    Attributes:
        tokens: Emitted tokens; the last one is the bonus token and has no target KV yet.
        accepted: Candidate rows on the accepted path, root first; as many as ``tokens``.
        is_stopped: A stop token or the limit ended the request.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    is_stopped: bool


def _mix64(x: int) -> int:
    """Finaliser of SplitMix64 on a Python integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def request_key(seed: int, request_id: int) -> int:
    """64-bit key of all noise of one request."""
    key = _mix64((seed + _GOLDEN) & _MASK)
    return _mix64((key ^ (request_id + _GOLDEN)) & _MASK)


def noise_key(seed: int, request_id: int, position: int) -> int:
    """64-bit key of the noise row for one position of one request."""
    return _mix64((request_key(seed, request_id) ^ (position * _GOLDEN)) & _MASK)


def gumbel_row(key: int, size: int) -> NDArray[np.float64]:
    """(size,) Gumbel noise, entry by entry a function of ``key`` and the token id.

    A counter-based hash rather than a stateful generator, so that a GPU kernel can compute the same
    entries in any order.

    Source:
        SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    uniform = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def shape_logits(logits: NDArray[np.floating], sampling: Sampling) -> NDArray[np.float64]:
    """Logits divided by the temperature, with tokens outside top-k and top-p at minus infinity.

    The one place where sampling parameters change the law, for plain decoding and verification
    alike.

    Args:
        logits: (V,) of one position.
        sampling: With ``temperature > 0``.
    """
    scaled = np.asarray(logits, dtype=np.float64) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        kth = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    if sampling.top_p < 1.0:
        order = np.argsort(-scaled, kind="stable")
        probs = np.exp(scaled[order] - scaled[order[0]])
        before = np.cumsum(probs) - probs  # chance of all likelier tokens
        scaled[order[before >= sampling.top_p * probs.sum()]] = -np.inf
    return scaled


def sample_token(
    logits: NDArray[np.floating], sampling: Sampling, *, request_id: int, position: int
) -> int:
    """Token that the target emits at ``position``, given its (V,) logits there.

    Args:
        logits: (V,), of the row before ``position``.
        sampling: Temperature 0 is argmax and uses no noise.
        request_id: Part of the noise key.
        position: Absolute position of the emitted token, part of the noise key.
    """
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    noise = gumbel_row(noise_key(sampling.seed, request_id, position), len(logits))
    return int(np.argmax(shape_logits(logits, sampling) + noise))


def walk(
    tokens: Sequence[int],
    parents: Sequence[int],
    sample: Callable[[int], int],
    *,
    stop_tokens: Collection[int] = (),
    limit: int,
) -> Walk:
    """Walk from the root along sampled tokens, as far as candidates match.

    Args:
        tokens: (N,) candidate tokens; row 0 is the root. Siblings are distinct.
        parents: (N,) row of each parent, before its children; -1 for the root.
        sample: Token that the target emits after a row. Called once per visited row, root first.
        stop_tokens: Emitting one of these ends the request.
        limit: Most tokens to emit; at least 1.

    Returns:
        Emitted tokens and the accepted rows. Stop tokens and the limit cut only here.
    """
    children = {(parents[row], tokens[row]): row for row in range(1, len(tokens))}
    row = 0
    emitted: list[int] = []
    accepted: list[int] = []
    while True:
        accepted.append(row)
        token = sample(row)
        emitted.append(token)
        if token in stop_tokens or len(emitted) == limit:
            return Walk(tuple(emitted), tuple(accepted), is_stopped=True)
        child = children.get((row, token))
        if child is None:
            return Walk(tuple(emitted), tuple(accepted), is_stopped=False)
        row = child
