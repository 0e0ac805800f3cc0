"""The file format of a shipped draft: int8 rows with one float16 scale each, in safetensors.

A draft directory holds `config.json` (Hugging Face Llama keys plus a "codesign_draft" table) and
`model.safetensors`. A matrix `NAME` is stored as int8 `NAME` and float16 `NAME_scale` [rows];
vectors are stored as they are; the input embedding is the target's and is not stored.
"draft_to_target" [N] maps a row of lm_head to the target's token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from codesign.errors import InputError
from codesign.models.importing import SINGLE

TOKEN_MAP = "draft_to_target"
SCALE_SUFFIX = "_scale"
_LARGEST = 127


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 rows and their float16 scales, the largest entry of a row at +-127.

    Args:
        weight: [rows, columns], floating point.

    Returns:
        The int8 matrix [rows, columns] and the scales [rows]; a row of zeros gets scale 0.
    """
    weight = weight.float()
    scale = (weight.abs().amax(dim=1) / _LARGEST).half()
    # Divide by the scale that is stored, not by the exact one, so that its rounding costs nothing.
    divisor = torch.where(scale > 0, scale.float(), 1.0)[:, None]
    rounded = torch.round(weight / divisor).clamp(-_LARGEST, _LARGEST)
    return torch.where(scale[:, None] > 0, rounded, 0.0).to(torch.int8), scale


def dequantize_rows(quantized: Tensor, scale: Tensor) -> Tensor:
    """Float32 rows [rows, columns]: each int8 row times its scale."""
    return quantized.float() * scale.float()[:, None]


def save_draft_state(directory: Path, state: Mapping[str, Tensor]) -> None:
    """Write `model.safetensors` from float tensors by Hugging Face name and the token map.

    Matrices become int8 rows, vectors float32, the token map int32.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == TOKEN_MAP:
            stored[name] = tensor.to(torch.int32).contiguous()
        elif tensor.ndim == 2:
            stored[name], stored[name + SCALE_SUFFIX] = quantize_rows(tensor)
        else:
            stored[name] = tensor.float().contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(stored, directory / SINGLE)


def load_draft_state(directory: Path) -> dict[str, Tensor]:
    """Float32 tensors of a draft by Hugging Face name, plus the int64 "draft_to_target" [N].

    Raises:
        InputError: The file is missing or broken, a matrix has no scales, or the token map does
            not fit the head.
    """
    path = directory / SINGLE
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot read draft weights {path}: {error}; reinstall codesign or name another draft"
        ) from error
    state: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            scale = stored.get(name + SCALE_SUFFIX)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise InputError(f"{path}: {name} has no row scales; rebuild the draft")
            state[name] = dequantize_rows(tensor, scale)
        elif name == TOKEN_MAP:
            state[name] = tensor.long()
        elif not name.endswith(SCALE_SUFFIX):
            state[name] = tensor.to(torch.float32, copy=True)  # never a view of the file
    _check_token_map(path, state)
    return state


def _check_token_map(path: Path, state: Mapping[str, Tensor]) -> None:
    token_map, head = state.get(TOKEN_MAP), state.get("lm_head.weight")
    if token_map is None or head is None:
        raise InputError(f"{path} holds no {TOKEN_MAP} or lm_head.weight; rebuild the draft")
    if token_map.shape[0] != head.shape[0]:
        raise InputError(
            f"{path}: {TOKEN_MAP} names {token_map.shape[0]} tokens, the head has {head.shape[0]} "
            "rows; rebuild the draft"
        )
