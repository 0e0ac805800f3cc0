"""Attention of flat rows over slabs, keys taken in order of position; rotation and KV rows moved.

A row at position p sees p + 1 slab rows: rows [0, prefix) of its slab, then ``prefix + path``. Keys
are read in this order and in chunks at fixed positions, so what a row adds up does not depend on
where its tree rows lie, on the other rows or on the batch: a tree row gives the bits that the same
row gives in plain decoding.

Each op is plain PyTorch on a CPU, which defines what is right, and a Triton kernel on a GPU, whose
sizes all come from device memory: a captured graph serves every tree and context.

Letters in shapes: T rows, P longest path, B slabs, M rows of a slab, H query heads, G key/value
heads, E head size, L layers, C chunks, N moves, K pages of a slab.

Slabs may lie in pages: then B counts pages, M rows of a page, and row r of slab s is row r % M of
page ``tables_SK[s, r // M]``. What a row adds up does not depend on where its pages lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128  # positions per program; fixed, so that partial sums meet at the same places


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Which slab rows each row sees; int32 on the device.

    Attributes:
        slots_T: (T,) slab of each row.
        positions_T: (T,) position, which is one less than the rows that it sees.
        prefixes_T: (T,) slab rows 0, 1, ... that it sees first.
        path_TP: (T, P) what it sees then, counted from its prefix.
        tables_SK: (S, K) page of each slab's rows [k M, k M + M); None where a slab is one piece.
        padding_slot: Slab of rows that fill up a forward, behind all others; -1 for none.
            Their results, which are finite, are never read, nor are their keys and values, which
            may be left out.
    """

    slots_T: Tensor
    positions_T: Tensor
    prefixes_T: Tensor
    path_TP: Tensor
    tables_SK: Tensor | None = None
    padding_slot: int = -1


def seen_row_indices(seen: SeenRows, row: int) -> Tensor:
    """Slab rows that one row sees, in order of position, (p + 1,) int64."""
    prefix = int(seen.prefixes_T[row])
    count = int(seen.positions_T[row]) + 1 - prefix
    path = prefix + seen.path_TP[row, : max(count, 0)].long()
    return torch.cat((torch.arange(min(prefix, prefix + count), device=path.device), path))


