# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernels of ``row_choices``: the best of every block of columns, then the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.row_choices import Lists

BLOCK = 2048  # columns of a program


def row_choices(logits_TV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``row_choices.row_choices`` on a GPU."""
    return best_of_lists(_lists_of(logits_TV, count), count)


def choice_words(
    logits_TV: Tensor, count: int, token_map: Tensor | None, into: Tensor | None = None
) -> Tensor:
    """``row_choices.choice_words`` on a GPU."""
    return words_of_lists(_lists_of(logits_TV, count), count, token_map, into)


def best_of_lists(lists: Lists, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, columns and log-sum-exp of whole rows from those of their parts."""
    rows, device = lists.values_TBK.shape[0], lists.values_TBK.device
    best_TK = torch.empty(rows, count, dtype=torch.float32, device=device)
    place_TK = torch.empty(rows, count, dtype=torch.int64, device=device)
    total_T = torch.empty(rows, dtype=torch.float32, device=device)
    _launch_best(lists, count, (best_TK, place_TK, total_T), None, in_words=False)
    return best_TK, place_TK, total_T


def words_of_lists(
    lists: Lists, count: int, token_map: Tensor | None, into: Tensor | None = None
) -> Tensor:
    """The words of ``row_choices.choice_words`` from the best of parts."""
    rows, device = lists.values_TBK.shape[0], lists.values_TBK.device
    words = into
    if words is None:
        words = torch.empty(2 * rows * count, dtype=torch.int32, device=device)
    tokens, bits = words.chunk(2)
    _launch_best(lists, count, (bits.view(torch.float32), tokens, bits), token_map, in_words=True)
    return words


def _lists_of(logits_TV: Tensor, count: int) -> Lists:
    rows, tokens = logits_TV.shape
    assert logits_TV.stride(1) == 1, "the columns of a row are not side by side"
    assert 0 < count <= tokens, f"{count} choices of {tokens}"
    blocks = -(-tokens // BLOCK)
    lists = Lists.empty(rows, blocks, count, logits_TV.device)
    _best_of_block[(rows, blocks)](
        logits_TV,
        lists.values_TBK,
        lists.columns_TBK,
        lists.sums_TB2,
        tokens,
        logits_TV.stride(0),
        COUNT=count,
        KEPT=lists.values_TBK.shape[2],
        BLOCK=BLOCK,
        num_warps=4,
    )
    return lists


def _launch_best(
    lists: Lists,
    count: int,
    out: tuple[Tensor, Tensor, Tensor],
    token_map: Tensor | None,
    *,
    in_words: bool,
) -> None:
    rows, parts, kept = lists.values_TBK.shape
    _best_of_blocks[(rows,)](
        lists.values_TBK,
        lists.columns_TBK,
        lists.sums_TB2,
        *out,
        out[1] if token_map is None else token_map,
        parts,
        COUNT=count,
        KEPT=kept,
        PADDED=1 << (parts - 1).bit_length(),
        IN_WORDS=in_words,
        MAPS=token_map is not None,
        num_warps=4 if parts <= 64 else 8,
    )


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
    token_map,
    blocks,
    COUNT: tl.constexpr,
    KEPT: tl.constexpr,
    PADDED: tl.constexpr,
    IN_WORDS: tl.constexpr,
    MAPS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    parts = tl.arange(0, PADDED)
    real = parts < blocks
    highest = tl.load(sums + 2 * (row * blocks + parts), mask=real, other=float("-inf"))
    part = tl.load(sums + 2 * (row * blocks + parts) + 1, mask=real, other=0.0)
    largest = tl.max(highest, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = shift + tl.log(tl.sum(part * tl.exp(highest - shift), axis=0))
    if not IN_WORDS:
        tl.store(totals + row, total)
    entries = tl.arange(0, PADDED * KEPT)
    listed = entries < blocks * KEPT
    x = tl.load(values + row * blocks * KEPT + entries, mask=listed, other=float("-inf"))
    place = tl.load(columns + row * blocks * KEPT + entries, mask=listed, other=2147483647)
    left = place < 2147483647
    for i in tl.static_range(COUNT):
        best = tl.max(tl.where(left, x, float("-inf")), axis=0)
        first = tl.min(tl.where(left & (x == best), place, 2147483647), axis=0)
        token = first.to(tl.int64)
        if MAPS:
            token = tl.load(token_map + token)
        if IN_WORDS:
            best = best - total
        tl.store(best_values + row * COUNT + i, best)
        tl.store(best_columns + row * COUNT + i, token.to(best_columns.dtype.element_ty))
        left = left & (place != first)
