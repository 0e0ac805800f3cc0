"""CUDA C++ kernels: compiled at first use (nvrtc.py), launched so that captured graphs hold them.

Imports torch; cuda-bindings, which comes with PyTorch, only when a kernel is loaded.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from codesign.errors import HardwareError
from codesign.kernels.nvrtc import bindings, checked, machine_code

_ARCHITECTURE = "sm_90a"  # with Hopper's own instructions
Argument = Tensor | int | float | ctypes.Structure | None


def load_kernel(source: str, name: str, defines: Mapping[str, int] | None = None) -> CudaKernel:
    """Return a kernel, loaded on the current device; the first call must not be captured.

    It may be kept and launched on any device: where it was not loaded before, its first launch
    there loads it, and must not be captured either.

    Args:
        source: File name in ``codesign/kernels/cuda``.
        name: The kernel, declared ``extern "C"``.
        defines: Macros, as ``-D`` options.

    Raises:
        HardwareError: If the device cannot run it, or NVRTC or cuda-bindings is missing.
    """
    kernel = _kernel(source, name, tuple(f"-D{k}={v}" for k, v in sorted((defines or {}).items())))
    kernel.load()
    return kernel


@cache
def kernels_run(device: int) -> bool:
    """Return whether the kernels run on a GPU, the current one; if not, say why, once."""
    smallest = {"NT": 1, "WARPS": 1, "TILES": 1, "BLOCKS": 1, "ACTIVATION": 0}
    try:
        load_kernel("gemm.cu", "gemm", smallest)
    except HardwareError as error:
        warnings.warn(f"GPU {device} runs slower PyTorch operations: {error}", stacklevel=2)
        return False
    return True


@cache
def _kernel(source: str, name: str, options: tuple[str, ...]) -> CudaKernel:
    return CudaKernel(source, name, options)


def _load(source: str, name: str, options: tuple[str, ...], device: int) -> Any:
    """Return a kernel's function on a device, which is the current one."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise HardwareError(
            f"the CUDA kernels are for compute capability 9.0 (H100, H200), found {major}.{minor}"
        )
    driver = bindings().driver
    torch.cuda.current_stream(device).synchronize()  # makes the device's context current
    module = checked(driver.cuModuleLoadData(machine_code(source, _ARCHITECTURE, options)))
    return checked(driver.cuModuleGetFunction(module, name.encode()))


@dataclass(slots=True)
class _Loaded:
    """A kernel on one device, what its launches may take there, how many clusters fit at once."""

    function: Any
    shared_bytes: int = 48 << 10
    cluster: int = 8
    at_once: dict[tuple[int, int, int], int] = field(default_factory=dict)


class CudaKernel:
    """A kernel of a source, on every device that it is launched on."""

    def __init__(self, source: str, name: str, options: tuple[str, ...]) -> None:
        self._origin = source, name, options
        self._loaded: dict[int, _Loaded] = {}

    def load(self) -> None:
        """Compile and load the kernel for the current device, where that has not been done."""
        device = torch.cuda.current_device()
        if device not in self._loaded:
            self._loaded[device] = _Loaded(_load(*self._origin, device))

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        pdl: bool = False,
    ) -> None:
        """Launch on PyTorch's current device and stream, without waiting.

        Args:
            grid: Blocks along x, and y and z if given.
            block: Threads of a block.
            args: The kernel's arguments in order: a tensor or None is a pointer, an int is an
                int32, a float a float32; a structure goes as it is.
            shared_bytes: Dynamic shared memory of a block.
            cluster: Blocks of a cluster, along x.
            pdl: Let the kernel start before the one in front of it has ended; it then must execute
                ``griddepcontrol.wait`` before it touches that one's results.
        """
        device = torch.cuda.current_device()
        if device not in self._loaded:
            self.load()
        loaded = self._loaded[device]
        if shared_bytes > loaded.shared_bytes or cluster > loaded.cluster:
            _allow(loaded, shared_bytes, cluster)
        stream = torch._C._cuda_getCurrentRawStream(device)  # a Stream object costs more than this
        config = _config(grid, block, stream, shared_bytes, cluster, pdl)
        values = _values(args)
        at = ctypes.addressof(ctypes.c_char.from_buffer(values))
        # The driver copies the values, from wherever they lie, before it returns.
        checked(bindings().driver.cuLaunchKernelEx(config, loaded.function, at, 0))

    def clusters_at_once(self, block: int, *, cluster: int, shared_bytes: int = 0) -> int:
        """Return how many clusters of such a launch the current device runs at the same time."""
        self.load()
        of = self._loaded[torch.cuda.current_device()]
        if (block, cluster, shared_bytes) not in of.at_once:
            _allow(of, shared_bytes, cluster)
            config = _config((cluster,), block, 0, shared_bytes, cluster, False)
            found = checked(bindings().driver.cuOccupancyMaxActiveClusters(of.function, config))
            of.at_once[block, cluster, shared_bytes] = found
        return of.at_once[block, cluster, shared_bytes]


def _allow(loaded: _Loaded, shared_bytes: int, cluster: int) -> None:
    """Raise the function's limits where a launch needs more than every device grants."""
    driver = bindings().driver
    which = driver.CUfunction_attribute
    if shared_bytes > loaded.shared_bytes:
        limit = which.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(loaded.function, limit, shared_bytes))
        loaded.shared_bytes = shared_bytes
    if cluster > loaded.cluster:
        allowed = which.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        checked(driver.cuFuncSetAttribute(loaded.function, allowed, 1))
        loaded.cluster = cluster


def _values(args: Sequence[Argument]) -> bytearray:
    """Return where each of the arguments lies, and then their values, eight bytes each."""
    count = len(args)
    values = bytearray(16 * count or 1)
    start = ctypes.addressof(ctypes.c_char.from_buffer(values)) + 8 * count
    places = [*range(start, start + 8 * count, 8)]
    words = [arg if type(arg) is int else _word(arg) for arg in args]
    if None in words:  # structures are read from where they are
        for index, arg in enumerate(args):
            if isinstance(arg, ctypes.Structure):
                places[index], words[index] = ctypes.addressof(arg), 0
    struct.pack_into(f"{2 * count}q", values, 0, *places, *words)
    return values


def _word(arg: Argument) -> int | None:
    """Return an argument's bits, those of an int32 with its sign; None of a structure."""
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    if isinstance(arg, float):
        return _bits(arg)
    if isinstance(arg, ctypes.Structure):
        return None
    return arg or 0


@lru_cache(maxsize=256)
def _bits(value: float) -> int:
    """Return the bits of a float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


# Filling in a configuration takes longer than a launch. One is never changed, so threads may share
# it; with the stream in the key, there is nothing to set.
@lru_cache(maxsize=4096)
def _config(
    grid: tuple[int, ...], block: int, stream: int, shared_bytes: int, cluster: int, pdl: bool
) -> Any:
    """Return a launch's configuration."""
    driver = bindings().driver
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    config.attrs = _attributes(driver, cluster, pdl)
    config.numAttrs = len(config.attrs)
    return config


def _attributes(driver: Any, cluster: int, pdl: bool) -> list[Any]:
    """Return the launch attributes of a cluster size and of programmatic dependent launch."""
    attributes = []
    if cluster > 1:
        shape = driver.CUlaunchAttribute()
        shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape.value.clusterDim.x = cluster
        shape.value.clusterDim.y = shape.value.clusterDim.z = 1
        attributes.append(shape)
    if pdl:
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    return attributes
