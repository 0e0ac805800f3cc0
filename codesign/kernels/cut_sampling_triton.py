# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN202 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernels that sample rows with a top-k or top-p, of whole logits, without sorting them.

Top-k: what is as large as the k-th largest (top_k_triton.py). Top-p: a candidate is the best
score, and kept if the mass of tokens ahead of it, likelier ones, is small enough. What is behind a
dropped candidate is dropped, too, so the next one is the best score ahead of it. ``ROUNDS``
candidates are looked at by all of the GPU, later ones by one program a row.

Masses are whole numbers, so that a sum is the same in every order and a row's token depends on
nothing but the row.

Letters in shapes: T rows, V tokens, B blocks of them, R rounds and one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.cut_sampling import MOST_TOKENS
from codesign.kernels.keyed_noise_triton import row_key
from codesign.kernels.keyed_sampling_triton import (
    BLOCK,
    best_of_blocks,
    best_of_open,
    best_part,
    number_of,
    numbers_of,
)
from codesign.kernels.row_samplings import AnySampling, RowSamplings, has_top_k, has_top_p
from codesign.kernels.top_k_triton import count_digits, least_kept, num_kept

ROUNDS = 2
SETTLED = 4096  # columns at once of a program that has a row to itself
_UNIT = tl.constexpr(float(1 << 44))  # mass of a row's likeliest token


