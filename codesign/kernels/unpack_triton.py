# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""The Triton kernel that unpacks int4 weights, at the memory's pace, for a dense product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.packing import TILE, PackedLinear
from codesign.kernels.prompt_linear_triton import WORDS, scales_and_zeros, tile_words
from codesign.kernels.triton_launch import launch

GROUPS = 4  # of a program


def unpack(weight: PackedLinear, first_tile: int, dense_nK: Tensor) -> None:
    """Write the values of whole tiles from ``first_tile`` on, rounded once."""
    tiles, groups = dense_nK.shape[0] // TILE, weight.num_groups
    launch(
        _unpack,
        (-(-groups // GROUPS), tiles, 1),
        weight.data[first_tile:].view(torch.int32),
        dense_nK,
        groups,
        GROUPS,
        WORDS,
        num_warps=4,
    )


@triton.jit
def _unpack(
    words,
    out,
    groups,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """A few records of a tile; a word becomes four columns side by side, of two rows."""
    tile = tl.program_id(1).to(tl.int64)
    fourth = tl.arange(0, 32 * GROUPS)[None, :]
    group = tl.program_id(0) * GROUPS + fourth // 32
    g = tl.arange(0, 8)[:, None]
    record = words + tile * tile_words(groups, WORDS) + group * WORDS
    is_group = group < groups
    place = fourth // 16 % 2 * 128 + fourth // 2 % 4 * 4 + fourth // 8 % 2 * 2 + fourth % 2
    codes = tl.load(record + place + g * 16, mask=is_group, other=0)
    ends = tl.load(record + 256 + g, mask=is_group, other=0)
    column = tl.program_id(0) * GROUPS * 128 + tl.arange(0, 128 * GROUPS)[None, :]
    low_scale, low_zero, high_scale, high_zero = scales_and_zeros(ends)
    for half in tl.static_range(2):
        scale = low_scale if half == 0 else high_scale
        zero = low_zero if half == 0 else high_zero
        shifted = codes >> (4 * half)
        first = ((shifted & 15).to(tl.float32) - zero) * scale
        second = ((shifted >> 16 & 15).to(tl.float32) - zero) * scale
        third = ((shifted >> 8 & 15).to(tl.float32) - zero) * scale
        last = ((shifted >> 24 & 15).to(tl.float32) - zero) * scale
        values = tl.join(tl.join(first, third), tl.join(second, last))
        values = tl.reshape(values, [8, 128 * GROUPS]).to(out.dtype.element_ty)
        place = (tile * 16 + half * 8 + g) * (groups * 128) + column
        tl.store(out + place, values, mask=column < groups * 128)
