# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202 (Triton compiles by parameter annotations, and takes launch options)
"""Keyed noise and scores in Triton: exact ones in float64, and float32 bounds of them.

A GPU takes 64-bit logarithms slowly, and all but a few tokens need none: ``rough_score`` tells in
float32, to within a bound, what a token's score is, and whoever cannot be the best is left out.
Scores of different rows are not comparable there, as each row's have a factor of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_LAST_BITS = tl.constexpr((1 << 52) - 1)
_RARE = tl.constexpr(1 << 48)  # of 2**52: a sixteenth
# Noise lies between -3.7 and 36.8. A logarithm of float32 near 1 is off by up to 1.2e-7, relative
# to that of 15/16 1.8e-6, others by 1.6e-7 of themselves.
NOISE_ERROR = 4e-5
_NOISE_ERROR = tl.constexpr(NOISE_ERROR)
_ROUNDING = tl.constexpr(1e-6)  # of a logit and its bound: eight roundings


@triton.jit
def _shifted(x, bits: tl.constexpr):
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _mix64(x):
    """Finaliser of SplitMix64 on int64."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


@triton.jit
def row_key(key_low, key_high, positions, row):
    """``keyed_sampling.row_keys`` of one row."""
    low = tl.load(key_low + row).to(tl.int64) & 0xFFFFFFFF
    request = (tl.load(key_high + row).to(tl.int64) << 32) | low
    after = tl.load(positions + row).to(tl.int64) + 1
    return _mix64(request ^ (after * _GOLDEN))


@triton.jit
def _uniform_bits(token, key):
    """52 bits b; a token's uniform number is (b + 0.5) / 2**52."""
    return _shifted(_mix64((token + 1).to(tl.int64) * _GOLDEN + key), 12)


@triton.jit
def noise_of(token, key):
    """``keyed_sampling.gumbel_rows`` of tokens of a row with this key."""
    uniform = (_uniform_bits(token, key).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def rough_noise(token, key):
    """``noise_of`` in float32, to within ``NOISE_ERROR``.

    -log(u) of u close to 1 is a series in 1 - u, which float32 holds to all of its digits.
    """
    bits = _uniform_bits(token, key)
    complement = _LAST_BITS - bits
    is_rare = complement < _RARE
    number = tl.where(is_rare, complement, bits).to(tl.float32) * 2.220446049250313e-16
    number += 1.1102230246251565e-16
    series = 0.25 + number * (0.2 + number * 0.16666667)
    series = 1.0 + number * (0.5 + number * (0.33333334 + number * series))
    return -tl.log(tl.where(is_rare, number * series, -tl.log(number)))


@triton.jit
def scaled(logit, temperature):
    """Logits in float64 divided by the temperature; as they are at temperature 0."""
    return logit.to(tl.float64) / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def exact_score(logit, token, key, temperature):
    """Of one token: its logit over the temperature and its noise; the logit at temperature 0."""
    return scaled(logit, temperature) + tl.where(temperature > 0, noise_of(token, key), 0.0)


@triton.jit
def rough_score(logit, bound, token, key, temperature):
    """float32: a row's factor times the tokens' scores, and how far they may be from that.

    The factor, the temperature up to 1 and 1 above, leaves no number too large, however small or
    large the temperature.

    Args:
        logit: float32.
        bound: How far it may be from the token's logit.
        token: Of the whole vocabulary.
        key: Of the row.
        temperature: float64; at 0 the score is the logit, and its bound enough.
    """
    share = (1.0 / tl.maximum(temperature, 1.0)).to(tl.float32)
    score = logit * share
    error = bound * share
    if temperature > 0:
        weight = tl.minimum(temperature, 1.0).to(tl.float32)
        # A logit may be infinite; numbers below 1e-38 may be lost.
        error += (tl.minimum(tl.abs(score), 1e38) + bound) * _ROUNDING + 1e-36
        error += weight * _NOISE_ERROR
        score += rough_noise(token, key) * weight
    return score, error
