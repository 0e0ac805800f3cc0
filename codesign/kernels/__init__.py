"""The ops of a decoder: which implementation runs where.

``reference`` defines what is correct and runs everywhere. A faster form of an op is offered here
under the device it was measured on. Imports torch.
"""

from __future__ import annotations

from torch import Tensor

from codesign.kernels.reference import (
    PlainLinear,
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
    "PlainLinear",
    "SkinnyLinear",
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


def pack_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> PlainLinear | SkinnyLinear:
    """Return a callable (T, K) -> (T, N) that is fast for few rows on the weight's device."""
    if weight_NK.device.type == "cpu":
        return SkinnyLinear(weight_NK, bias_N)
    return PlainLinear(weight_NK, bias_N)
