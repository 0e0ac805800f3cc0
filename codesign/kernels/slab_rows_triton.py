# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernels that write rows of keys and values to slabs, and move them there.

See ``row_attention`` for what they do and the letters. Imported where a GPU is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.triton_launch import launch

MOVE_BLOCK = 16  # slab rows that are read before any is written


def page_rows(rows: int, tables_SK: Tensor | None) -> int:
    """Rows of a page; 0 where a slab is one piece."""
    return 0 if tables_SK is None else rows


@triton.jit
def slab_of(tables, slot, row, table_stride, PAGE: tl.constexpr):  # noqa: ANN201 (a pair)
    """Where a slab row lies: index along B, and the row there; int64."""
    if PAGE == 0:
        slab = slot
        place = row
    else:
        slab = tl.load(tables + slot * table_stride + row // PAGE)
        place = row % PAGE
    return slab.to(tl.int64), place.to(tl.int64)


def rotate_and_append(
    qkv_TN: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    keys_BGME: Tensor,
    values_BGME: Tensor,
    slots_T: Tensor,
    kv_rows_T: Tensor,
    *,
    heads: int,
    tables_SK: Tensor | None = None,
) -> Tensor:
    """``row_attention.rotate_and_append`` on a GPU."""
    rows = qkv_TN.shape[0]
    kv_heads, head_dim = keys_BGME.shape[1], keys_BGME.shape[3]
    q_THE = qkv_TN.new_empty(rows, heads, head_dim)
    launch(
        _rotate_and_append,
        (rows, heads + 2 * kv_heads, 1),
        qkv_TN,
        cos_TF,
        sin_TF,
        keys_BGME,
        values_BGME,
        slots_T,
        kv_rows_T,
        slots_T if tables_SK is None else tables_SK,
        q_THE,
        qkv_TN.stride(0),
        keys_BGME.stride(0),
        keys_BGME.stride(1),
        0 if tables_SK is None else tables_SK.stride(0),
        page_rows(keys_BGME.shape[2], tables_SK),
        heads,
        kv_heads,
        head_dim // 2,
        num_warps=1,
    )
    return q_THE


@triton.jit
def _rotate_and_append(
    qkv,
    cos,
    sin,
    keys,
    values,
    slots,
    kv_rows,
    tables,
    q_out,
    qkv_stride,
    slab_stride,
    head_stride,
    table_stride,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """One head of one row: a query, a key or a value."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)
    source = qkv + row * qkv_stride + head * 2 * HALF
    first = tl.load(source + half)
    second = tl.load(source + HALF + half)
    slot, kv_row = tl.load(slots + row), tl.load(kv_rows + row)
    slab, slab_row = slab_of(tables, slot, kv_row, table_stride, PAGE)
    place = slab * slab_stride + slab_row * 2 * HALF
    if head < H + G:
        c = tl.load(cos + row * HALF + half)
        s = tl.load(sin + row * HALF + half)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        first = (a * c - b * s).to(qkv.dtype.element_ty)
        second = (b * c + a * s).to(qkv.dtype.element_ty)
    if head < H:
        target = q_out + (row * H + head) * 2 * HALF
    elif head < H + G:
        target = keys + place + (head - H) * head_stride
    else:
        target = values + place + (head - H - G) * head_stride
    tl.store(target + half, first)
    tl.store(target + HALF + half, second)


def move_rows(
    keys_LBGME: Tensor,
    values_LBGME: Tensor,
    moves_N3: Tensor,
    num_moves_1: Tensor,
    tables_SK: Tensor | None = None,
) -> None:
    """``row_attention.move_rows`` on a GPU."""
    layers, _, groups, _, head_dim = keys_LBGME.shape
    _move_rows[(layers, groups)](
        keys_LBGME,
        values_LBGME,
        moves_N3,
        num_moves_1,
        moves_N3 if tables_SK is None else tables_SK,
        keys_LBGME.stride(0),
        keys_LBGME.stride(1),
        keys_LBGME.stride(2),
        0 if tables_SK is None else tables_SK.stride(0),
        PAGE=page_rows(keys_LBGME.shape[3], tables_SK),
        E=head_dim,
        BLOCK=MOVE_BLOCK,
        num_warps=4,
    )


@triton.jit
def _move_rows(
    keys,
    values,
    moves,
    num_moves,
    tables,
    layer_stride,
    slab_stride,
    head_stride,
    table_stride,
    PAGE: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One layer and key/value head; a block of rows is read whole before it is written."""
    base = tl.program_id(0).to(tl.int64) * layer_stride + tl.program_id(1) * head_stride
    count = tl.load(num_moves)
    columns = tl.arange(0, E)
    for start in range(0, count, BLOCK):
        move = start + tl.arange(0, BLOCK)
        is_move = move < count
        slot = tl.load(moves + move * 3, mask=is_move, other=0)
        source = tl.load(moves + move * 3 + 1, mask=is_move, other=0)
        target = tl.load(moves + move * 3 + 2, mask=is_move, other=0)
        slab, place = slab_of(tables, slot, source, table_stride, PAGE)
        from_at = (base + slab * slab_stride + place * E)[:, None] + columns[None, :]
        slab, place = slab_of(tables, slot, target, table_stride, PAGE)
        to_at = (base + slab * slab_stride + place * E)[:, None] + columns[None, :]
        key = tl.load(keys + from_at, mask=is_move[:, None], other=0.0)
        value = tl.load(values + from_at, mask=is_move[:, None], other=0.0)
        tl.debug_barrier()
        tl.store(keys + to_at, key, mask=is_move[:, None])
        tl.store(values + to_at, value, mask=is_move[:, None])
        tl.debug_barrier()
