# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernels of ``head_codes``: round rows, multiply codes, score, multiply what is open."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.head_codes import GROUP, GROWTH, ROW_CODES, HeadCodes
from codesign.kernels.keyed_noise_triton import exact_score, rough_score, row_key
from codesign.kernels.keyed_sampling_triton import best_of_blocks, number_of, numbers_of
from codesign.kernels.row_samplings import AnySampling, RowSamplings, is_greedy

MULTIPLIED = 128  # tokens of a program that multiplies codes
SCORED = 2048  # of one that scores
OPENED = 256  # of one that multiplies open tokens
_ROW_CODES = tl.constexpr(float(ROW_CODES))
_GROWTH = tl.constexpr(GROWTH)


def sample_rows(
    codes: HeadCodes,
    x_TD: Tensor,
    key_low_T: Tensor,
    key_high_T: Tensor,
    positions_T: Tensor,
    sampling: AnySampling,
    *,
    num_tokens: int,
    first_token: int,
) -> tuple[Tensor, Tensor]:
    """``head_codes.sample_rows`` on a GPU."""
    keys = (key_low_T, key_high_T, positions_T)
    assert all(column.is_contiguous() for column in keys), "rows are not side by side"
    rows, tokens, device = len(x_TD), len(codes.head_VD), x_TD.device
    coarse_TV, rows_T3 = coarse_logits(codes, x_TD)
    temperatures = numbers_of(sampling)[0]
    ways = {"SAMPLES": not is_greedy(sampling), "BY_ROW": isinstance(sampling, RowSamplings)}
    blocks = triton.cdiv(tokens, SCORED)
    lower_TB = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    _score_ends[(rows, blocks)](
        coarse_TV, codes.lengths_2V, rows_T3, *keys, lower_TB, tokens, num_tokens,
        first_token, temperatures, **ways, BLOCK=SCORED, num_warps=8,
    )  # fmt: skip
    parts = triton.cdiv(tokens, OPENED)
    scores_TB = torch.empty(rows, parts, dtype=torch.float64, device=device)
    columns_TB = torch.empty(rows, parts, dtype=torch.int32, device=device)
    hidden = x_TD.shape[1]
    _score_open[(rows, parts)](
        coarse_TV, lower_TB, x_TD, codes.head_VD, *keys, scores_TB, columns_TB, tokens,
        num_tokens, hidden, blocks, first_token, temperatures, **ways, BLOCK=OPENED,
        PADDED=triton.next_power_of_2(blocks), COLUMNS=triton.next_power_of_2(hidden),
        num_warps=4,
    )  # fmt: skip
    return best_of_blocks(scores_TB, columns_TB, first_token=first_token)


