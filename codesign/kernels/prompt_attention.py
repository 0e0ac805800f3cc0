"""Attention of a prompt's rows over those before them and each other.

Left to itself, PyTorch picks cuDNN for this on a Hopper GPU: that costs the host more than the
other launches of a layer together, and a new plan for every new length. The flash kernel starts
at once, and takes the rows of a piece as the last ones of the keys.

Within a captured graph nothing of that is known to the host: ``slab_attention`` reads from device
memory where a piece begins, how many of its rows count and which slab they are of.

Letters in shapes: T rows, S slab rows up to the last of them, H query heads, G key/value heads,
E head size, B slabs or pages, M rows of one, K pages of a slab.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from codesign.kernels.row_attention import places_of

_LARGEST_HEAD = 256  # of the flash kernel
_SLAB_HEADS = (64, 128)  # head sizes that ``slab_attention`` takes on a GPU


def prompt_attention(q_THE: Tensor, keys_1GSE: Tensor, values_1GSE: Tensor) -> Tensor:
    """Return attention of the last T of S rows, each over those up to itself, (T, H E).

    Args:
        q_THE: Rotated queries; query head h uses key/value head h * G // H.
        keys_1GSE: Rotated keys of all rows up to the last.
        values_1GSE: Values of the same.
    """
    rows, heads, head_dim = q_THE.shape
    q_1HTE = q_THE[None].transpose(1, 2)
    if _runs_flash(q_THE):
        # Of this operation, "causal" lines up the last row with the last key.
        out_1HTE = torch.ops.aten._scaled_dot_product_flash_attention.default(
            q_1HTE, keys_1GSE, values_1GSE, 0.0, True, scale=head_dim**-0.5
        )[0]
    else:
        length, mask_TS = keys_1GSE.shape[2], None
        if length > rows:  # torch.nn.attention.bias has it, and takes as long to load as torch
            mask_TS = torch.ones(rows, length, dtype=torch.bool, device=q_THE.device)
            mask_TS = mask_TS.tril(length - rows)
        out_1HTE = F.scaled_dot_product_attention(
            q_1HTE,
            keys_1GSE,
            values_1GSE,
            attn_mask=mask_TS,
            is_causal=length == rows,
            enable_gqa=heads != keys_1GSE.shape[1],
        )
    return out_1HTE.transpose(1, 2).reshape(rows, -1)


def takes_slabs(*, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``slab_attention`` has a kernel for a model on this GPU."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and head_dim in _SLAB_HEADS
        and torch.cuda.get_device_capability(device)[0] >= 8
    )


def slab_attention(
    q_THE: Tensor,
    keys_BGME: Tensor,
    values_BGME: Tensor,
    slot_1: Tensor,
    start_1: Tensor,
    count_1: Tensor,
    tables_SK: Tensor | None = None,
) -> Tensor:
    """Return attention of a piece of a prompt over its slab, (T, H E); finite where it is padding.

    Args:
        q_THE: Rotated queries of positions ``start`` and on; rows ``count`` and on are padding.
        keys_BGME: Slabs of one layer; the piece's keys are in them already.
        values_BGME: The same.
        slot_1: Slab of the piece, an integer type, as are the next two.
        start_1: Slab row of its first row.
        count_1: How many rows it has, at least 1.
        tables_SK: Pages of the slabs, see ``row_attention.SeenRows``.
    """
    if q_THE.is_cuda:
        from codesign.kernels import prompt_attention_triton

        return prompt_attention_triton.attend(
            q_THE, keys_BGME, values_BGME, slot_1, start_1, count_1, tables_SK
        )
    count = int(count_1)
    rows = torch.arange(int(start_1) + count)
    slabs, places = places_of(slot_1.expand_as(rows), rows, tables_SK, keys_BGME.shape[2])
    keys, values = (of[slabs, :, places].transpose(0, 1)[None] for of in (keys_BGME, values_BGME))
    out_TN = torch.zeros_like(q_THE).flatten(1)
    out_TN[:count] = prompt_attention(q_THE[:count], keys, values)
    return out_TN


def _runs_flash(q_THE: Tensor) -> bool:
    head_dim = q_THE.shape[-1]
    return (
        q_THE.is_cuda
        and q_THE.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= _LARGEST_HEAD
        and _has_flash(q_THE.device.index or 0)
    )


@cache
def _has_flash(device: int) -> bool:
    """Whether PyTorch was built with the kernel, and a device runs it."""
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device)[0] >= 8
