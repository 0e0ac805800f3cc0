"""The GPU that benchmarks run on, by its data sheet. Imports no torch."""

from __future__ import annotations

import re
from functools import cache

from codesign.artifacts.machine import hardware, short_gpu_name
from codesign.fit.devices import Device, devices, load_device
from codesign.fit.roofline import KV_SHARE

DEFAULT = "h200"  # where there is no GPU, or one without a data sheet here


@cache
def this_device() -> Device:
    """This machine's GPU, or ``DEFAULT``."""
    gpus = hardware()["gpus"]
    return (device_of(gpus[0]["name"]) if gpus else None) or load_device(DEFAULT)


def device_of(gpu: str) -> Device | None:
    """The device of a GPU by its driver's name, as "NVIDIA H100 80GB HBM3"; None if unknown.

    An "H100 PCIe" or an "H200 NVL" is another GPU than the one of the data sheet.
    """
    known, name = devices(), short_gpu_name(gpu).lower()
    size = re.search(r"\d+gb", gpu.lower())
    return (known.get(f"{name}-{size[0]}") if size else None) or known.get(name)


def read_bandwidth() -> float:
    """Bytes per second of a pure read: the data sheet's, by the share measured on an H200."""
    return KV_SHARE * this_device().memory_bandwidth
