"""Machine code of CUDA sources, with a compiler that counts what it is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from codesign.errors import HardwareError
from codesign.kernels import nvrtc


class Compiler:
    """NVRTC's calls as cuda-bindings has them."""

    def __init__(self, version: tuple[int, int] = (13, 0), *, status: int = 0) -> None:
        self.version, self.status = version, status
        self.compiled: list[list[bytes]] = []

    def nvrtcVersion(self):
        return (0, *self.version)

    def nvrtcCreateProgram(self, text, name, count, headers, names):
        assert b"#include" not in text
        return (0, name)

    def nvrtcCompileProgram(self, program, count, options):
        self.compiled.append(options)
        return (self.status,)

    def nvrtcGetProgramLogSize(self, program):
        return (0, 5)

    def nvrtcGetProgramLog(self, program, log):
        return (0,)

    def nvrtcGetCUBINSize(self, program):
        return (0, 3)

    def nvrtcGetCUBIN(self, program, code):
        return (0,)

    def nvrtcDestroyProgram(self, program):
        return (0,)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    found = Compiler()
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(nvrtc, "bindings", lambda: SimpleNamespace(nvrtc=found))
    return found


def test_a_source_is_compiled_once_for_its_options_and_the_compilers_version(
    compiler: Compiler, tmp_path: Path
):
    for options in (("-DE=64",), ("-DE=64",), ("-DE=128",)):
        code = nvrtc.machine_code("all_reduce.cu", "sm_90a", options)
        assert len(code) == 3
    assert [options[-1] for options in compiler.compiled] == [b"-DE=64", b"-DE=128"]
    assert compiler.compiled[0][:2] == [b"-arch=sm_90a", b"-std=c++17"]
    compiler.version = (13, 1)
    nvrtc.machine_code("all_reduce.cu", "sm_90a", ("-DE=64",))
    assert len(compiler.compiled) == 3
    kept = sorted(path.name for path in (tmp_path / "home" / "kernels").iterdir())
    assert len(kept) == 3
    assert all(re.fullmatch(r"all_reduce-[0-9a-f]{32}\.cubin", name) for name in kept)


def test_a_cache_that_cannot_be_written_costs_time_alone(compiler: Compiler, tmp_path: Path):
    (tmp_path / "home").write_text("a file")
    for _ in range(2):
        with pytest.warns(UserWarning, match="compiled anew.*CODESIGN_HOME=FOLDER"):
            assert len(nvrtc.machine_code("all_reduce.cu", "sm_90a", ())) == 3
    assert len(compiler.compiled) == 2


@pytest.mark.parametrize("missing", ["module", "library"])
def test_who_has_no_compiler_is_told_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, missing: str
):
    def version() -> tuple[int, int, int]:
        raise RuntimeError('\nFailure finding "libnvrtc.so.13": No such file\nand more')

    def find(name: str) -> SimpleNamespace:
        if missing == "module":
            raise ImportError("No module named 'cuda'")
        return SimpleNamespace(nvrtcVersion=version)

    monkeypatch.setattr(nvrtc, "import_module", find)
    nvrtc.bindings.cache_clear()
    reason = "No module named 'cuda'" if missing == "module" else "libnvrtc.so.13"
    with pytest.raises(HardwareError, match=f"{reason}.*pip install cuda-bindings nvidia") as told:
        nvrtc.bindings()
    assert "\n" not in str(told.value)
