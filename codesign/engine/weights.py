"""Tensors of Hugging Face checkpoints: one safetensors file, or shards with an index.

Reads the tensors asked for and nothing else; makes random ones for tests. Imports torch; knows
no model family.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from codesign.errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
REAL_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def read_tensors(directory: Path | str, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint in the type they are stored in.

    Args:
        directory: Holds ``model.safetensors``, or shards and their index.
        sizes: Name and expected shape of every tensor to read.

    Raises:
        InputError: If a file or a tensor is missing, broken, of another shape, or not of a
            floating-point type (quantised).
    """
    directory = Path(directory)
    tensors: dict[str, Tensor] = {}
    for path, names in _files(directory, list(sizes)).items():
        tensors.update(_read_file(path, {name: sizes[name] for name in names}))
    return tensors


def random_tensors(sizes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return random tensors for names and shapes: norms near 1, maps that keep a row's scale."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in sizes.items():
        noise = torch.randn(size, generator=generator)
        is_norm = name.endswith("norm.weight")
        tensors[name] = 1 + 0.1 * noise if is_norm else noise * size[-1] ** -0.5
    return tensors


def _files(directory: Path, names: list[str]) -> dict[Path, list[str]]:
    """Return which file holds which of the names."""
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise InputError(
                f"{directory} holds neither {SINGLE} nor {INDEX}; other weight formats are not "
                "read. Save the model with safetensors: model.save_pretrained(DIR)"
            )
        return {directory / SINGLE: names}
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise InputError(f"{index} is no index of shards: {err!r}. Download it again") from err
    files: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        if name not in shard_of:
            raise InputError(f"{index} lists no tensor {name}; config.json asks for it")
        files[directory / shard_of[name]].append(name)
    return files


def _read_file(path: Path, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            missing = [name for name in sizes if name not in held]
            if missing:
                raise InputError(
                    f"{path} holds no tensor {missing[0]} ({len(missing)} missing); "
                    "config.json and weights are not of one model"
                )
            tensors = {name: file.get_tensor(name) for name in sizes}
    except (OSError, SafetensorError) as err:
        raise InputError(f"{path} cannot be read: {err}. Download or copy it again") from err
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(sizes[name]):
            raise InputError(
                f"{path}: {name} is {tuple(tensor.shape)}, config.json asks for {sizes[name]}"
            )
        if tensor.dtype not in REAL_TYPES:
            raise InputError(
                f"{path}: {name} is {tensor.dtype}; quantised weights are not supported. "
                "Use the checkpoint in bfloat16 or float32"
            )
    return tensors
