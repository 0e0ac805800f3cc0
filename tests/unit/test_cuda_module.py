"""Launches of CUDA kernels against a driver that keeps what it is given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from codesign.errors import HardwareError
from codesign.kernels import cuda_module
from codesign.kernels.cuda_module import CudaKernel


class Pair(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_uint64), ("count", ctypes.c_int32))


class Driver:
    """Reads the arguments of a launch as a device would: while the call lasts."""

    CUlaunchConfig = CUlaunchAttribute = lambda self=None: SimpleNamespace(
        value=SimpleNamespace(clusterDim=SimpleNamespace())
    )
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster",
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early",
    )
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED="large clusters",
    )

    def __init__(self, *types: type) -> None:
        self.types = types
        self.launches: list[tuple[Any, Any, list[Any]]] = []
        self.limits: list[tuple[Any, str, int]] = []
        self.asked: list[tuple[Any, Any]] = []

    def cuLaunchKernelEx(self, config, function, at, extra):
        assert extra == 0
        places = (ctypes.c_void_p * len(self.types)).from_address(at)
        values = [kind.from_address(at) for kind, at in zip(self.types, places, strict=True)]
        read = [
            (value.pointer, value.count) if isinstance(value, Pair) else value.value
            for value in values
        ]
        self.launches.append((config, function, read))
        return (0,)

    def cuFuncSetAttribute(self, function, which, value):
        self.limits.append((function, which, value))
        return (0,)

    def cuOccupancyMaxActiveClusters(self, function, config):
        self.asked.append((function, config))
        return (0, 16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Devices, of which one is current, and streams; a kernel is named by its device."""
    state = SimpleNamespace(device=0, stream=0, loads=[])

    def load(source, name, options, device):
        state.loads.append((source, name, options, device))
        return f"{name} on {device}"

    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.device)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: state.stream, raising=False
    )
    monkeypatch.setattr(cuda_module, "_load", load)
    cuda_module._kernel.cache_clear()
    cuda_module._config.cache_clear()
    yield state
    cuda_module._kernel.cache_clear()
    cuda_module._config.cache_clear()


def drive(monkeypatch: pytest.MonkeyPatch, *types: type) -> Driver:
    driver = Driver(*types)
    monkeypatch.setattr(cuda_module, "bindings", lambda: SimpleNamespace(driver=driver))
    return driver


def test_a_kernel_that_is_kept_runs_on_the_device_that_is_current(gpu, monkeypatch):
    driver = drive(monkeypatch, ctypes.c_int32)
    kept = cuda_module.load_kernel("gemm.cu", "gemm", {"NT": 1})
    for device in (0, 1, 0, 1):
        gpu.device = device
        kept.launch((1,), 32, [7], shared_bytes=100_000)
        assert cuda_module.load_kernel("gemm.cu", "gemm", {"NT": 1}) is kept
    functions = [function for _, function, _ in driver.launches]
    assert functions == ["gemm on 0", "gemm on 1"] * 2
    assert [device for *_, device in gpu.loads] == [0, 1]
    # What one device allows says nothing of another.
    assert driver.limits == [(f"gemm on {device}", "shared", 100_000) for device in (0, 1)]


def test_kernels_that_cache_theirs_without_a_device_run_on_each(gpu, monkeypatch):
    from codesign.kernels import gemm, gemm_all_reduce
    from codesign.kernels.tiling import Tiling, layout

    driver = drive(monkeypatch)
    tiling = Tiling(4, 1)
    plan = layout(tiling, tiles=8, groups=4, num_row_tiles=1, num_sms=132)
    made = (gemm._kernel(1, tiling, 0, plan), gemm_all_reduce._kernel(1, tiling, 2, plan))
    for device in (0, 1):
        gpu.device = device
        for kernel in made:
            kernel.launch((1,), 32, [])
    names = ("gemm", "gemm_all_reduce")
    found = [function for _, function, _ in driver.launches]
    assert found == [f"{name} on {device}" for device in (0, 1) for name in names]


