"""Plain PyTorch of the ops over packed weights: the definition of correct, with float64 inside.

The kernels keep codes and scales apart and round once, but for int4 weights' x: of a group of 128
columns the largest is given 16 bits, the others what that leaves. These compute in float64.
The ``_bf16`` forms are dense products in bfloat16, for prompts.

Letters in shapes: M rows, K inputs, N outputs, I channels of a SwiGLU, V head rows.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from codesign.kernels.packing import PackedLinear, unpack
from codesign.kernels.reference import rms_norm


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of a linear map's input.

    Attributes:
        weight_K: bfloat16.
        eps: Added to the mean square.
    """

    weight_K: Tensor
    eps: float


def product(x_MK: Tensor, weight: PackedLinear, norm: Norm | None = None) -> Tensor:
    """Return ``norm(x) @ weight.T`` before any rounding, (M, N) float64.

    The normalising factor is applied after the product and the weight of the norm before it,
    rounded to bfloat16 as the tensor cores take it.
    """
    wide_NK = unpack(weight, torch.float64)
    if norm is None:
        return x_MK.double() @ wide_NK.T
    scaled_MK = (x_MK.float() * norm.weight_K.float()).to(torch.bfloat16)
    factor_M1 = torch.rsqrt(x_MK.double().square().mean(-1, keepdim=True) + norm.eps)
    return (scaled_MK.double() @ wide_NK.T) * factor_M1


def linear(
    x_MK: Tensor,
    weight: PackedLinear,
    *,
    norm: Norm | None = None,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
) -> Tensor:
    """Return ``norm(x) @ weight.T + bias + residual``, (M, N) float64."""
    out_MN = product(x_MK, weight, norm)
    if bias_N is not None:
        out_MN = out_MN + bias_N.double()
    return out_MN if residual_MN is None else out_MN + residual_MN.double()


def gate_up(x_MK: Tensor, weight: PackedLinear, *, norm: Norm | None = None) -> Tensor:
    """Return ``silu(gate) * up``, (M, I) float64, of a weight in ``gate_up_order``."""
    return _paired_swiglu(product(x_MK, weight, norm))


def linear_bf16(
    x_MK: Tensor,
    weight: PackedLinear,
    *,
    norm: Norm | None = None,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
) -> Tensor:
    """Return what ``linear`` does through one dense bfloat16 product, (M, N)."""
    x_MK = x_MK if norm is None else rms_norm(x_MK, norm.weight_K, norm.eps)
    out_MN = F.linear(x_MK, unpack(weight, torch.bfloat16), bias_N)
    return out_MN if residual_MN is None else out_MN + residual_MN


def gate_up_bf16(x_MK: Tensor, weight: PackedLinear, *, norm: Norm | None = None) -> Tensor:
    """Return what ``gate_up`` does through one dense bfloat16 product, (M, I)."""
    return _paired_swiglu(linear_bf16(x_MK, weight, norm=norm))


def _paired_swiglu(out_MN: Tensor) -> Tensor:
    gate, up = out_MN.unflatten(-1, (-1, 2, 8)).unbind(-2)
    return (F.silu(gate) * up).flatten(1)
