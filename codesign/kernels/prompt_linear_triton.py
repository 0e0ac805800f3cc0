# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernels of ``prompt_linear``: packed int4 weights times the rows of a prompt.

A word of a record holds, for rows g and g + 8 of a tile, the four columns ``4 m`` to ``4 m + 3``
of the group, so the product is cut in four by the column's remainder and in two by the half of the
tile: eight products of 32 columns a group, for which a code costs a mask, a subtraction, a
multiplication and half a rounding. ``arrange`` puts the columns of x in that order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.join_parts_triton import join
from codesign.kernels.packing import PackedLinear
from codesign.kernels.triton_launch import launch

WORDS = 264  # of a record, 256 of them codes
_COLUMNS = 1024  # of a program that arranges


@dataclass(frozen=True, slots=True)
class Cut:
    """Launch shape of a product; results do not depend on it.

    Attributes:
        rows: Of x, of a program: 16, 32, 64 or 128.
        channels: Of each half of the tiles of a program, 64 for four warps.
        stages: Of its pipeline; two programs are to fit a multiprocessor.
    """

    rows: int = 128
    channels: int = 64
    stages: int = 3


# On an H200 it ran 256 rows of a 70B over four GPUs 5 % faster a layer than with two stages, 128
# rows 3 % faster.
CUT = Cut()


def arrange(x_MK: Tensor, norm_K: Tensor | None, eps: float) -> Tensor:
    """Return ``norm(x)``, in the type of x, columns in ``product``'s order within a group."""
    rows, columns = x_MK.shape
    out = torch.empty_like(x_MK)
    launch(
        _arrange,
        (rows, 1, 1),
        x_MK,
        x_MK if norm_K is None else norm_K,
        out,
        columns,
        eps,
        norm_K is not None,  # NORM
        _COLUMNS,
        num_warps=4,
    )
    return out


