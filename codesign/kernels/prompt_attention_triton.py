# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""The Triton kernel of ``prompt_attention.slab_attention``; see there for the letters.

Slab, start and count come from device memory. What a row adds up depends on its position alone, not
on where its piece begins, how it is padded or where its pages lie: keys are taken in blocks from
position 0 on, and a block of queries has always as many rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, KEYS = 64, 64  # queries of a program, and keys at a time
_LOG2_E = 1.4426950408889634


def attend(
    q_THE: Tensor,
    keys_BGME: Tensor,
    values_BGME: Tensor,
    slot_1: Tensor,
    start_1: Tensor,
    count_1: Tensor,
    tables_SK: Tensor | None,
) -> Tensor:
    """``prompt_attention.slab_attention`` on a GPU."""
    rows, heads, head_dim = q_THE.shape
    out_THE = torch.empty(rows, heads, head_dim, dtype=q_THE.dtype, device=q_THE.device)
    _attend[(-(-rows // ROWS), heads)](
        q_THE,
        keys_BGME,
        values_BGME,
        slot_1,
        start_1,
        count_1,
        slot_1 if tables_SK is None else tables_SK,
        out_THE,
        rows,
        heads // keys_BGME.shape[1],
        q_THE.stride(0),
        keys_BGME.stride(0),
        keys_BGME.stride(1),
        0 if tables_SK is None else tables_SK.stride(0),
        head_dim**-0.5 * _LOG2_E,
        PAGE=0 if tables_SK is None else keys_BGME.shape[2],
        E=head_dim,
        ROWS=ROWS,
        KEYS=KEYS,
        num_warps=4,
        num_stages=2,
    )
    return out_THE.flatten(1)


@triton.jit
def _attend(
    q,
    keys,
    values,
    slots,
    starts,
    counts,
    tables,
    out,
    rows,
    group,
    q_stride,
    slab_stride,
    head_stride,
    table_stride,
    scale,
    PAGE: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """A block of rows of one query head, over all keys up to the last of them."""
    first_row = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    slot, start, count = tl.load(slots), tl.load(starts), tl.load(counts)
    end = start + count
    row, columns = first_row + tl.arange(0, ROWS), tl.arange(0, E)
    is_row = row < rows
    at_row = row[:, None] * q_stride + head * E + columns[None, :]
    queries = tl.load(q + at_row, mask=is_row[:, None], other=0.0)
    num_seen = tl.minimum(start + row + 1, end)  # rows of padding see what the last one sees
    # A block of nothing but padding sees nothing, and writes zeros.
    last = tl.where(first_row < count, tl.minimum(start + first_row + ROWS, end), 0)
    base = (head // group).to(tl.int64) * head_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, E], tl.float32)
    for first_key in range(0, last, KEYS):
        position = first_key + tl.arange(0, KEYS)
        slab_row = tl.minimum(position, end - 1)  # nothing is read where no page may be
        if PAGE == 0:
            place = slot.to(tl.int64) * slab_stride + slab_row * E
        else:
            page = tl.load(tables + slot * table_stride + slab_row // PAGE)
            place = page.to(tl.int64) * slab_stride + slab_row % PAGE * E
        at = base + place[:, None] + columns[None, :]
        key = tl.load(keys + at)
        value = tl.load(values + at)
        score = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(position[None, :] < num_seen[:, None], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))  # finite: every row sees the first key
        shrink = tl.exp2(best - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        weighted = weighted * shrink[:, None] + tl.dot(
            weight.to(value.dtype), value, input_precision="ieee"
        )
        best = higher
    result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    at_out = (row * tl.num_programs(1) + head)[:, None] * E + columns[None, :]
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=is_row[:, None])
