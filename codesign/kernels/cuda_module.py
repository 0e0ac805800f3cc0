"""CUDA C++ kernels without a compiler to install: NVRTC at first use, launched where graphs see it.

A source is a file of ``codesign/kernels/cuda``; what it includes is found there, and it includes no
CUDA header, so that NVRTC, which every CUDA build of PyTorch brings, is all that is needed. The
machine code is kept under the user's cache directory by the hash of everything that went into it.

Imports torch; cuda-bindings, which comes with PyTorch, only when a kernel is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from codesign.artifacts import cache_dir
from codesign.errors import HardwareError

SOURCES = Path(__file__).with_name("cuda")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)

Argument = Tensor | int | float | ctypes.c_int64 | ctypes.c_uint64 | ctypes.Structure | None


def load_kernel(source: str, name: str, defines: Mapping[str, int] | None = None) -> CudaKernel:
    """Return a kernel for the current device; the first call compiles it and must not be captured.

    Args:
        source: File name in ``codesign/kernels/cuda``.
        name: The kernel, declared ``extern "C"``.
        defines: Macros, as ``-D`` options.

    Raises:
        HardwareError: If the device cannot run it, or NVRTC or cuda-bindings is missing.
    """
    options = tuple(f"-D{key}={value}" for key, value in sorted((defines or {}).items()))
    return _load(source, name, options, torch.cuda.current_device())


@cache
def _load(source: str, name: str, options: tuple[str, ...], device: int) -> CudaKernel:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        raise HardwareError(
            f"the CUDA kernels need compute capability 9.0, found {major}.{minor}; "
            "the engine uses its PyTorch operations there"
        )
    architecture = f"sm_{major}{minor}a"  # the suffix opens the generation's own instructions
    driver = _bindings().driver
    torch.cuda.current_stream(device).synchronize()  # makes the device's context current
    module = checked(driver.cuModuleLoadData(_machine_code(source, architecture, options)))
    function = checked(driver.cuModuleGetFunction(module, name.encode()))
    return CudaKernel(function)


class CudaKernel:
    """A loaded kernel."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._shared_bytes = 0

    def launch(
        self,
        grid: Sequence[int],
        block: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        pdl: bool = False,
    ) -> None:
        """Launch on PyTorch's current stream, without waiting.

        Args:
            grid: Blocks along x, and y and z if given.
            block: Threads of a block.
            args: The kernel's arguments in order: a tensor or None is a pointer, an int is an
                int32, a float a float32; a ctypes value goes as it is.
            shared_bytes: Dynamic shared memory of a block.
            cluster: Blocks of a cluster, along x.
            pdl: Let the kernel start before the one in front of it has ended; it then must execute
                ``griddepcontrol.wait`` before it touches that one's results.
        """
        driver = _bindings().driver
        self._allow(driver, shared_bytes, cluster)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs = _attributes(driver, cluster, pdl)
        config.numAttrs = len(config.attrs)
        values = [_as_c(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        at = ctypes.addressof(pointers)
        checked(driver.cuLaunchKernelEx(config, self._function, at, 0))

    def _allow(self, driver: Any, shared_bytes: int, cluster: int) -> None:
        """Raise the function's limits where a launch needs more than every device grants."""
        which = driver.CUfunction_attribute
        if shared_bytes > max(self._shared_bytes, 48 << 10):
            limit = which.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(self._function, limit, shared_bytes))
            self._shared_bytes = shared_bytes
        if cluster > 8:
            allowed = which.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            checked(driver.cuFuncSetAttribute(self._function, allowed, 1))


def _as_c(arg: Argument) -> Any:
    """Return an argument as the C value that a kernel takes."""
    if arg is None:
        return ctypes.c_void_p(None)
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, int):
        return ctypes.c_int32(arg)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return arg


def _attributes(driver: Any, cluster: int, pdl: bool) -> list[Any]:
    """Return the launch attributes of a cluster size and of programmatic dependent launch."""
    attributes = []
    if cluster > 1:
        shape = driver.CUlaunchAttribute()
        shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape.value.clusterDim.x, shape.value.clusterDim.y = cluster, 1
        shape.value.clusterDim.z = 1
        attributes.append(shape)
    if pdl:
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    return attributes


def source_text(source: str) -> str:
    """Return a source with its includes pasted in, each once."""
    seen: set[str] = set()

    def paste(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return _INCLUDE.sub(paste, (SOURCES / name).read_text())

    return _INCLUDE.sub(paste, (SOURCES / source).read_text())


def _machine_code(source: str, architecture: str, options: tuple[str, ...]) -> bytes:
    """Return the cubin of a source, from the cache if it was compiled before."""
    nvrtc = _bindings().nvrtc
    text = source_text(source)
    version = checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((text, architecture, options, version)).encode()).hexdigest()[:32]
    path = cache_dir() / "kernels" / f"{Path(source).stem}-{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compile(nvrtc, text, source, (f"-arch={architecture}", "-std=c++17", *options))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks compile at the same time: each writes its own file, and the last rename wins.
    draft = path.with_suffix(f".{torch.cuda.current_device()}")
    draft.write_bytes(code)
    draft.replace(path)
    return code


def _compile(nvrtc: Any, text: str, source: str, options: tuple[str, ...]) -> bytes:
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], []))
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    assert int(status) == 0, f"{source} does not compile:\n{log.decode()}"
    code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def cuda_driver() -> Any:
    """Return cuda-bindings' driver module.

    Raises:
        HardwareError: If it is missing.
    """
    return _bindings().driver


@cache
def _bindings() -> Any:
    """Return cuda-bindings' modules ``driver`` and ``nvrtc``."""
    try:
        driver, nvrtc = (import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc"))
    except ImportError as error:
        raise HardwareError(
            f"cuda-bindings is missing ({error}); install it: pip install cuda-bindings"
        ) from error
    return SimpleNamespace(driver=driver, nvrtc=nvrtc)


def checked(result: tuple[Any, ...]) -> Any:
    """Return what a CUDA call gave besides its status.

    Raises:
        HardwareError: If the status is not success.
    """
    status, *values = result
    if int(status) != 0:
        raise HardwareError(f"CUDA call failed: {status!r}; see nvidia-smi for the device's state")
    return values[0] if len(values) == 1 else tuple(values)
