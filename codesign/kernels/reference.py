"""Every op of a decoder's forward pass in plain PyTorch: the definition of correct.

Letters in shapes: T rows, D hidden size, H query heads, G key/value heads (H is a multiple of
G), E head size, F = E / 2 rotary frequencies, S rows of a slab (prefix, tree, new rows),
n rows of one request, I intermediate size, N outputs and K inputs of a linear map, U groups of
g inputs of an int4 one.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from codesign.kernels.int4 import Int4Weight, unpack_nibbles
from codesign.models.shape import Llama3Scaling, Rope


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, (T, N)."""
    return F.linear(x_TK, weight_NK, bias_N)


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A linear map as a callable (T, K) -> (T, N), one library call each time."""

    weight_NK: Tensor
    bias_N: Tensor | None = None

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``, (T, N)."""
        return linear(x_TK, self.weight_NK, self.bias_N)


def int4_linear(x_TK: Tensor, weight: Int4Weight, bias_N: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` of an int4 matrix, (T, N), in the type of ``x``.

    The integers are multiplied in float32; scale and zero point are applied to the sums of a
    group: ``scale * (sum(q * x) - zero * sum(x))``. That rounds less than weights that were
    brought to bfloat16 first.
    """
    rows, group = weight.rows, weight.group
    x_UTg = x_TK.to(torch.float32).view(x_TK.shape[0], -1, group).transpose(0, 1)
    q_UgN = unpack_nibbles(weight.packed).to(torch.float32).view(rows, -1, group).permute(1, 2, 0)
    zeros_U1N = weight.zeros.to(torch.float32).t()[:, None]
    scales_U1N = weight.scales.to(torch.float32).t()[:, None]
    sums_UTN = torch.bmm(x_UTg, q_UgN) - zeros_U1N * x_UTg.sum(-1, keepdim=True)
    out_TN = (scales_U1N * sums_UTN).sum(0)
    if bias_N is not None:
        out_TN = out_TN + bias_N
    return out_TN.to(x_TK.dtype)


@dataclass(frozen=True, slots=True)
class PlainInt4Linear:
    """An int4 linear map as a callable (T, K) -> (T, N)."""

    weight: Int4Weight
    bias_N: Tensor | None = None

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``, (T, N)."""
        return int4_linear(x_TK, self.weight, self.bias_N)


def sum_of_ranks(parts_TD: Sequence[Tensor], residual_TD: Tensor | None) -> Tensor:
    """Return ``residual`` plus the ranks' partial results, added in rank order in float32."""
    sum_TD = torch.zeros_like(parts_TD[0], dtype=torch.float32)
    for part_TD in parts_TD:
        sum_TD += part_TD
    if residual_TD is not None:
        sum_TD += residual_TD
    return sum_TD.to(parts_TD[0].dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_up_T2I: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, (T, I), from the two side by side, (T, 2I)."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


def rotary_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the (F,) float32 angles per position, Llama 3 scaling applied.

    Source:
        Rotary embedding: arXiv:2104.09864. Scaling: the ``llama3`` rope type of Hugging Face
        configurations, published with Llama 3.1.
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequency_F = 1.0 / (rope.theta**exponent_F)
    return frequency_F if rope.scaling is None else _llama3_scaled(frequency_F, rope.scaling)


def _llama3_scaled(frequency_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide waves longer than the trained context, keep short ones, blend between."""
    wavelength_F = 2 * math.pi / frequency_F
    turns_F = scaling.original_max_positions / wavelength_F
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # blend = 1 keeps the frequency, 0 divides it
    blend_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend_F) * frequency_F / scaling.factor + blend_F * frequency_F


def rotary_tables(positions_T: Tensor, frequency_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine of every row's angles, each (T, 1, E), for ``rotate``.

    The sine carries the sign of the half-turn: minus on the first half of a head.
    """
    angle_TF = positions_T[:, None].to(torch.float32) * frequency_F
    cos_TF, sin_TF = angle_TF.cos(), angle_TF.sin()
    return torch.cat((cos_TF, cos_TF), -1)[:, None], torch.cat((-sin_TF, sin_TF), -1)[:, None]


def rotate(x_THE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    """Return heads turned by their rows' angles, (T, H, E); see ``rotary_tables``."""
    # (a, b) -> (a cos - b sin, b cos + a sin) for the two halves a and b of a head
    swapped_THE = x_THE.roll(x_THE.shape[-1] // 2, -1)
    return torch.addcmul(x_THE * cos_T1E, swapped_THE, sin_T1E)


def tree_attention(
    q_nHE: Tensor,
    keys_GSE: Tensor,
    values_GSE: Tensor,
    bias_nS: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Return attention of one request's rows over its slab, (n, H, E).

    Args:
        q_nHE: Rotated queries of the new rows.
        keys_GSE: Rotated keys of prefix, tree and new rows; query head h uses head h * G // H.
        values_GSE: Values of the same rows.
        bias_nS: Added to the scores: 0 where a row sees another, -inf where not; None = sees all.
        causal: The slab holds the new rows only (n = S), and each sees those up to itself;
            ``bias_nS`` must be None.
    """
    out_1HnE = F.scaled_dot_product_attention(
        q_nHE.transpose(0, 1)[None],
        keys_GSE[None],
        values_GSE[None],
        attn_mask=bias_nS,
        is_causal=causal,
        enable_gqa=q_nHE.shape[1] != keys_GSE.shape[0],
    )
    return out_1HnE[0].transpose(0, 1)
