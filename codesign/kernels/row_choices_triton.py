# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options beside)
"""Triton kernels of ``row_choices``: the best of every block of columns, then the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns of a program


def row_choices(logits_TV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``row_choices.row_choices`` on a GPU."""
    rows, tokens = logits_TV.shape
    assert logits_TV.stride(1) == 1, "the columns of a row are not side by side"
    assert 0 < count <= tokens, f"{count} choices of {tokens}"
    blocks = -(-tokens // BLOCK)
    kept = 1 << (count - 1).bit_length()
    size = (rows, blocks, kept)
    values_TBK = torch.empty(size, dtype=torch.float32, device=logits_TV.device)
    columns_TBK = torch.empty(size, dtype=torch.int32, device=logits_TV.device)
    sums_TB2 = torch.empty(rows, blocks, 2, dtype=torch.float32, device=logits_TV.device)
    best_TK = torch.empty(rows, count, dtype=torch.float32, device=logits_TV.device)
    place_TK = torch.empty(rows, count, dtype=torch.int64, device=logits_TV.device)
    total_T = torch.empty(rows, dtype=torch.float32, device=logits_TV.device)
    _best_of_block[(rows, blocks)](
        logits_TV,
        values_TBK,
        columns_TBK,
        sums_TB2,
        tokens,
        logits_TV.stride(0),
        COUNT=count,
        KEPT=kept,
        BLOCK=BLOCK,
        num_warps=4,
    )
    _best_of_blocks[(rows,)](
        values_TBK,
        columns_TBK,
        sums_TB2,
        best_TK,
        place_TK,
        total_T,
        blocks,
        COUNT=count,
        KEPT=kept,
        PADDED=1 << (blocks - 1).bit_length(),
        num_warps=4,
    )
    return best_TK, place_TK, total_T


@triton.jit
def _best_of_block(
    logits,
    values,
    columns,
    sums,
    tokens,
    row_stride,
    COUNT: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < tokens
    x = tl.load(logits + row.to(tl.int64) * row_stride + places, mask=inside, other=float("-inf"))
    highest = tl.max(x, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    at = row * tl.num_programs(1) + block
    tl.store(sums + 2 * at, highest)
    tl.store(sums + 2 * at + 1, tl.sum(tl.exp(x - shift), axis=0))
    # Columns already taken are put below all others, also below those of no token.
    order = tl.where(inside, places, 2147483647)
    left = inside
    for i in tl.static_range(KEPT):
        best = tl.max(tl.where(left, x, float("-inf")), axis=0)
        place = tl.min(tl.where(left & (x == best), order, 2147483647), axis=0)
        real = (place < tokens) & (i < COUNT)
        tl.store(values + at * KEPT + i, tl.where(real, best, float("-inf")))
        tl.store(columns + at * KEPT + i, tl.where(real, place, 2147483647))
        left = left & (places != place)


@triton.jit
def _best_of_blocks(
    values,
    columns,
    sums,
    best_values,
    best_columns,
    totals,
    blocks,
    COUNT: tl.constexpr,
    KEPT: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    parts = tl.arange(0, PADDED)
    real = parts < blocks
    highest = tl.load(sums + 2 * (row * blocks + parts), mask=real, other=float("-inf"))
    part = tl.load(sums + 2 * (row * blocks + parts) + 1, mask=real, other=0.0)
    largest = tl.max(highest, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(part * tl.exp(highest - shift), axis=0)
    tl.store(totals + row, shift + tl.log(total))
    entries = tl.arange(0, PADDED * KEPT)
    listed = entries < blocks * KEPT
    x = tl.load(values + row * blocks * KEPT + entries, mask=listed, other=float("-inf"))
    place = tl.load(columns + row * blocks * KEPT + entries, mask=listed, other=2147483647)
    left = place < 2147483647
    for i in tl.static_range(COUNT):
        best = tl.max(tl.where(left, x, float("-inf")), axis=0)
        first = tl.min(tl.where(left & (x == best), place, 2147483647), axis=0)
        tl.store(best_values + row * COUNT + i, best)
        tl.store(best_columns + row * COUNT + i, first.to(tl.int64))
        left = left & (place != first)