def product(
    arranged_MK: Tensor,
    weight: PackedLinear,
    out_MN: Tensor,
    *,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
    swiglu: bool,
    cut: Cut,
    splits: int,
) -> None:
    """Write ``x @ weight.T + bias + residual``, or its SwiGLU.

    Args:
        arranged_MK: From ``arrange``.
        weight: Packed int4.
        out_MN: Contiguous.
        bias_N: As in ``gemm.linear``, and so the residual.
        residual_MN: May be ``out_MN`` itself.
        swiglu: Rows of the weight are in ``gate_up_order``.
        cut: Of a program.
        splits: Parts of the groups that are added up by themselves.
    """
    rows = arranged_MK.shape[0]
    tiles, groups = weight.num_tiles, weight.num_groups
    parts = out_MN
    if splits > 1:
        parts = torch.empty(
            splits, rows, weight.num_rows, dtype=torch.float32, device=out_MN.device
        )
    whole = splits == 1  # then what is fused is done here, and else where the parts are joined
    launch(
        _product,
        (-(-rows // cut.rows), -(-tiles // (cut.channels // 8)), splits),
        weight.data.view(torch.int32),
        arranged_MK,
        parts,
        out_MN if bias_N is None else bias_N,
        out_MN if residual_MN is None else residual_MN,
        rows,
        weight.num_rows,
        tiles,
        groups,
        -(-groups // splits),
        whole and bias_N is not None,  # BIAS
        whole and residual_MN is not None,  # RESIDUAL
        whole and swiglu,  # SWIGLU
        cut.rows,
        cut.channels,
        WORDS,
        num_warps=cut.channels // 16,
        num_stages=cut.stages,
    )
    if splits > 1:
        join(parts, out_MN, bias_N=bias_N, residual_MN=residual_MN, swiglu=swiglu)


@triton.jit
def _arrange(
    x,
    norm,
    out,
    columns,
    eps,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: its RMSNorm, and column 4 (16 c + 8 j + 2 t + h) + p to place 32 p + word."""
    at = tl.program_id(0).to(tl.int64) * columns
    factor = 1.0
    if NORM:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(x + at + place, mask=place < columns, other=0.0).to(tl.float32)
            squares += value * value
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        word = place % 32  # (c, t, j, h), as a record has them
        fourth = word // 16 * 16 + word // 2 % 2 * 8 + word // 4 % 4 * 2 + word % 2
        column = place // 128 * 128 + fourth * 4 + place // 32 % 4
        inside = place < columns
        value = tl.load(x + at + column, mask=inside, other=0.0)
        if NORM:
            scale = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
            value = value.to(tl.float32) * factor * scale
        tl.store(out + at + place, value.to(out.dtype.element_ty), mask=inside)


# Sizes that change from map to map would each be compiled for.
@triton.jit(do_not_specialize=["rows", "tiles", "groups", "share"])
def _product(
    words,
    x,
    out,
    bias,
    residual,
    rows,
    features,
    tiles,
    groups,
    share,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """CHANNELS / 8 tiles times ROWS rows of x, over one part of the groups."""
    channel = tl.arange(0, CHANNELS)
    tile = tl.program_id(1) * (CHANNELS // 8) + channel // 8
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, word = tl.program_id(2), tl.arange(0, 32)
    is_tile, is_row = tile < tiles, m < rows
    row_words = words + tile.to(tl.int64) * tile_words(groups, WORDS)
    code_at = channel[:, None] % 8 * 16 + (word // 16 * 128 + word % 16)[None, :]
    x_at = x + m.to(tl.int64)[None, :] * (groups * 128) + word[:, None]
    low = tl.zeros([CHANNELS, ROWS], tl.float32)  # rows g of the tiles
    high = low  # rows g + 8
    for group in range(part * share, tl.minimum(groups, (part + 1) * share)):
        record = row_words + group * WORDS
        codes = tl.load(record[:, None] + code_at, mask=is_tile[:, None], other=0)
        ends = tl.load(record + 256 + channel % 8, mask=is_tile, other=0)
        low_scale, low_zero, high_scale, high_zero = scales_and_zeros(ends)
        # A code at bit 12 of a float32's fraction, behind the exponent of 2^23, is 2^12 (2048 +
        # code), one at bit 16 2^16 (128 + code). Scales have 8 bits: only the result is rounded.
        low_unit, low_start = (low_scale * 2.0**-12)[:, None], (low_zero + 2048.0) * low_scale
        high_unit, high_start = (high_scale * 2.0**-16)[:, None], (high_zero + 128.0) * high_scale
        # A zero that the compiler does not know hides that the exponent is constant: masking and
        # joining with two constants would take two instructions.
        exponent = ((low_scale * 0.0).to(tl.int32, bitcast=True) | 0x4B000000)[:, None]
        for p in tl.static_range(4):
            moved = _moved(codes, p)
            a = ((moved & 0xF000) | exponent).to(tl.float32, bitcast=True)
            a = (a * low_unit - low_start[:, None]).to(x.dtype.element_ty)
            b = ((moved & 0xF0000) | exponent).to(tl.float32, bitcast=True)
            b = (b * high_unit - high_start[:, None]).to(x.dtype.element_ty)
            values = tl.load(x_at + group * 128 + p * 32, mask=is_row[None, :], other=0.0)
            low = tl.dot(a, values, low)
            high = tl.dot(b, values, high)
    at = part.to(tl.int64) * rows + m
    if SWIGLU:
        column = tile * 8 + channel % 8
        value = low / (1.0 + tl.exp(-low)) * high
        _write(value, column, at, is_row, out, bias, residual, features // 2, False, False)
    else:
        for half in tl.static_range(2):
            column = tile * 16 + half * 8 + channel % 8
            value = low if half == 0 else high
            _write(value, column, at, is_row, out, bias, residual, features, BIAS, RESIDUAL)


@triton.jit
def _write(
    value,
    column,
    at,
    is_row,
    out,
    bias,
    residual,
    features,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """Add what is to be added, and store columns of rows."""
    inside = (column < features)[:, None] & is_row[None, :]
    place = at[None, :] * features + column[:, None]
    if BIAS:
        value += tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tile_words(groups, WORDS: tl.constexpr):  # noqa: ANN201 (a number)
    """Words of a tile's records, whole lines: ``tiling.tile_bytes``."""
    return (groups * WORDS + 31) // 32 * 32


@triton.jit
def scales_and_zeros(ends):  # noqa: ANN201 (four tensors)
    """Of the words that end a record: scale and zero of row g, then of g + 8, in float32."""
    low = (ends >> 1 & 0x7FF8).to(tl.int16).to(tl.float16, bitcast=True)
    high = (ends >> 17 & 0x7FF8).to(tl.int16).to(tl.float16, bitcast=True)
    low_zero, high_zero = (ends & 15).to(tl.float32), (ends >> 16 & 15).to(tl.float32)
    return low.to(tl.float32), low_zero, high.to(tl.float32), high_zero


@triton.jit
def _moved(codes, p: tl.constexpr):  # noqa: ANN202 (a tensor)
    """Words, the codes of column p of four at bits 12 (row g) and 16 (row g + 8)."""
    if p == 0:
        moved = codes << 12
    elif p == 1:
        moved = codes >> 4
    elif p == 2:
        moved = codes << 4
    else:
        moved = codes >> 12
    return moved
