"""The ops of a decoder: which implementation runs where.

``reference`` defines what is correct and runs everywhere. A faster form of an op is offered here
under the device it was measured on. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from codesign.kernels.int4 import Int4Weight
from codesign.kernels.reference import (
    PlainInt4Linear,
    PlainLinear,
    int4_linear,
    linear,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    rotate,
    swiglu,
    tree_attention,
)
from codesign.kernels.skinny_linear import SkinnyLinear, pad_rows, padded_rows

__all__ = [
    "Int4Weight",
    "LinearMap",
    "PlainInt4Linear",
    "PlainLinear",
    "SkinnyLinear",
    "int4_linear",
    "linear",
    "pack_linear",
    "pad_rows",
    "padded_rows",
    "rms_norm",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
    "swiglu",
    "tree_attention",
]


LinearMap = Callable[[Tensor], Tensor]  # (T, K) -> (T, N)


def pack_linear(
    weight_NK: Tensor | Int4Weight,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> LinearMap:
    """Return a callable (T, K) -> (T, N) that is fast for few rows on the weight's device.

    Args:
        weight_NK: Floating point, or int4.
        bias_N: Added to every row.
        dtype: Of the rows; a CPU has no int4 product, so int4 weights are brought to it there.
    """
    if isinstance(weight_NK, Int4Weight):
        if weight_NK.packed.device.type != "cpu":
            return PlainInt4Linear(weight_NK, bias_N)
        weight_NK = weight_NK.dequantize(dtype)
    if weight_NK.device.type == "cpu":
        return SkinnyLinear(weight_NK, bias_N)
    return PlainLinear(weight_NK, bias_N)
