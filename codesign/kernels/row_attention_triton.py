# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options beside)
"""Triton kernels of ``row_attention``; see there for what they compute and the letters.

Every size that changes from step to step is read from device memory. Imported where a GPU is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.row_attention import CHUNK, Scratch, SeenRows
from codesign.kernels.triton_launch import launch

BLOCK = 64  # keys per step of a program
MOVE_BLOCK = 16  # slab rows that are read before any is written


def attend(
    q_THE: Tensor, keys_BGME: Tensor, values_BGME: Tensor, seen: SeenRows, scratch: Scratch
) -> Tensor:
    """``row_attention.row_attention`` on a GPU."""
    rows, heads, head_dim = q_THE.shape
    groups = keys_BGME.shape[1]
    chunks = scratch.values_THCE.shape[2]
    group = heads // groups
    out_THE = torch.empty(rows, heads, head_dim, dtype=q_THE.dtype, device=q_THE.device)
    _attend_chunk[(rows, groups, chunks)](
        q_THE,
        keys_BGME,
        values_BGME,
        seen.slots_T,
        seen.positions_T,
        seen.prefixes_T,
        seen.path_TP,
        seen.slots_T if seen.tables_SK is None else seen.tables_SK,
        scratch.values_THCE,
        scratch.scores_THC2,
        q_THE.stride(0),
        keys_BGME.stride(0),
        keys_BGME.stride(1),
        seen.path_TP.stride(0),
        0 if seen.tables_SK is None else seen.tables_SK.stride(0),
        head_dim**-0.5,
        PAGE=_page_rows(keys_BGME.shape[2], seen.tables_SK),
        GROUP=group,
        PADDED=max(16, 1 << (group - 1).bit_length()),
        E=head_dim,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        num_warps=4,
    )
    _join_chunks[(rows, heads)](
        scratch.values_THCE,
        scratch.scores_THC2,
        seen.positions_T,
        out_THE,
        chunks,
        E=head_dim,
        CHUNK=CHUNK,
        num_warps=1,
    )
    return out_THE


def _page_rows(rows: int, tables_SK: Tensor | None) -> int:
    """Rows of a page; 0 where a slab is one piece."""
    return 0 if tables_SK is None else rows


@triton.jit
def _slab_of(tables, slot, row, table_stride, PAGE: tl.constexpr):  # noqa: ANN202 (a pair)
    """Where a slab row lies: index along B, and the row there; int64."""
    if PAGE == 0:
        slab = slot
        place = row
    else:
        slab = tl.load(tables + slot * table_stride + row // PAGE)
        place = row % PAGE
    return slab.to(tl.int64), place.to(tl.int64)


@triton.jit
def _attend_chunk(
    q,
    keys,
    values,
    slots,
    positions,
    prefixes,
    paths,
    tables,
    out,
    scores,
    q_stride,
    slab_stride,
    head_stride,
    path_stride,
    table_stride,
    scale,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row, one key/value head, one chunk of positions: all query heads of the group."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    count = tl.load(positions + row) + 1
    start = chunk * CHUNK
    if start < count:
        slot, prefix = tl.load(slots + row), tl.load(prefixes + row)
        base = kv_head.to(tl.int64) * head_stride
        heads = tl.arange(0, PADDED)
        columns = tl.arange(0, E)
        is_head = heads < GROUP
        q_rows = row * q_stride + (kv_head * GROUP + heads) * E
        q_block = tl.load(q + q_rows[:, None] + columns[None, :], mask=is_head[:, None], other=0.0)
        best = tl.full([PADDED], float("-inf"), tl.float32)
        total = tl.zeros([PADDED], tl.float32)
        weighted = tl.zeros([PADDED, E], tl.float32)
        for offset in tl.static_range(0, CHUNK, BLOCK):
            if start + offset < count:
                position = start + offset + tl.arange(0, BLOCK)
                is_seen = position < count
                in_tree = is_seen & (position >= prefix)
                step = tl.load(paths + row * path_stride + position - prefix, mask=in_tree, other=0)
                slab_row = tl.where(in_tree, prefix + step, tl.where(is_seen, position, 0))
                slab, place = _slab_of(tables, slot, slab_row, table_stride, PAGE)
                at = base + (slab * slab_stride + place * E)[:, None] + columns[None, :]
                key = tl.load(keys + at, mask=is_seen[:, None], other=0.0)
                value = tl.load(values + at, mask=is_seen[:, None], other=0.0)
                score = tl.dot(q_block, tl.trans(key), input_precision="ieee") * scale
                score = tl.where(is_seen[None, :], score, float("-inf"))
                higher = tl.maximum(best, tl.max(score, 1))
                shrink = tl.exp(best - higher)
                weight = tl.exp(score - higher[:, None])
                total = total * shrink + tl.sum(weight, 1)
                weighted = weighted * shrink[:, None] + tl.dot(
                    weight.to(value.dtype), value, input_precision="ieee"
                )
                best = higher
        num_chunks = tl.num_programs(2)
        part = (row * tl.num_programs(1) * GROUP + kv_head * GROUP + heads) * num_chunks + chunk
        tl.store(out + part[:, None] * E + columns[None, :], weighted, mask=is_head[:, None])
        tl.store(scores + part * 2, best, mask=is_head)
        tl.store(scores + part * 2 + 1, total, mask=is_head)


@triton.jit
def _join_chunks(
    parts,
    scores,
    positions,
    out,
    num_chunks,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add up the chunks of one row and query head, first chunk first."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    used = (tl.load(positions + row) + CHUNK) // CHUNK  # of position + 1 rows
    columns = tl.arange(0, E)
    at = row * tl.num_programs(1) + head
    best = tl.load(scores + at * num_chunks * 2)
    total = tl.load(scores + at * num_chunks * 2 + 1)
    weighted = tl.load(parts + at * num_chunks * E + columns)
    for chunk in range(1, used):
        part = at * num_chunks + chunk
        other = tl.load(scores + part * 2)
        higher = tl.maximum(best, other)
        shrink = tl.exp(best - higher)
        grow = tl.exp(other - higher)
        total = total * shrink + tl.load(scores + part * 2 + 1) * grow
        weighted = weighted * shrink + tl.load(parts + part * E + columns) * grow
        best = higher
    tl.store(out + at * E + columns, (weighted / total).to(out.dtype.element_ty))


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
        _page_rows(keys_BGME.shape[2], tables_SK),
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
    slab, slab_row = _slab_of(tables, slot, kv_row, table_stride, PAGE)
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
        PAGE=_page_rows(keys_LBGME.shape[3], tables_SK),
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
        slab, place = _slab_of(tables, slot, source, table_stride, PAGE)
        from_at = (base + slab * slab_stride + place * E)[:, None] + columns[None, :]
        slab, place = _slab_of(tables, slot, target, table_stride, PAGE)
        to_at = (base + slab * slab_stride + place * E)[:, None] + columns[None, :]
        key = tl.load(keys + from_at, mask=is_move[:, None], other=0.0)
        value = tl.load(values + from_at, mask=is_move[:, None], other=0.0)
        tl.debug_barrier()
        tl.store(keys + to_at, key, mask=is_move[:, None])
        tl.store(values + to_at, value, mask=is_move[:, None])
        tl.debug_barrier()
