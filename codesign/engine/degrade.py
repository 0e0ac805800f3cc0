"""Take something from a small model on purpose, so that its drafts are accepted less often.

Imports torch; see ``Degradation`` for what there is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codesign.models.recipe import Degradation
from codesign.models.shape import ModelShape

_BLOCK = 32  # columns that share a scale when weights are rounded to fewer bits


def degrade(
    shape: ModelShape, state: Mapping[str, Tensor], loss: Degradation, *, seed: int
) -> tuple[ModelShape, dict[str, Tensor]]:
    """Return shape and tensors of what is left; layers are counted anew.

    Args:
        shape: The small model's.
        state: Its tensors by Hugging Face names.
        loss: What to take.
        seed: Of the noise.

    Raises:
        InputError: If nothing would be left.
    """
    left = loss.shape(shape)
    generator = torch.Generator().manual_seed(seed)
    kept = [index for index in range(shape.layers) if index not in loss.drop_layers]
    result = {name: tensor for name, tensor in state.items() if ".layers." not in name}
    for new, old in enumerate(kept):
        layer = {
            name.removeprefix(f"model.layers.{old}."): tensor.float()
            for name, tensor in state.items()
            if name.startswith(f"model.layers.{old}.")
        }
        if loss.drop_kv_heads:
            layer = _without_heads(layer, shape, left.kv_heads)
        for name, tensor in layer.items():
            worse = _worse(tensor, loss, generator) if tensor.dim() == 2 else tensor
            result[f"model.layers.{new}.{name}"] = worse
    return left, result


def _worse(weight_NK: Tensor, loss: Degradation, generator: torch.Generator) -> Tensor:
    if loss.bits is not None:
        weight_NK = _rounded(weight_NK, loss.bits)
    if loss.noise:
        noise_NK = torch.randn(weight_NK.shape, generator=generator)
        weight_NK = weight_NK + loss.noise * weight_NK.std() * noise_NK
    return weight_NK


def _rounded(weight_NK: Tensor, bits: int) -> Tensor:
    """Round to 2**bits evenly spaced values between each block's smallest and largest."""
    block = _BLOCK if weight_NK.shape[1] % _BLOCK == 0 else weight_NK.shape[1]
    w_NUb = weight_NK.view(weight_NK.shape[0], -1, block)
    low_NU1, high_NU1 = w_NUb.amin(-1, keepdim=True), w_NUb.amax(-1, keepdim=True)
    step_NU1 = ((high_NU1 - low_NU1) / (2**bits - 1)).clamp(min=1e-12)
    return (torch.round((w_NUb - low_NU1) / step_NU1) * step_NU1 + low_NU1).view_as(weight_NK)


def _without_heads(
    layer: Mapping[str, Tensor], shape: ModelShape, num_kept: int
) -> dict[str, Tensor]:
    """Keep the key-value heads whose value and output maps have the largest product of norms."""
    size = shape.head_dim
    ratio = shape.heads // shape.kv_heads
    values_G = layer["self_attn.v_proj.weight"].view(shape.kv_heads, -1).norm(dim=1)
    out_DGm = layer["self_attn.o_proj.weight"].unflatten(1, (shape.kv_heads, ratio * size))
    weighs_G = values_G * out_DGm.transpose(0, 1).flatten(1).norm(dim=1)
    kept = weighs_G.topk(num_kept).indices.sort().values

    def rows(name: str, width: int) -> Tensor:
        weight = layer[f"self_attn.{name}_proj.weight"]
        return weight.unflatten(0, (shape.kv_heads, width))[kept].flatten(0, 1)

    return {
        **layer,
        "self_attn.q_proj.weight": rows("q", ratio * size),
        "self_attn.k_proj.weight": rows("k", size),
        "self_attn.v_proj.weight": rows("v", size),
        "self_attn.o_proj.weight": out_DGm[:, kept].flatten(1),
    }
