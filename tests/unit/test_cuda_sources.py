"""CUDA sources compile for Hopper and keep their values in registers; no GPU is needed for that."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from codesign.kernels.cuda_module import source_text

NVCC = shutil.which("nvcc")
SOURCES = [
    ("all_reduce.cu", {"WORLD": 8, "THREADS": 64}),
    (
        "fused_attention.cu",
        {"E": 128, "MT": 2, "C": 16, "TAIL": 160, "STAGES": 2, "GROUP": 8, "PAGE": 0},
    ),
    (
        "fused_attention.cu",
        {"E": 64, "MT": 2, "C": 8, "TAIL": 32, "STAGES": 4, "GROUP": 3, "PAGE": 64},
    ),
    (
        "gemm.cu",
        {"BITS": 4, "NT": 1, "WARPS": 16, "TILES": 2, "BLOCKS": 1, "ACTIVATION": 1, "FIRST": 2},
    ),
    ("gemm.cu", {"BITS": 4, "NT": 2, "WARPS": 8, "TILES": 2, "BLOCKS": 1, "ACTIVATION": 0}),
    ("head.cu", {"BITS": 16, "NT": 1, "WARPS": 16, "TILES": 1, "BLOCKS": 1, "KEPT": 8}),
    (
        "gemm_all_reduce.cu",
        {"BITS": 4, "NT": 1, "WARPS": 16, "TILES": 2, "BLOCKS": 1, "WORLD": 4},
    ),
]


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("source", "defines"), SOURCES, ids=[name for name, _ in SOURCES])
def test_a_source_compiles_without_spilling(source: str, defines: dict[str, int], tmp_path: Path):
    text = tmp_path / source
    text.write_text(source_text(source))
    options = [f"-D{key}={value}" for key, value in defines.items()]
    command = [str(NVCC), "-arch=sm_90a", "-std=c++17", "-Xptxas=-v", "-cubin", *options]
    run = subprocess.run(
        [*command, "-o", str(tmp_path / "cubin"), str(text)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"Used \d+ registers", run.stderr), run.stderr
    assert re.findall(r"(\d+) bytes spill", run.stderr).count("0") == len(
        re.findall(r"bytes spill", run.stderr)
    ), run.stderr


def test_includes_are_pasted_once():
    text = source_text("gemm_all_reduce.cu")
    assert "#include" not in text
    assert text.count("struct Exchange {") == 1
