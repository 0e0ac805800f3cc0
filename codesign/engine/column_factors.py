"""Column factors of activation-aware quantisation: what makes rounding fit the activations.

Before rounding, input columns are multiplied by a power of the mean activation they meet and what
produces the activation is divided by it (a norm, the value map, the up map), which leaves the
model as it is and rounds those columns finer. The power is the one, of a few, that changes a map's
output least on a calibration text.

Letters in shapes: T rows, N outputs and K inputs of a map.

Source:
    Activation-aware weight quantisation: arXiv:2306.00978.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from codesign.engine.rank_weights import LayerWeights
from codesign.kernels.int4 import Int4Weight, quantize_int4
from codesign.kernels.reference import linear
from codesign.models.shape import ModelShape

MAPS = ("qkv", "out", "gate_up", "down")  # fields of LayerWeights that are quantised
_POWERS = tuple(i / 10 for i in range(11))
_PROBES = 512  # rows on which a power is judged


def balanced(
    layer: LayerWeights, seen: Mapping[str, Tensor], shape: ModelShape, group: int
) -> LayerWeights:
    """Return the same layer with the factors of its four inputs moved into its maps.

    Args:
        layer: In floating point.
        seen: (T, K) inputs of each of ``MAPS`` on the calibration text.
        shape: The model's.
        group: Columns that share a scale.
    """
    qkv, out, gate_up, down = (floats(getattr(layer, name)) for name in MAPS)
    by_qkv = _factors(qkv, seen["qkv"], group)
    by_gate_up = _factors(gate_up, seen["gate_up"], group)
    by_down = _factors(down, seen["down"], group)
    # Query heads of a group read the same values, so they share their factors.
    ratio = shape.heads // shape.kv_heads
    shared = (shape.kv_heads, ratio, shape.head_dim)
    by_out = _factors(out, seen["out"], group, shared=shared)
    by_values = by_out.view(shared)[:, 0].flatten()
    values = slice(-by_values.numel(), None)
    up = slice(shape.intermediate, None)
    qkv, gate_up = qkv * by_qkv, gate_up * by_gate_up
    qkv[values] /= by_values[:, None]
    gate_up[up] /= by_down[:, None]
    bias = layer.qkv_bias
    if bias is not None:
        bias = bias.clone()
        bias[values] /= by_values
    return replace(
        layer,
        input_norm=layer.input_norm / by_qkv,
        qkv=qkv,
        qkv_bias=bias,
        out=out * by_out,
        mlp_norm=layer.mlp_norm / by_gate_up,
        gate_up=gate_up,
        down=down * by_down,
    )


def _factors(
    weight_NK: Tensor, x_TK: Tensor, group: int, *, shared: tuple[int, int, int] | None = None
) -> Tensor:
    """Return the (K,) column factors that change the map's output least; 1 is among them."""
    size_K = x_TK.abs().mean(0)
    if shared is not None:
        size_K = size_K.view(shared).mean(1, keepdim=True).expand(shared).flatten()
    size_K = size_K.clamp(min=1e-5)
    probes_TK = x_TK[:: max(1, len(x_TK) // _PROBES)]
    want_TN = linear(probes_TK, weight_NK)
    best_K, least = torch.ones_like(size_K), torch.inf
    for power in _POWERS:
        factor_K = size_K**power
        factor_K = factor_K / (factor_K.max() * factor_K.min()).sqrt()
        rounded_NK = quantize_int4(weight_NK * factor_K, group=group).dequantize() / factor_K
        loss = float((linear(probes_TK, rounded_NK) - want_TN).square().mean())
        if loss < least:
            best_K, least = factor_K, loss
    return best_K


def floats(matrix: Tensor | Int4Weight) -> Tensor:
    """Return a matrix that is not quantised yet."""
    assert isinstance(matrix, Tensor), "expected a floating-point matrix"
    return matrix