def coarse_logits(codes: HeadCodes, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """``head_codes.coarse_logits`` of hidden rows, and their lengths, (T, 3) of ``RowCodes``."""
    assert x_TD.is_contiguous(), "columns and rows are not side by side"
    rows, hidden = x_TD.shape
    tokens, device = len(codes.codes_VD), x_TD.device
    padded = max(8, triton.next_power_of_2(rows))
    planes_T2D = torch.empty(padded, 2, hidden, dtype=torch.int8, device=device)
    rows_T3 = torch.empty(padded, 3, dtype=torch.float32, device=device)
    _round_rows[(padded,)](
        x_TD, planes_T2D, rows_T3, rows, hidden, PADDED=triton.next_power_of_2(hidden), num_warps=8
    )
    coarse_TV = torch.empty(rows, tokens, dtype=torch.float32, device=device)
    _multiply_codes[(triton.cdiv(tokens, MULTIPLIED),)](
        codes.codes_VD, codes.scales_UV, planes_T2D, rows_T3, coarse_TV, tokens, rows, hidden,
        ROWS=padded, BLOCK=MULTIPLIED, COLUMNS=GROUP, STAGES=3, num_warps=num_warps(padded),
    )  # fmt: skip
    return coarse_TV, rows_T3


def num_warps(rows: int) -> int:
    """Of a program that multiplies codes; sums of 64 rows do not fit the registers of four."""
    return 8 if rows > 32 else 4


@triton.jit
def _round_rows(x, planes, lengths, num_rows, hidden, PADDED: tl.constexpr) -> None:
    """One hidden row: two planes of codes, its scale and two lengths."""
    row = tl.program_id(0)
    column = tl.arange(0, PADDED)
    is_column = column < hidden
    is_value = column < tl.where(row < num_rows, hidden, 0)
    value = tl.load(x + row * hidden + column, mask=is_value, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    scale = tl.where(largest > 0, largest / _ROW_CODES, 1.0)
    # Rounds to the nearest whole number, as adding and taking away 1.5 * 2**23 does.
    code = (value / scale + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(code, -_ROW_CODES), _ROW_CODES)
    high = tl.floor((code + 128.0) / 256.0)
    low = code - 256.0 * high
    tl.store(planes + row * 2 * hidden + column, high.to(tl.int8), mask=is_column)
    tl.store(planes + (row * 2 + 1) * hidden + column, low.to(tl.int8), mask=is_column)
    lost = value - code * scale
    tl.store(lengths + row * 3, scale)
    tl.store(lengths + row * 3 + 1, tl.sqrt(tl.sum(value * value, 0)) * _GROWTH)
    tl.store(lengths + row * 3 + 2, tl.sqrt(tl.sum(lost * lost, 0)) * _GROWTH)


@triton.jit
def _multiply_codes(
    codes, scales, planes, hidden_rows, coarse, num_tokens, num_rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Coarse logits of a block of tokens, all rows."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    plane = tl.arange(0, 2 * ROWS)
    total = tl.zeros((BLOCK, 2 * ROWS), tl.float32)
    at = tl.minimum(token, num_tokens - 1).to(tl.int64) * hidden
    for first in tl.range(0, hidden, COLUMNS, num_stages=STAGES):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < hidden
        weight = tl.load(codes + at[:, None] + column[None, :], mask=is_column[None, :], other=0)
        x = tl.load(
            planes + plane[None, :] * hidden + column[:, None], mask=is_column[:, None], other=0
        )
        scale = tl.load(scales + first // COLUMNS * num_tokens + token, mask=is_token, other=0.0)
        total += tl.dot(weight, x, out_dtype=tl.int32).to(tl.float32) * scale[:, None]
    # A row's two planes are side by side.
    part = tl.where(plane % 2 == 0, 256.0, 1.0)
    both = tl.sum(tl.reshape(total * part[None, :], (BLOCK, ROWS, 2)), 2)
    row = tl.arange(0, ROWS)
    row_scale = tl.load(hidden_rows + row * 3)
    tl.store(
        coarse + row[None, :].to(tl.int64) * num_tokens + token[:, None],
        both * row_scale[None, :],
        mask=is_token[:, None] & (row[None, :] < num_rows),
    )


@triton.jit
def _score_ends(
    coarse, token_lengths, hidden_rows, key_low, key_high, positions, lower_ends, stride,
    num_tokens, first_token, temperatures, SAMPLES: tl.constexpr, BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row, one block of tokens: the largest lower end; upper ends replace coarse logits."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    place = coarse + row.to(tl.int64) * stride + token
    middle = tl.load(place, mask=is_token, other=0.0)
    lost = tl.load(token_lengths + token, mask=is_token, other=0.0)
    held = tl.load(token_lengths + stride + token, mask=is_token, other=0.0)
    length = tl.load(hidden_rows + row * 3 + 1)
    row_lost = tl.load(hidden_rows + row * 3 + 2)
    bound = lost * length + held * row_lost
    score, error = middle, bound
    if SAMPLES:
        temperature = number_of(temperatures, row, BY_ROW)
        key = row_key(key_low, key_high, positions, row)
        score, error = rough_score(middle, bound, token + first_token, key, temperature)
    lower = tl.where(is_token, score - error, float("-inf"))
    tl.store(lower_ends + row * tl.num_programs(1) + block, tl.max(lower, 0))
    # What is below the range of float32 must not become -inf.
    tl.store(place, tl.maximum(score + error, -3.4e38), mask=is_token)


@triton.jit
def _score_open(
    upper_ends, lower_ends, x, head, key_low, key_high, positions, scores, columns, stride,
    num_tokens, hidden, num_lower, first_token, temperatures, SAMPLES: tl.constexpr,
    BY_ROW: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One row, one block of tokens: the best score of those that may be the row's best."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    upper = tl.load(
        upper_ends + row.to(tl.int64) * stride + token, mask=is_token, other=float("-inf")
    )
    part = tl.arange(0, PADDED)
    lower = tl.load(lower_ends + row * num_lower + part, mask=part < num_lower, other=float("-inf"))
    is_open = is_token & (upper >= tl.max(lower, 0))
    best = tl.full((), float("-inf"), tl.float64)
    best_token = block * BLOCK  # of no open token: one that there is
    left = tl.min(tl.where(is_open, token, num_tokens), 0)
    key = tl.full((), 0, tl.int64)
    temperature = tl.full((), 0.0, tl.float64)
    if SAMPLES:
        key = row_key(key_low, key_high, positions, row)
        temperature = number_of(temperatures, row, BY_ROW)
    column = tl.arange(0, COLUMNS)
    is_column = column < hidden
    while left < num_tokens:
        value = tl.load(x + row * hidden + column, mask=is_column, other=0.0).to(tl.float32)
        weight = tl.load(head + left.to(tl.int64) * hidden + column, mask=is_column, other=0.0)
        logit = tl.sum(weight.to(tl.float32) * value, 0)
        score = exact_score(logit, left + first_token, key, temperature)
        if score > best:
            best = score
            best_token = left
        left = tl.min(tl.where(is_open & (token > left), token, num_tokens), 0)
    at = row * tl.num_programs(1) + block
    tl.store(scores + at, best)
    tl.store(columns + at, best_token)
