"""Memory of a GPU that the other ranks of its host write into: CUDA's inter-process handles.

PyTorch's symmetric memory maps the same, but its ranks meet at keys that every process counts for
itself: a process that has served a run before waits at other keys than its fresh followers, for
ever. Imports torch; cuda-bindings, which comes with it, when memory is shared.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from codesign.kernels.nvrtc import bindings, checked

_PAGE = 2 << 20  # smaller allocations share a block with others, and a handle is of the block
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class PeerMemory:
    """As many bytes on every rank of a group, and where this GPU sees each of them.

    Every rank of the group must make it at the same time. It stays until the process ends: a kernel
    may still wait in it after a run that lost a rank, and freeing it would wait for the kernel.

    Args:
        size: Bytes.
        group: Ranks on GPUs of one host.
        device: Of this rank.

    Attributes:
        own: (size,) uint8, this rank's.
        pointers: Of every rank's bytes, in the group's order.

    Raises:
        HardwareError: If the GPUs cannot reach each other's memory.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()  # makes the device's context current
        driver = bindings().driver
        own = checked(driver.cuMemAlloc(-(-size // _PAGE) * _PAGE))
        handle = checked(driver.cuIpcGetMemHandle(own))
        handles = _gathered(ctypes.string_at(handle.getPtr(), _HANDLE_BYTES), group, device)
        rank = dist.get_rank(group)
        opened = [
            None if other == rank else _opened(driver, words) for other, words in enumerate(handles)
        ]
        self.pointers = [int(own if p is None else p) for p in opened]
        self.own = torch.as_tensor(_Bytes(int(own), size), device=device)


class _Bytes:
    """Device memory as the interface that tensors are made from."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _gathered(handle: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Return every rank's handle."""
    own = torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(device)
    world = dist.get_world_size(group)
    every: Tensor = torch.empty(world * _HANDLE_BYTES, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(every, own, group=group)
    return [bytes(words) for words in every.view(world, _HANDLE_BYTES).tolist()]


def _opened(driver: Any, words: bytes) -> Any:
    """Map another rank's memory into this process."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), words, _HANDLE_BYTES)
    return checked(driver.cuIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
