"""A random target and a draft that agrees with it now and then, so that nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from codesign.engine.weights import random_tensors
from codesign.models.shape import model_shape


def write_random_pair(
    root: Path, config: Mapping[str, Any], *, target: str = "target", noise: float = 0.05
) -> None:
    """Write the folders ``target`` and "draft" below ``root``, without tokenizers.

    Args:
        root: An empty folder.
        config: Both models' config.json.
        target: Name of the target's folder.
        noise: On the draft's matrices, in their standard deviations.
    """
    for name in (target, "draft"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    state = random_tensors(model_shape(root / target).tensors(), seed=0)
    state = {k: (v * (4.0 if "lm_head" in k else 1.0)).bfloat16() for k, v in state.items()}
    generator = torch.Generator().manual_seed(1)
    noisy = {}
    for name, tensor in state.items():
        drawn = torch.randn(tensor.shape, generator=generator).bfloat16()
        noisy[name] = tensor + noise * tensor.std() * drawn if tensor.ndim == 2 else tensor
    save_file(state, root / target / "model.safetensors")
    save_file(noisy, root / "draft" / "model.safetensors")
