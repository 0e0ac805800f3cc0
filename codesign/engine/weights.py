"""Tensors of Hugging Face checkpoints: one safetensors file, or shards with an index.

Reads the parts of tensors asked for and nothing else. Imports torch; knows no model family.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from codesign.errors import InputError
from codesign.models.importing import INDEX, INTEGER_TYPES, SINGLE
from codesign.models.quantization import TensorSpec

REAL_TYPES = ("F32", "F16", "BF16", "F64")


class TensorFiles:
    """The safetensors files of a checkpoint, opened but not read.

    Every tensor's name, shape and type is checked at once; values are mapped into memory and
    read part by part, so that a rank touches only its own.

    Args:
        directory: Holds ``model.safetensors``, or shards and their index.
        expected: Name and shape of every tensor that may be asked for.

    Raises:
        InputError: If a file or a tensor is missing, broken, of another shape or type.
    """

    def __init__(self, directory: Path | str, expected: Mapping[str, TensorSpec]) -> None:
        self._slices: dict[str, Any] = {}
        for path, names in _files(Path(directory), list(expected)).items():
            self._slices |= _open(path, {name: expected[name] for name in names})

    def read(self, name: str, *spans: tuple[int, int]) -> Tensor:
        """Return a tensor, or from each of its first dimensions the entries [start, stop)."""
        return self._slices[name][tuple(slice(*span) for span in spans) or ...]


def read_tensors(directory: Path | str, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint in the type they are stored in.

    Args:
        directory: Holds ``model.safetensors``, or shards and their index.
        sizes: Name and expected shape of every tensor to read.

    Raises:
        InputError: If a file or a tensor is missing, broken, of another shape, or not of a
            floating-point type (quantised).
    """
    files = TensorFiles(directory, {name: TensorSpec(size) for name, size in sizes.items()})
    return {name: files.read(name) for name in sizes}


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


def _open(path: Path, expected: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return a lazy slice of each tensor; the slices keep the file open."""
    try:
        file = safe_open(path, framework="pt")
        held = set(file.keys())
        missing = [name for name in expected if name not in held]
        if missing:
            raise InputError(
                f"{path} holds no tensor {missing[0]} ({len(missing)} missing); "
                "config.json and weights are not of one model"
            )
        slices = {name: file.get_slice(name) for name in expected}
    except (OSError, SafetensorError) as err:
        raise InputError(f"{path} cannot be read: {err}. Download or copy it again") from err
    for name, spec in expected.items():
        _check(path, name, slices[name], spec)
    return slices


def _check(path: Path, name: str, found: Any, spec: TensorSpec) -> None:
    size, kind = tuple(found.get_shape()), found.get_dtype()
    if size != spec.size:
        raise InputError(f"{path}: {name} is {size}, config.json asks for {spec.size}")
    if kind not in (INTEGER_TYPES if spec.is_integer else REAL_TYPES):
        reason = (
            "its config.json says that it holds integers"
            if spec.is_integer
            else "quantised weights are not supported without a quantization_config"
        )
        raise InputError(
            f"{path}: {name} is {kind}; {reason}. Use the checkpoint in bfloat16 or float32"
        )