@pytest.mark.parametrize(
    ("capability", "reason"), [((8, 0), "found 8.0"), ((10, 0), "found 10.0"), ((9, 0), "missing")]
)
def test_a_gpu_that_runs_no_kernel_is_told_of_once(monkeypatch, capability, reason):
    def missing() -> None:
        raise HardwareError("cuda-bindings or NVRTC is missing")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(cuda_module, "bindings", missing)
    cuda_module._kernel.cache_clear()
    cuda_module.kernels_run.cache_clear()
    try:
        with pytest.warns(UserWarning, match=f"GPU 0 runs slower PyTorch operations.*{reason}"):
            assert not cuda_module.kernels_run(0)
        assert not cuda_module.kernels_run(0)  # silent: a warning would be an error
    finally:
        cuda_module._kernel.cache_clear()
        cuda_module.kernels_run.cache_clear()


@pytest.mark.parametrize("are_there", [True, False])
def test_attention_and_sums_over_ranks_ask_whether_kernels_run(monkeypatch, are_there):
    from codesign.engine.gpu import groups
    from codesign.kernels import fused_attention

    def kernels_run(device: int) -> bool:
        assert device == 3
        return are_there

    monkeypatch.setattr(groups, "kernels_run", kernels_run)
    monkeypatch.setattr(fused_attention, "kernels_run", kernels_run)
    gpu_3, setup = torch.device("cuda", 3), SimpleNamespace(folder="run", dtype="bfloat16")
    assert groups._shares_memory(setup, gpu_3) == are_there
    shape = {"rows": 8, "heads": 32, "kv_heads": 8, "head_dim": 128}
    assert fused_attention.fits(**shape, device=gpu_3) == are_there


def test_arguments_arrive_as_the_kernel_reads_them(gpu, monkeypatch):
    types = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, Pair)
    types += (ctypes.c_int32, ctypes.c_float)
    driver = drive(monkeypatch, *types)
    tensor = torch.zeros(3)
    kernel = CudaKernel("a.cu", "a", ())
    kernel.launch((1,), 32, [tensor, -5, 1e-5, None, Pair(1 << 40, -3), 1 << 30, 0.0])
    pointer, count, small, null, pair, large, zero = driver.launches[0][2]
    assert (pointer, count, null, pair) == (tensor.data_ptr(), -5, 0, (1 << 40, -3))
    assert small == ctypes.c_float(1e-5).value
    assert (large, zero) == (1 << 30, 0.0)


def test_a_launch_is_configured_once_for_each_shape_and_stream(gpu, monkeypatch):
    driver = drive(monkeypatch)
    kernel = CudaKernel("a.cu", "a", ())
    for stream in (0, 9, 0, 9):
        gpu.stream = stream
        kernel.launch((3, 2), 64, [], shared_bytes=1024, cluster=4, pdl=True)
    kernel.launch((3, 2), 64, [])
    first, second, third, fourth, plain = (config for config, _, _ in driver.launches)
    assert first is third
    assert second is fourth
    assert (first.hStream, second.hStream) == (0, 9)
    assert (first.gridDimX, first.gridDimY, first.gridDimZ) == (3, 2, 1)
    assert (first.blockDimX, first.sharedMemBytes, first.numAttrs) == (64, 1024, 2)
    assert first.attrs[0].value.clusterDim.x == 4
    assert first.attrs[1].value.programmaticStreamSerializationAllowed == 1
    assert (plain.sharedMemBytes, plain.numAttrs) == (0, 0)


def test_a_device_is_asked_once_how_many_clusters_fit(gpu, monkeypatch):
    driver = drive(monkeypatch)
    kernel = CudaKernel("a.cu", "a", ())
    for device in (0, 1, 0):
        gpu.device = device
        assert kernel.clusters_at_once(256, cluster=8, shared_bytes=200_000) == 16
    assert [function for function, _ in driver.asked] == ["a on 0", "a on 1"]
    assert [value for _, _, value in driver.limits] == [200_000, 200_000]
    config = driver.asked[0][1]
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (8, 256, 200_000)
    assert config.attrs[0].value.clusterDim.x == 8
