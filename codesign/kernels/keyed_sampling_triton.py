# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernels of ``keyed_sampling``: a row's sample in two launches, a step's walk in one."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.keyed_noise_triton import exact_score, rough_score, row_key
from codesign.kernels.row_samplings import AnySampling, RowSamplings, is_greedy

BLOCK = 2048  # columns of a program


def sample_rows(
    logits_TV: Tensor,
    key_low_T: Tensor,
    key_high_T: Tensor,
    positions_T: Tensor,
    sampling: AnySampling,
    *,
    first_token: int,
) -> tuple[Tensor, Tensor]:
    """``keyed_sampling.sample_rows`` on a GPU."""
    rows, tokens = logits_TV.shape
    assert logits_TV.stride(1) == 1, "the columns of a row are not side by side"
    columns = (key_low_T, key_high_T, positions_T)
    assert all(column.is_contiguous() for column in columns), "rows are not side by side"
    blocks = triton.cdiv(tokens, BLOCK)
    device = logits_TV.device
    scores_TB = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    columns_TB = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    _best_of_block[(rows, blocks)](
        logits_TV,
        key_low_T,
        key_high_T,
        positions_T,
        scores_TB,
        columns_TB,
        tokens,
        logits_TV.stride(0),
        first_token,
        numbers_of(sampling)[0],
        SAMPLES=not is_greedy(sampling),
        BY_ROW=isinstance(sampling, RowSamplings),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return best_of_blocks(scores_TB, columns_TB, first_token=first_token)


def numbers_of(sampling: AnySampling) -> tuple[int, ...] | tuple[Tensor, ...]:
    """Temperature, top-k and top-p for ``number_of``: bits of float64, or one for each row.

    Triton would take a float for a float32.
    """
    if isinstance(sampling, RowSamplings):
        numbers = sampling.temperature_T, sampling.top_k_T, sampling.top_p_T
        assert all(column.is_contiguous() for column in numbers), "rows are not side by side"
        return numbers
    floats = struct.pack("<ddd", sampling.temperature, sampling.top_k, sampling.top_p)
    return struct.unpack("<qqq", floats)


def best_of_blocks(
    scores_TB: Tensor, columns_TB: Tensor, *, first_token: int
) -> tuple[Tensor, Tensor]:
    """Each row's best score and its token, of the best of its blocks; the first of equal ones."""
    rows, blocks = scores_TB.shape
    scores_T = torch.empty(rows, dtype=torch.float64, device=scores_TB.device)
    tokens_T = torch.empty(rows, dtype=torch.int32, device=scores_TB.device)
    _best_of_blocks[(rows,)](
        scores_TB,
        columns_TB,
        scores_T,
        tokens_T,
        blocks,
        first_token,
        PADDED=triton.next_power_of_2(blocks),
        num_warps=1,
    )
    return scores_T, tokens_T


@triton.jit
def number_of(numbers, row, BY_ROW: tl.constexpr):
    """A row's number in one of ``numbers_of``."""
    return tl.load(numbers + row) if BY_ROW else numbers.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def best_of_open(logits, logit, column, is_allowed, end, first_token, key, temperature, none):
    """The best score of a block's tokens, float64, and the first column that has it.

    Only tokens whose rough score reaches the best rough one are looked at more closely. Without
    any of a finite logit: -inf, and ``none``.

    Args:
        logits: Of the row; ``logit`` are those of its columns.
        logit: float32.
        column: In order.
        is_allowed: Which columns take part.
        end: Above all columns.
        first_token: That of column 0.
        key: Of the row.
        temperature: Of the row.
        none: A column.
    """
    rough, error = rough_score(logit, tl.zeros_like(logit), column + first_token, key, temperature)
    is_allowed = is_allowed & (logit > float("-inf"))
    least = tl.max(tl.where(is_allowed, rough - error, float("-inf")), 0)
    is_open = is_allowed & (rough + error >= least)
    best = tl.full((), float("-inf"), tl.float64)
    place = none
    left = tl.min(tl.where(is_open, column, end), 0)
    if temperature == 0:  # the first of equal ones, however many
        is_open = is_open & (column == left)
    while left < end:
        score = exact_score(tl.load(logits + left), left + first_token, key, temperature)
        if score > best:
            best = score
            place = left
        left = tl.min(tl.where(is_open & (column > left), column, end), 0)
    return best, place


@triton.jit
def best_part(scores, columns, blocks, PADDED: tl.constexpr):
    """A row's best score and its column, of the best of its blocks; the first of equal ones."""
    block = tl.arange(0, PADDED)
    is_block = block < blocks
    score = tl.load(scores + block, mask=is_block, other=float("-inf"))
    best = tl.max(score, 0)
    first = tl.min(tl.where(is_block & (score == best), block, blocks - 1), 0)
    return best, tl.load(columns + first)


@triton.jit
def _best_of_block(
    logits,
    key_low,
    key_high,
    positions,
    scores,
    columns,
    num_tokens,
    stride,
    first_token,
    temperatures,
    SAMPLES: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row, one block of columns: the largest score, and the first column that has it."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    is_token = column < num_tokens
    logits += row.to(tl.int64) * stride
    logit = tl.load(logits + column, mask=is_token, other=float("-inf"))
    if SAMPLES:
        temperature = number_of(temperatures, row, BY_ROW)
        key = row_key(key_low, key_high, positions, row)
        best, place = best_of_open(
            logits, logit, column, is_token, num_tokens, first_token, key, temperature,
            block * BLOCK,
        )  # fmt: skip
    else:
        best = tl.max(logit, 0)
        place = tl.min(tl.where(logit == best, column, num_tokens), 0)
    at = row * tl.num_programs(1) + block
    tl.store(scores + at, best)
    tl.store(columns + at, place)


@triton.jit
def _best_of_blocks(
    scores, columns, best_scores, best_tokens, blocks, first_token, PADDED: tl.constexpr
) -> None:
    """One row: the best of its blocks, the first of equal ones."""
    row = tl.program_id(0)
    at = row * blocks
    best, column = best_part(scores + at, columns + at, blocks, PADDED)
    tl.store(best_scores + row, best)
    tl.store(best_tokens + row, column + first_token)


def accepted_moves(columns: Sequence[Tensor], path_TP: Tensor, scratch_slot: int) -> Tensor:
    """``keyed_sampling.accepted_moves`` on a GPU, its columns of rows in that order."""
    rows, longest = path_TP.shape
    moves_T3 = torch.empty(rows, 3, dtype=torch.int32, device=path_TP.device)
    _accepted_move[(rows,)](
        *columns,
        path_TP,
        moves_T3,
        longest,
        scratch_slot,
        PADDED=triton.next_power_of_2(longest),
        num_warps=1,
    )
    return moves_T3


@triton.jit
def _accepted_move(
    tokens,
    sampled,
    positions,
    prefixes,
    slots,
    places,
    parents,
    firsts,
    paths,
    moves,
    longest,
    scratch_slot,
    PADDED: tl.constexpr,
) -> None:
    """One row: every row of its path must be what its parent's sample says."""
    row = tl.program_id(0)
    step = tl.arange(0, PADDED)
    position = tl.load(positions + row)
    in_path = (step <= position - tl.load(prefixes + row)) & (step < longest)
    way = tl.load(firsts + row) + tl.load(paths + row * longest + step, mask=in_path, other=0)
    parent = tl.load(parents + way, mask=in_path, other=-1)
    has_parent = in_path & (parent >= 0)
    wanted = tl.load(sampled + parent, mask=has_parent, other=0)
    token = tl.load(tokens + way, mask=has_parent, other=0)
    wrong = tl.sum((has_parent & (wanted != token)).to(tl.int32), 0)
    is_accepted = wrong == 0
    tl.store(moves + row * 3, tl.where(is_accepted, tl.load(slots + row), scratch_slot))
    tl.store(moves + row * 3 + 1, tl.where(is_accepted, tl.load(places + row), 0))
    tl.store(moves + row * 3 + 2, tl.where(is_accepted, position, 0))
