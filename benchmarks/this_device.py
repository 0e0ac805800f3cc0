"""The GPU that benchmarks run on, by its data sheet. Imports no torch."""

from __future__ import annotations

from functools import cache

from codesign.artifacts.machine import hardware
from codesign.fit.devices import Device, device_of, load_device
from codesign.fit.roofline import KV_SHARE

DEFAULT = "h200"  # where there is no GPU, or one without a data sheet here


@cache
def this_device() -> Device:
    """This machine's GPU, or ``DEFAULT``."""
    gpus = hardware()["gpus"]
    return (device_of(gpus[0]["name"]) if gpus else None) or load_device(DEFAULT)


def read_bandwidth() -> float:
    """Bytes per second of a pure read: the data sheet's, by the share measured on an H200."""
    return KV_SHARE * this_device().memory_bandwidth
