"""GPUs by their data sheets: memory, arithmetic and links (codesign/data/devices.json).

Must not import torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codesign.artifacts.machine import short_gpu_name
from codesign.errors import InputError

_FILE = Path(__file__).parents[1] / "data" / "devices.json"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; every figure stands in the source.

    Attributes:
        name: As the command line names it.
        gpu: Its full name.
        memory_bytes: Of one GPU.
        memory_bandwidth: Bytes per second.
        bf16_flops: Floating-point operations per second of dense bf16 matrix products.
        fp8_flops: The same for fp8; None where there is no such unit.
        link: How GPUs of one machine are joined.
        link_bandwidth: Bytes per second that a GPU sends to its peers, one way.
        source: Data sheet.
    """

    name: str
    gpu: str
    memory_bytes: float
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    link: Literal["nvlink", "pcie"]
    link_bandwidth: float
    source: str


def devices() -> dict[str, Device]:
    """All devices by name."""
    entries = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: Device(name=name, **entry) for name, entry in entries.items()}


def load_device(name: str) -> Device:
    """The device of a name such as "h100".

    Raises:
        InputError: If there is none.
    """
    known = devices()
    if name.lower() not in known:
        raise InputError(f"unknown device {name!r}; known are {', '.join(known)}. Fix: --device")
    return known[name.lower()]


def device_of(gpu: str) -> Device | None:
    """The device of a GPU by its driver's name, as "NVIDIA H100 80GB HBM3"; None if unknown.

    An "H100 PCIe" or an "H200 NVL" is another GPU than the one of the data sheet.
    """
    known, name = devices(), short_gpu_name(gpu).lower()
    size = re.search(r"\d+gb", gpu.lower())
    return (known.get(f"{name}-{size[0]}") if size else None) or known.get(name)