def places_of(
    slots_N: Tensor, rows_N: Tensor, tables_SK: Tensor | None, page_rows: int
) -> tuple[Tensor, Tensor]:
    """Where slab rows lie: (N,) index along B and (N,) row there, int64."""
    slots_N, rows_N = slots_N.long(), rows_N.long()
    if tables_SK is None:
        return slots_N, rows_N
    return tables_SK[slots_N, rows_N // page_rows].long(), rows_N % page_rows


def row_attention(
    q_THE: Tensor, keys_BGME: Tensor, values_BGME: Tensor, seen: SeenRows, scratch: Scratch | None
) -> Tensor:
    """Return attention of rotated queries over what their rows see, (T, H, E).

    Args:
        q_THE: Query head h uses key/value head h * G // H.
        keys_BGME: Slabs of one layer; the new rows are in them already.
        values_BGME: The same.
        seen: Which slab rows each row sees.
        scratch: Partial results, on a GPU (see ``Scratch.make``).
    """
    if not q_THE.is_cuda:
        return _reference_attention(q_THE, keys_BGME, values_BGME, seen)
    assert scratch is not None, "the kernel needs room for partial results"
    from codesign.kernels import row_attention_triton

    return row_attention_triton.attend(q_THE, keys_BGME, values_BGME, seen, scratch)


def _reference_attention(
    q_THE: Tensor, keys_BGME: Tensor, values_BGME: Tensor, seen: SeenRows
) -> Tensor:
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    grouped = q_THE.shape[1] != keys_BGME.shape[1]
    for row, slot in enumerate(seen.slots_T.tolist()):
        index = seen_row_indices(seen, row)
        slots = torch.full_like(index, slot)
        place = places_of(slots, index, seen.tables_SK, keys_BGME.shape[2])
        keys_GSE = keys_BGME[place[0], :, place[1]].transpose(0, 1)
        values_GSE = values_BGME[place[0], :, place[1]].transpose(0, 1)
        out_1H1E = F.scaled_dot_product_attention(
            q_THE[row, None, :, None], keys_GSE[None], values_GSE[None], enable_gqa=grouped
        )
        out_THE[row] = out_1H1E[0, :, 0]
    return out_THE


@dataclass(frozen=True, slots=True)
class Scratch:
    """Partial results of chunks, float32: weighted values, and their maximum and sum."""

    values_THCE: Tensor
    scores_THC2: Tensor

    @classmethod
    def make(
        cls, rows: int, heads: int, head_dim: int, max_tokens: int, device: torch.device
    ) -> Scratch:
        """Room for ``rows`` rows over slabs of ``max_tokens`` rows."""
        chunks = math.ceil(max_tokens / CHUNK)
        values = torch.empty(rows, heads, chunks, head_dim, dtype=torch.float32, device=device)
        scores = torch.empty(rows, heads, chunks, 2, dtype=torch.float32, device=device)
        return cls(values, scores)


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
    """Rotate queries and keys, write keys and values to their slab rows, return queries (T, H, E).

    Args:
        qkv_TN: Query heads, key heads, value heads of every row.
        cos_TF: Cosine of each row's angles, float32.
        sin_TF: Sine of the same.
        keys_BGME: Slabs of one layer.
        values_BGME: The same.
        slots_T: Slab of each row.
        kv_rows_T: Slab row that each row's key and value go to.
        heads: Query heads H.
        tables_SK: Pages of the slabs, see ``SeenRows``.
    """
    rows = qkv_TN.shape[0]
    kv_heads, head_dim = keys_BGME.shape[1], keys_BGME.shape[3]
    if qkv_TN.is_cuda:
        from codesign.kernels import slab_rows_triton

        return slab_rows_triton.rotate_and_append(
            qkv_TN,
            cos_TF,
            sin_TF,
            keys_BGME,
            values_BGME,
            slots_T,
            kv_rows_T,
            heads=heads,
            tables_SK=tables_SK,
        )
    parts = qkv_TN.view(rows, -1, head_dim).split((heads + kv_heads, kv_heads), dim=1)
    first, second = parts[0].float().chunk(2, dim=-1)
    cos_T1F, sin_T1F = cos_TF[:, None], sin_TF[:, None]
    turned = torch.cat(
        (first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F), dim=-1
    ).to(qkv_TN.dtype)
    slots, places = places_of(slots_T, kv_rows_T, tables_SK, keys_BGME.shape[2])
    keys_BGME[slots, :, places] = turned[:, heads:]
    values_BGME[slots, :, places] = parts[1]
    return turned[:, :heads]


def move_rows(
    keys_LBGME: Tensor,
    values_LBGME: Tensor,
    moves_N3: Tensor,
    num_moves_1: Tensor,
    tables_SK: Tensor | None = None,
) -> None:
    """Move slab rows of all layers: (slot, source, target) each, in this order.

    Args:
        keys_LBGME: Slabs of all layers.
        values_LBGME: The same.
        moves_N3: int32; of one slab the sources ascend and no target lies above its source, so
            that no source is overwritten before it has moved.
        num_moves_1: int32, how many of the moves count.
        tables_SK: Pages of the slabs, see ``SeenRows``.
    """
    if keys_LBGME.is_cuda:
        from codesign.kernels import slab_rows_triton

        slab_rows_triton.move_rows(keys_LBGME, values_LBGME, moves_N3, num_moves_1, tables_SK)
        return
    moves = moves_N3.view(-1, 3)[: int(num_moves_1[0])]
    froms = places_of(moves[:, 0], moves[:, 1], tables_SK, keys_LBGME.shape[3])
    tos = places_of(moves[:, 0], moves[:, 2], tables_SK, keys_LBGME.shape[3])
    columns = torch.stack((*froms, *tos), dim=1)
    for slab, source, to_slab, target in columns.tolist():
        keys_LBGME[:, to_slab, :, target] = keys_LBGME[:, slab, :, source]
        values_LBGME[:, to_slab, :, target] = values_LBGME[:, slab, :, source]
