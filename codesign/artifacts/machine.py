"""The machine that a file was made on: its CPU, memory and GPUs. Imports no torch."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codesign.errors import HardwareError, counted


@functools.cache
def hardware() -> dict[str, Any]:
    """Return the machine in words and numbers; ``cores`` are those this process may use."""
    return {
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def usable_cores() -> list[int]:
    """Cores that this process may run on; none where the system does not say (not Linux)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def num_cores() -> int:
    """How many cores this process may use."""
    return len(usable_cores()) or os.cpu_count() or 1


def check_cores(workers: int, fix: str) -> None:
    """Refuse more workers than cores, with the advice ``fix``.

    Raises:
        HardwareError: If there are more.
    """
    cores = hardware()["cores"]
    if workers > cores:
        raise HardwareError(
            f"{workers} workers were requested, but this process may use "
            f"{counted(cores, 'CPU core')}. {fix}"
        )


def machine_name(hardware: Mapping[str, Any], device: str = "cuda") -> str:
    """Return what served on a machine that ``hardware()`` described.

    Args:
        hardware: Of the machine.
        device: "cuda" for its GPU, if it has one; else its CPU.
    """
    gpus = hardware.get("gpus") if device == "cuda" else None
    return gpus[0]["name"] if gpus else hardware["cpu"]


def short_gpu_name(name: str) -> str:
    """Return a GPU's name without maker, memory and socket: "NVIDIA H100 80GB HBM3" is "H100"."""
    parts = re.split(r"[\s-]+", name)
    return "-".join(part for part in parts if not _NOT_ITS_NAME.fullmatch(part)) or name


_NOT_ITS_NAME = re.compile(r"NVIDIA|GeForce|\d+GB|HBM\w*|SXM\d*|")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return None


def _gpus() -> list[dict[str, Any]]:
    """Ask nvidia-smi, so that planning on a GPU machine needs no torch."""
    tool = shutil.which("nvidia-smi")
    return [] if tool is None else [dict(gpu) for gpu in _listed_gpus(tool)]


@functools.cache  # it takes up to a second, and every file has a header
def _listed_gpus(tool: str) -> list[dict[str, Any]]:
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.split(", ") for line in answer.stdout.splitlines() if line.count(", ") == 2)
    return [
        {"name": name, "memory_bytes": int(float(mib) * 2**20), "driver": driver}
        for name, mib, driver in rows
    ]
