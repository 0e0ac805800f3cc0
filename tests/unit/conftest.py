"""Fixtures of unit tests: Triton kernels compiled for Hopper, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import codesign


@pytest.fixture
def assert_keeps_values_in_registers(tmp_path: Path) -> Callable[[str], None]:
    """Run a script that writes a kernel's cubin to ``argv[1]``, and look for spills.

    It runs in a process of its own, as tests import Triton with its interpreter.
    """

    def check(script: str) -> None:
        triton = pytest.importorskip("triton")
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        if not (tools / "ptxas").exists():
            pytest.skip("this Triton has no assembler for NVIDIA's GPUs")
        cache = str(tmp_path / "t")
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        environment["PYTHONPATH"] = str(Path(codesign.__file__).parents[1])
        cubin = str(tmp_path / "cubin")
        words = [sys.executable, "-c", script, cubin]
        subprocess.run(words, env=environment, timeout=240, check=True)
        words = [str(tools / "cuobjdump"), "-res-usage", cubin]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert "STACK:0" in usage, usage
        assert "LOCAL:0" in usage, usage

    return check
