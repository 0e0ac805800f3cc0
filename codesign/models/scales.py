"""Scales of int4 checkpoints, looked at before a model is entered: others are refused when loaded.

Reads the scales of quantised matrices and nothing else, a tensor at a time. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codesign.errors import InputError

_SUFFIXES = (".scales", ".weight_scale")  # of AutoAWQ, of compressed-tensors
_LARGEST = 65280.0  # that kernels take (kernels/int4.py)
_FIRST_ABOVE = 65408.0  # rounded to bfloat16, as scales are when they are loaded, beyond it
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def check_scales(file: Path, entries: Mapping[str, dict[str, Any]]) -> None:
    """Check that kernels can take every scale of a quantised checkpoint's file.

    Args:
        file: In safetensors format.
        entries: Its header.

    Raises:
        InputError: If one is not finite or too large.
    """
    data = file.stat().st_size - max((e["data_offsets"][1] for e in entries.values()), default=0)
    for name, entry in entries.items():
        if not name.endswith(_SUFFIXES):
            continue
        scales = np.abs(_read(file, data, entry))
        refused = scales[~(scales < _FIRST_ABOVE)]  # a NaN is not below anything
        if refused.size:
            raise InputError(
                f"{file}: {refused.size} of {scales.size} scales in {name} are not finite or "
                f"beyond {_LARGEST:g}, first {refused[0]:g}; no int4 weights have such. Download "
                "or quantise the model again"
            )


def _read(file: Path, data: int, entry: dict[str, Any]) -> NDArray[np.float32]:
    first, end = entry["data_offsets"]
    kind = np.dtype(_STORED[entry["dtype"]])
    count = (end - first) // kind.itemsize
    stored = np.fromfile(file, kind, count, offset=data + first)
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
