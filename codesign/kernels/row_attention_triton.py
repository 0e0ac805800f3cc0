# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernels of ``row_attention``; see there for what they compute and the letters.

Every size that changes from step to step is read from device memory. Imported where a GPU is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.row_attention import CHUNK, Scratch, SeenRows
from codesign.kernels.slab_rows_triton import page_rows, slab_of

BLOCK = 64  # keys per step of a program


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
        PAGE=page_rows(keys_BGME.shape[2], seen.tables_SK),
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
                slab, place = slab_of(tables, slot, slab_row, table_stride, PAGE)
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
