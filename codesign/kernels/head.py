"""The head of a draft: a row's likeliest tokens and their log probabilities, no logits written.

The product is ``gemm.linear``'s over bfloat16 weights (``cuda/head.cu``); its epilogue keeps the
best features and the sum of exponentials, a list for each reducer warp, and one small launch joins
them.

Letters in shapes: M rows, K inputs, V head rows, C choices.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from codesign.kernels.cuda_module import CudaKernel, load_kernel
from codesign.kernels.gemm import num_sms
from codesign.kernels.packed_reference import Norm, product
from codesign.kernels.packing import RECORD_BYTES, PackedLinear
from codesign.kernels.row_choices import Lists, row_choices, words_of
from codesign.kernels.tiling import Layout, Tiling, layout, row_tiles

MOST_CHOICES = 8  # a lane keeps them in registers, for each of its rows
_MOST_ROWS = 16


def head_words(
    x_MK: Tensor,
    weight: PackedLinear,
    count: int,
    *,
    norm: Norm | None = None,
    num_real: int | None = None,
    token_map: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return ``row_choices.choice_words`` of ``norm(x) @ weight.T``, (2 M C,) int32.

    Args:
        x_MK: Contiguous bfloat16.
        weight: Packed in bfloat16, (V, K).
        count: C, on a GPU at most ``MOST_CHOICES``.
        norm: RMSNorm of x.
        num_real: Rows of the head that stand for tokens; None for all.
        token_map: As in ``choice_words``.
        tiling: How to cut the work, without clusters; None chooses.
    """
    num_real = weight.num_rows if num_real is None else num_real
    if not x_MK.is_cuda:
        logits_MV = product(x_MK, weight, norm)[:, :num_real].float()
        return words_of(*row_choices(logits_MV, count), token_map)
    from codesign.kernels import row_choices_triton

    assert count <= MOST_CHOICES, f"{count} choices; the kernel keeps {MOST_CHOICES}"
    assert x_MK.is_contiguous(), "rows are not contiguous"
    assert x_MK.dtype == torch.bfloat16, f"rows are {x_MK.dtype}"
    parts = []
    for rows_MK in x_MK.split(_MOST_ROWS):
        lists = _launch(rows_MK, weight, count, norm, num_real, tiling)
        parts.append(row_choices_triton.words_of_lists(lists, count, token_map))
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2) for part in parts]
    return torch.cat([tokens for tokens, _ in halves] + [bits for _, bits in halves])


def _launch(
    x_MK: Tensor,
    weight: PackedLinear,
    count: int,
    norm: Norm | None,
    num_real: int,
    tiling: Tiling | None,
) -> Lists:
    rows, columns = x_MK.shape
    tiles, groups, _ = weight.data.shape
    num_row_tiles, sms = row_tiles(rows), num_sms(x_MK.device.index or 0)
    tiling, plan = _layout(tiles, groups, weight.bits, rows, tiling, sms)
    lists = Lists.empty(rows, plan.clusters * tiling.slots(num_row_tiles), count, x_MK.device)
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight_K, norm.eps)
    args = [weight.data, x_MK, norm_weight, lists.values_TBK, lists.columns_TBK, lists.sums_TB2]
    args += [rows, columns, num_real, groups, plan.stages, plan.part_tiles]
    args += [*divmod(tiles, plan.clusters), eps]
    _kernel(weight.bits, num_row_tiles, tiling, lists.values_TBK.shape[2]).launch(
        (plan.clusters,),
        tiling.threads(num_row_tiles),
        args,
        shared_bytes=plan.shared_bytes,
        pdl=True,
    )
    return lists


@cache
def _layout(
    tiles: int, groups: int, bits: int, rows: int, tiling: Tiling | None, sms: int
) -> tuple[Tiling, Layout]:
    """The given tiling or the chosen one, and its shared memory."""
    limit = 16 if rows <= 8 else 8
    tiling = tiling or Tiling(next(w for w in range(limit, 0, -1) if groups % w == 0), 1)
    plan = layout(
        tiling,
        tiles=tiles,
        groups=groups,
        record_bytes=RECORD_BYTES[bits],
        num_row_tiles=row_tiles(rows),
        num_sms=sms,
    )
    assert plan.stages >= 2, f"{tiling} leaves no room for a ring"
    return tiling, plan


@cache
def _kernel(bits: int, num_row_tiles: int, tiling: Tiling, kept: int) -> CudaKernel:
    defines = {
        "BITS": bits,
        "NT": num_row_tiles,
        "WARPS": tiling.warps,
        "TILES": tiling.tiles,
        "BLOCKS": tiling.blocks,
        "KEPT": kept,
        "DELAYS": int(tiling.delays),
    }
    return load_kernel("head.cu", "head", defines)
