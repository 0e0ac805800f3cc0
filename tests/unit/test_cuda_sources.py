"""CUDA sources compile for Hopper and keep their values in registers; no GPU is needed for that."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from codesign.kernels.nvrtc import SOURCES as SOURCE_FOLDER
from codesign.kernels.nvrtc import source_text

NVCC = shutil.which("nvcc")
TRITON = find_spec("triton")  # brings one
DUMP = shutil.which("cuobjdump") or (
    TRITON
    and TRITON.origin
    and shutil.which("cuobjdump", path=Path(TRITON.origin).parent / "backends/nvidia/bin")
)
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
        {"NT": 1, "WARPS": 16, "TILES": 2, "ACTIVATION": 1, "PACED": 2, "CLUSTER": 2, "CHUNKS": 2},
    ),
    ("gemm.cu", {"NT": 2, "WARPS": 8, "TILES": 2, "BLOCKS": 1, "ACTIVATION": 0}),
    (
        "gemm.cu",
        {"NT": 2, "WARPS": 16, "TILES": 1, "ACTIVATION": 1, "PACED": 2, "CLUSTER": 2, "CHUNKS": 2},
    ),
    (
        "gemm.cu",
        {"NT": 1, "WARPS": 8, "TILES": 2, "ACTIVATION": 2, "CLUSTER": 2, "CHUNKS": 2},
    ),
    (
        "gemm_all_reduce.cu",
        {"NT": 1, "WARPS": 16, "TILES": 2, "BLOCKS": 1, "WORLD": 4},
    ),
    (
        "fused_attention.cu",
        {"E": 128, "MT": 2, "C": 8, "TAIL": 160, "STAGES": 3, "GROUP": 8, "PAGE": 64},
    ),
    # The 70B's on four GPUs: qkv, which spills where cluster and chunks are unknown; down.
    (
        "gemm.cu",
        {"NT": 1, "WARPS": 16, "TILES": 2, "ACTIVATION": 0, "PACED": 2, "CLUSTER": 4, "CHUNKS": 1},
    ),
    (
        "gemm_all_reduce.cu",
        {"NT": 1, "WARPS": 14, "TILES": 2, "WORLD": 4, "CLUSTER": 4, "CHUNKS": 1},
    ),
    ("fixed_rows.cu", {"ROWS": 64, "WARPS": 14, "CLUSTER": 4}),
    (
        "many_rows.cu",
        {"ROWS": 64, "TEAMS": 2, "BLOCKS": 2, "STAGES": 2, "ACTIVATION": 1, "SEVERAL": 0}
        | {"WARPS": 16, "CLUSTER": 4},
    ),
    (
        "many_rows.cu",
        {"ROWS": 32, "TEAMS": 1, "BLOCKS": 2, "STAGES": 6, "ACTIVATION": 0, "SEVERAL": 1}
        | {"WARPS": 16, "CLUSTER": 2},
    ),
]

NAMES = [name for name, _ in SOURCES]
BETWEEN_CHUNKS = 16  # bytes that a map which loads the next chunk's rows ahead may spill there
ATTENTION, WITH_NORM, MAPS = 1, 3, [i for i, name in enumerate(NAMES) if "gemm" in name]
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
needs_dump = pytest.mark.skipif(
    NVCC is None or DUMP is None, reason="nvcc or cuobjdump is not installed"
)
Compile = Callable[[int], tuple[str, Path]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles one of the sources: what ptxas says of it, and the machine code."""
    folder = tmp_path_factory.mktemp("kernels")

    @cache
    def compile_source(index: int) -> tuple[str, Path]:
        source, defines = SOURCES[index]
        text, cubin = folder / source, folder / f"{index}.cubin"
        text.write_text(source_text(source))
        options = [f"-D{key}={value}" for key, value in defines.items()]
        command = [str(NVCC), "-arch=sm_90a", "-std=c++17", "-Xptxas=-v", "-cubin", *options]
        command += ["-o", str(cubin), str(text)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert run.returncode == 0, run.stderr
        return run.stderr, cubin

    return compile_source


def instructions(cubin: Path) -> list[str]:
    """Names of a kernel's instructions, in order."""
    command = [str(DUMP), "-sass", str(cubin)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    line = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([\w.]+)", re.MULTILINE)
    return line.findall(run.stdout)


def innermost_loop(cubin: Path, product: str) -> list[str]:
    """Names of the instructions of the smallest loop around a kernel's last ``product``."""
    command = [str(DUMP), "-sass", str(cubin)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    line = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([\w.]+)(.*);", re.MULTILINE)
    found = [(int(at, 16), name, rest) for at, name, rest in line.findall(run.stdout)]
    last = max(at for at, name, _ in found if name.startswith(product))
    jumps = [(int(rest.split()[-1], 16), at) for at, name, rest in found if name == "BRA"]
    loops = [(at - to, to, at) for to, at in jumps if to <= last < at]
    _, begin, end = min(loops)
    return [name for at, name, _ in found if begin <= at <= end]


@needs_nvcc
@pytest.mark.parametrize("index", range(len(SOURCES)), ids=NAMES)
def test_a_source_compiles_without_spilling(index: int, compiled: Compile):
    log, _ = compiled(index)
    assert re.search(r"Used \d+ registers", log), log
    spills = re.findall(r"(\d+) bytes spill", log)
    allowed = BETWEEN_CHUNKS if index == WITH_NORM else 0
    assert all(int(size) <= allowed for size in spills), log


@needs_dump
@pytest.mark.parametrize("index", MAPS)
def test_a_step_of_a_map_touches_no_memory_of_its_thread(index: int, compiled: Compile):
    step = innermost_loop(compiled(index)[1], "IMMA")
    assert len([name for name in step if name.startswith("IMMA")]) >= 16
    assert not {"LDL", "STL"} & {name.partition(".")[0] for name in step}


@needs_dump
@pytest.mark.parametrize(("index", "most"), [(3, 150), (5, 120)], ids=["8 rows", "16 rows"])
def test_a_step_is_mostly_products_and_what_they_need(index: int, most: int, compiled: Compile):
    """Two tiles of 8 rows, one of 16: 16 products; lanes that a wait parted meet before them."""
    step = innermost_loop(compiled(index)[1], "IMMA")
    assert len([name for name in step if name.startswith("IMMA")]) == 16
    assert len(step) < most
    first = next(at for at, name in enumerate(step) if name.startswith("IMMA"))
    waits = [at for at, name in enumerate(step) if name.startswith("SYNCS.PHASECHK")]
    assert "WARPSYNC.ALL" in step[waits[0] : first]


@needs_dump
@pytest.mark.parametrize("index", MAPS)
def test_a_map_waits_for_no_fence_of_the_whole_gpu(index: int, compiled: Compile):
    found = instructions(compiled(index)[1])
    assert "UCGABAR_ARV" in found
    assert not [name for name in found if name.startswith("MEMBAR")]


@needs_dump
@pytest.mark.parametrize("index", [i for i, name in enumerate(NAMES) if name == "many_rows.cu"])
def test_products_of_a_group_are_not_waited_for_one_by_one(index: int, compiled: Compile):
    """Nor does an operand come from registers that the lanes of a warp may have differently."""
    log, cubin = compiled(index)
    assert "serialized" not in log
    found = instructions(cubin)
    products = [i for i, name in enumerate(found) if name.startswith("IGMMA")]
    assert len(products) == 8
    between = found[products[0] : products[3]] + found[products[4] : products[7]]
    assert "R2UR" not in between
    # A stage is freed behind what depends on all that was loaded from it.
    after = found[products[7] :]
    freed = next(i for i, name in enumerate(after) if name.startswith("SYNCS.ARRIVE"))
    assert "POPC" in after[:freed]


@needs_dump
def test_the_norm_is_loaded_before_the_wait_for_the_kernel_in_front(compiled: Compile):
    found = instructions(compiled(WITH_NORM)[1])
    letters = {"LDG.E.128": "x", "ACQBULK": "w"}
    order = "".join(letters.get(name[:9], "") for name in found)
    first = re.search("x+w?", order)
    assert first is not None
    assert first.group() == "xxxxw", order


@needs_dump
def test_attention_begins_without_a_fence(compiled: Compile):
    found = instructions(compiled(ATTENTION)[1])
    start = found[: found.index("ACQBULK")]
    assert "UCGABAR_ARV" in start
    assert not [name for name in start if name.startswith("MEMBAR")]


def test_attention_lets_nobody_start_before_all_in_front_of_it_is_complete():
    """Maps let the next kernel start at once, and attention reads old keys before it waits.

    Whatever was launched before an earlier attention is complete when the next one starts: it
    takes that one's word.
    """
    text = (SOURCE_FOLDER / "fused_attention.cu").read_text()
    assert text.count("release_next();") == 1
    assert text.index("wait_for_previous();") < text.index("release_next();")
    assert "griddepcontrol" not in text


def test_includes_are_pasted_once():
    text = source_text("gemm_all_reduce.cu")
    assert "#include" not in text
    assert text.count("struct Exchange {") == 1
