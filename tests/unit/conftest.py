"""Fixtures of unit tests: Triton kernels compiled for Hopper, where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import codesign

COMPILER = """
import json, sys, traceback
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
def failure(script, cubin):
    def keep(made):
        Path(cubin).write_bytes(made.asm["cubin"])
    try:
        exec(script, {"compiled": compiled, "keep": keep})
    except Exception:
        return traceback.format_exc()
for line in sys.stdin:
    print(json.dumps(failure(*json.loads(line))), flush=True)
"""


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that runs scripts, each with the path of its cubin, and says what failed."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    environment["PYTHONPATH"] = str(Path(codesign.__file__).parents[1])
    command, pipe = [sys.executable, "-c", COMPILER], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.fixture
def assert_keeps_values_in_registers(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[[str], None]:
    """Run a script that compiles kernels and keeps one, and look for spills in that.

    It runs in another process, as tests import Triton with its interpreter, and has
    ``compiled(kernel, types, constants, aligned, **options)``, of arguments that are "i32" where
    ``types`` says nothing else, those in ``aligned`` aligned to 16 ("*": all pointers); and
    ``keep(made)``.
    """

    def check(script: str) -> None:
        triton = pytest.importorskip("triton")
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        if not (tools / "ptxas").exists():
            pytest.skip("this Triton has no assembler for NVIDIA's GPUs")
        compiler, cubin = request.getfixturevalue("compiler"), str(tmp_path / "cubin")
        compiler.stdin.write(json.dumps([script, cubin]) + "\n")
        compiler.stdin.flush()
        failed = json.loads(compiler.stdout.readline())
        assert failed is None, failed
        words = [str(tools / "cuobjdump"), "-res-usage", cubin]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert "STACK:0" in usage, usage
        assert "LOCAL:0" in usage, usage

    return check
