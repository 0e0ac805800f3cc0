"""Fixtures of unit tests: Triton kernels compiled for Hopper, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import codesign

BEGINNING = """
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
def compiled(kernel, types, constants, aligned=(), **options):
    names = kernel.arg_names
    types = {n: types.get(n, "i32") for n in names} | dict.fromkeys(constants, "constexpr")
    places = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
              if n in aligned or types[n][0] in aligned}
    source = ASTSource(kernel, types, constants, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
def keep(made):
    Path(sys.argv[1]).write_bytes(made.asm["cubin"])
"""


@pytest.fixture
def assert_keeps_values_in_registers(tmp_path: Path) -> Callable[[str], None]:
    """Run a script that compiles kernels and keeps one, and look for spills in that.

    It runs in a process of its own, as tests import Triton with its interpreter, and has
    ``compiled(kernel, types, constants, aligned, **options)``, of arguments that are "i32" where
    ``types`` says nothing else, those in ``aligned`` aligned to 16 ("*": all pointers); and
    ``keep(made)``.
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
        words = [sys.executable, "-c", BEGINNING + script, cubin]
        subprocess.run(words, env=environment, timeout=240, check=True)
        words = [str(tools / "cuobjdump"), "-res-usage", cubin]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert "STACK:0" in usage, usage
        assert "LOCAL:0" in usage, usage

    return check
