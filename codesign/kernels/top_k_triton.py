# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernels that find each row's k-th largest logit by counting, eight bits a launch.

Counts are integers: the order in which blocks add theirs does not matter.

Letters in shapes: T rows, V tokens, D digits of eight bits, N bins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.keyed_sampling_triton import BLOCK, number_of

_DIGITS = 4
_BINS = tl.constexpr(256)


def count_digits(
    logits_TV: Tensor, temperatures: Tensor | int, top_ks: Tensor | int
) -> tuple[Tensor, Tensor]:
    """What ``least_kept`` reads: the last digit's bins, and what is known of the others.

    Args:
        logits_TV: float32.
        temperatures: From ``numbers_of``, as is ``top_ks``.
        top_ks: See there.
    """
    (rows, tokens), device = logits_TV.shape, logits_TV.device
    bins_DTN = torch.zeros(_DIGITS, rows, 256, dtype=torch.int32, device=device)
    states_DT2 = torch.empty(_DIGITS, rows, 2, dtype=torch.int32, device=device)
    for digit in range(_DIGITS):
        _count_digit[(rows, triton.cdiv(tokens, BLOCK))](
            logits_TV, temperatures, top_ks, bins_DTN, states_DT2, tokens, logits_TV.stride(0),
            rows, DIGIT=digit, BY_ROW=isinstance(top_ks, Tensor), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return bins_DTN, states_DT2


@triton.jit
def _ordered(logit):
    """int32 in the order of float32 numbers; zeros of both signs are neighbours."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def num_kept(temperatures, top_ks, row, num_tokens, BY_ROW: tl.constexpr):
    """A row's top-k, or 0 if it keeps all."""
    count = number_of(top_ks, row, BY_ROW)
    is_cut = (number_of(temperatures, row, BY_ROW) > 0) & (count < num_tokens)
    return tl.where(is_cut, count, 0.0).to(tl.int32)


@triton.jit
def _digits_before(bins, states, row, num_rows, count, DIGIT: tl.constexpr):
    """First digits of the k-th largest, and which one it is of tokens that begin alike."""
    prefix = tl.full((), 0, tl.int32)
    left = count
    if DIGIT > 0:
        if DIGIT > 1:
            state = states + ((DIGIT - 1) * num_rows + row) * 2
            prefix = tl.load(state)
            left = tl.load(state + 1)
        place = tl.arange(0, _BINS)
        number = tl.load(bins + ((DIGIT - 1) * num_rows + row) * _BINS + place)
        so_far = tl.cumsum(number, 0, reverse=True)
        digit = tl.max(tl.where(so_far >= left, place, 0), 0)
        left -= tl.sum(tl.where(place > digit, number, 0), 0)
        prefix = prefix * _BINS + digit
        if DIGIT == 1:  # the first is signed
            prefix -= 128
    return prefix, left


@triton.jit
def _count_digit(
    logits, temperatures, top_ks, bins, states, num_tokens, stride, num_rows,
    DIGIT: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row, one block: count the next eight bits of logits that begin as the k-th largest."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    count = num_kept(temperatures, top_ks, row, num_tokens, BY_ROW)
    if count > 0:
        prefix, left = _digits_before(bins, states, row, num_rows, count, DIGIT)
        if (DIGIT > 0) & (block == 0):
            state = states + (DIGIT * num_rows + row) * 2
            tl.store(state, prefix)
            tl.store(state + 1, left)
        column = block * BLOCK + tl.arange(0, BLOCK)
        is_counted = column < num_tokens
        logit = tl.load(logits + row.to(tl.int64) * stride + column, mask=is_counted, other=0.0)
        digits = _ordered(logit) >> (24 - 8 * DIGIT)
        if DIGIT == 0:
            digit = digits + 128
        else:
            digit = digits & 255
            is_counted = is_counted & ((digits >> 8) == prefix)
        if tl.max(is_counted.to(tl.int32), 0) > 0:
            number = tl.histogram(digit, _BINS, mask=is_counted)
            place = (DIGIT * num_rows + row) * _BINS + tl.arange(0, _BINS)
            tl.atomic_add(bins + place, number, mask=number > 0, sem="relaxed")


@triton.jit
def least_kept(bins, states, row, num_rows, count):
    """A row's k-th largest logit, k being ``num_kept``; -inf if that is 0."""
    least = tl.full((), float("-inf"), tl.float32)
    if count > 0:
        key, _ = _digits_before(bins, states, row, num_rows, count, 4)
        least = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    return least
