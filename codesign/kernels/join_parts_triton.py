# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernel that adds up the parts of a sum: of a product's groups, or of several ranks.

Letters: S parts, M rows, N columns. Imported where a GPU is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.triton_launch import launch

_COLUMNS = 1024  # of a program


def join(
    parts_SMN: Tensor,
    out_MN: Tensor,
    *,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
    swiglu: bool,
) -> None:
    """Write the sum of the parts, in their order, with bias and residual, or its SwiGLU."""
    splits, rows, features = parts_SMN.shape
    columns = features // 2 if swiglu else features
    launch(
        _join,
        (rows, -(-columns // _COLUMNS), 1),
        parts_SMN,
        out_MN,
        out_MN if bias_N is None else bias_N,
        out_MN if residual_MN is None else residual_MN,
        features,
        columns,
        out_MN.stride(0),
        bias_N is not None,  # BIAS
        residual_MN is not None,  # RESIDUAL
        swiglu,  # SWIGLU
        splits,
        _COLUMNS,
        num_warps=4,
    )


@triton.jit
def _join(
    parts,
    out,
    bias,
    residual,
    features,
    columns,
    out_stride,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Columns of one row; a gate's column j lies at 16 (j // 8) + j % 8, its up eight behind."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * features + (column // 8 * 16 + column % 8 if SWIGLU else column)
    value = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        from_part = parts + at + part * tl.num_programs(0).to(tl.int64) * features
        value += tl.load(from_part, mask=inside, other=0.0).to(tl.float32)
        if SWIGLU:
            up += tl.load(from_part + 8, mask=inside, other=0.0).to(tl.float32)
    if SWIGLU:
        value = value / (1.0 + tl.exp(-value)) * up
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    place = row * out_stride + column
    if RESIDUAL:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