def sample_rows(
    logits_TV: Tensor,
    key_low_T: Tensor,
    key_high_T: Tensor,
    positions_T: Tensor,
    sampling: AnySampling,
    *,
    first_token: int = 0,
) -> tuple[Tensor, Tensor]:
    """``keyed_sampling.sample_rows`` of all tokens, with cuts, on a GPU."""
    (rows, tokens), device = logits_TV.shape, logits_TV.device
    assert first_token == 0, "cuts need whole rows"
    assert tokens <= MOST_TOKENS, f"{tokens} tokens: masses add up to more than 62 bits"
    assert logits_TV.stride(1) == 1, "the columns of a row are not side by side"
    keys = key_low_T, key_high_T, positions_T
    assert all(column.is_contiguous() for column in keys), "rows are not side by side"
    temperatures, top_ks, top_ps = numbers_of(sampling)
    by_row = isinstance(sampling, RowSamplings)
    blocks = triton.cdiv(tokens, BLOCK)
    padded = triton.next_power_of_2(blocks)
    sizes, grid = (tokens, logits_TV.stride(0), rows), (rows, blocks)
    floors_T = torch.empty(rows, dtype=torch.float32, device=device)
    counted = floors_T, floors_T  # nobody reads them
    if has_top_k(sampling):
        counted = count_digits(logits_TV, temperatures, top_ks)
    highest_TB = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    scores_RTB = torch.empty(ROUNDS + 1, rows, blocks, dtype=torch.float64, device=device)
    columns_RTB = torch.empty(ROUNDS + 1, rows, blocks, dtype=torch.int32, device=device)
    _first_candidates[grid](
        logits_TV, *keys, temperatures, top_ks, *counted, floors_T, highest_TB,
        scores_RTB, columns_RTB, *sizes,
        HAS_TOP_K=has_top_k(sampling), BY_ROW=by_row, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    if not has_top_p(sampling):
        return best_of_blocks(scores_RTB[0], columns_RTB[0], first_token=0)
    masses_RTB = torch.empty(ROUNDS + 1, rows, blocks, dtype=torch.int64, device=device)
    found = floors_T, highest_TB, scores_RTB, columns_RTB, masses_RTB
    given = logits_TV, *keys, temperatures, top_ps, *found
    parts = min(max(rows // 4, 1), 4)
    programs = triton.cdiv(blocks, parts)
    for i in range(1, ROUNDS + 1):
        _look_ahead[(rows, programs)](
            *given, *sizes, blocks,
            ROUND=i, BY_ROW=by_row, PARTS=parts, BLOCK=BLOCK, PADDED=padded, num_warps=8,
        )  # fmt: skip
    best_T = torch.empty(rows, dtype=torch.float64, device=device)
    tokens_T = torch.empty(rows, dtype=torch.int32, device=device)
    _settle[(rows,)](
        *given, best_T, tokens_T, *sizes, blocks, programs,
        ROUND=ROUNDS + 1, BY_ROW=by_row, BLOCK=SETTLED, PADDED=padded, num_warps=16,
    )  # fmt: skip
    return best_T, tokens_T


@triton.jit
def _first_candidates(
    logits, key_low, key_high, positions, temperatures, top_ks, bins, states, floors, highest,
    scores, columns, num_tokens, stride, num_rows,
    HAS_TOP_K: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row, one block: the largest logit, and the best score of top-k's tokens."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    floor = tl.full((), float("-inf"), tl.float32)
    if HAS_TOP_K:
        count = num_kept(temperatures, top_ks, row, num_tokens, BY_ROW)
        floor = least_kept(bins, states, row, num_rows, count)
    if block == 0:
        tl.store(floors + row, floor)
    column = block * BLOCK + tl.arange(0, BLOCK)
    is_token = column < num_tokens
    logits += row.to(tl.int64) * stride
    logit = tl.load(logits + column, mask=is_token, other=float("-inf"))
    is_kept = is_token & (logit >= floor)
    best = tl.full((), float("-inf"), tl.float64)
    place = block * BLOCK
    if tl.max(is_kept.to(tl.int32), 0) > 0:
        key = row_key(key_low, key_high, positions, row)
        best, place = best_of_open(
            logits, logit, column, is_kept, num_tokens, 0, key,
            number_of(temperatures, row, BY_ROW), place,
        )  # fmt: skip
    at = row * tl.num_programs(1) + block
    tl.store(highest + at, tl.max(logit, 0))
    tl.store(scores + at, best)
    tl.store(columns + at, place)


@triton.jit
def _sum_of(masses, number, PADDED: tl.constexpr):
    place = tl.arange(0, PADDED)
    return tl.sum(tl.load(masses + place, mask=place < number, other=0), 0)


@triton.jit
def _candidate(
    scores, columns, masses, share, temperature, row, num_rows, blocks, programs,
    ROUND: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Score and column of a round's candidate, whether it is open, and the mass that drops it.

    Where it is not open, its row's token is it. What rounds then left in memory counts nothing.
    """
    score, column = best_part(scores + row * blocks, columns + row * blocks, blocks, PADDED)
    is_open = (temperature > 0) & (share < 1.0)
    limit = tl.full((), 0.0, tl.float64)
    if ROUND > 1:
        limit = share * _sum_of(masses + row * blocks, programs, PADDED).to(tl.float64)
    for i in tl.static_range(1, ROUND):
        at = (i * num_rows + row) * blocks
        ahead = _sum_of(masses + at, programs, PADDED)
        is_open = is_open & (ahead.to(tl.float64) >= limit)
        next_score, next_column = best_part(scores + at, columns + at, programs, PADDED)
        score = tl.where(is_open, next_score, score)
        column = tl.where(is_open, next_column, column)
    return score, column, is_open, limit


@triton.jit
def _largest(highest, blocks, PADDED: tl.constexpr):
    block = tl.arange(0, PADDED)
    return tl.max(tl.load(highest + block, mask=block < blocks, other=float("-inf")), 0)


@triton.jit
def _mass(logit, is_counted, largest, temperature):
    """Mass of tokens, of which the likeliest has one unit."""
    below = (logit.to(tl.float64) - largest.to(tl.float64)) / temperature
    mass = (tl.exp(below) * _UNIT + 0.5).to(tl.int64)
    return tl.sum(tl.where(is_counted, mass, 0), 0)


@triton.jit
def _ahead(
    logits, first, end, num_tokens, floor, candidate, largest, temperature, key,
    COUNTS_ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of a row from first to end: their mass, and of those ahead of the candidate.

    And the best score of these with its first column, or the candidate's.
    """
    candidate_logit = tl.load(logits + candidate)
    total = tl.full((), 0, tl.int64)
    mass = tl.full((), 0, tl.int64)
    best = tl.full((), float("-inf"), tl.float64)
    place = candidate
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_token = column < num_tokens
        logit = tl.load(logits + column, mask=is_token, other=float("-inf"))
        is_kept = is_token & (logit >= floor)
        if COUNTS_ALL:
            total += _mass(logit, is_kept, largest, temperature)
        is_before = (logit == candidate_logit) & (column < candidate)
        is_ahead = is_kept & ((logit > candidate_logit) | is_before)
        if tl.max(is_ahead.to(tl.int32), 0) > 0:
            mass += _mass(logit, is_ahead, largest, temperature)
            block_best, first_best = best_of_open(
                logits, logit, column, is_ahead, num_tokens, 0, key, temperature, candidate
            )
            if block_best > best:
                best = block_best
                place = first_best
    return total, mass, best, place


@triton.jit
def _look_ahead(
    logits, key_low, key_high, positions, temperatures, top_ps, floors, highest, scores, columns,
    masses, num_tokens, stride, num_rows, blocks,
    ROUND: tl.constexpr, BY_ROW: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """One row, some blocks: what lies ahead of the round's candidate; at first all mass as well."""
    row = tl.program_id(0)
    temperature = number_of(temperatures, row, BY_ROW)
    share = number_of(top_ps, row, BY_ROW)
    _, candidate, is_open, _ = _candidate(
        scores, columns, masses, share, temperature, row, num_rows, blocks, tl.num_programs(1),
        ROUND, PADDED,
    )  # fmt: skip
    if is_open:
        first = tl.program_id(1) * PARTS * BLOCK
        end = tl.minimum(first + PARTS * BLOCK, num_tokens)
        largest = _largest(highest + row * blocks, blocks, PADDED)
        key = row_key(key_low, key_high, positions, row)
        total, mass, best, place = _ahead(
            logits + row.to(tl.int64) * stride, first, end, num_tokens, tl.load(floors + row),
            candidate, largest, temperature, key, ROUND == 1, BLOCK,
        )  # fmt: skip
        at = row * blocks + tl.program_id(1)
        if ROUND == 1:
            tl.store(masses + at, total)
        at += ROUND * num_rows * blocks
        tl.store(masses + at, mass)
        tl.store(scores + at, best)
        tl.store(columns + at, place)


@triton.jit
def _settle(
    logits, key_low, key_high, positions, temperatures, top_ps, floors, highest, scores, columns,
    masses, best_scores, best_tokens, num_tokens, stride, num_rows, blocks, programs,
    ROUND: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """One row: its token; while the candidate is open, the whole row is looked at for the next."""
    row = tl.program_id(0)
    temperature = number_of(temperatures, row, BY_ROW)
    share = number_of(top_ps, row, BY_ROW)
    score, candidate, is_open, limit = _candidate(
        scores, columns, masses, share, temperature, row, num_rows, blocks, programs, ROUND, PADDED
    )
    largest = _largest(highest + row * blocks, blocks, PADDED)
    floor = tl.load(floors + row)
    key = row_key(key_low, key_high, positions, row)
    while is_open:
        _, mass, best, place = _ahead(
            logits + row.to(tl.int64) * stride, 0, num_tokens, num_tokens, floor, candidate,
            largest, temperature, key, False, BLOCK,
        )  # fmt: skip
        # Ahead of a row's likeliest token there is none, so this ends, whatever the numbers.
        is_open = (place != candidate) & (mass.to(tl.float64) >= limit)
        score = tl.where(is_open, best, score)
        candidate = tl.where(is_open, place, candidate)
    tl.store(best_scores + row, score)
    tl.store(best_tokens + row, candidate)
