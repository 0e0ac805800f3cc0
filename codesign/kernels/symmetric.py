"""Memory that the GPUs of a tensor-parallel group write into each other, and its bookkeeping.

The protocol is that of ``cuda/exchange.cuh``: slots that are empty (all bits set) until a packet
lies in them, in two halves used in turn. Imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from codesign.errors import HardwareError
from codesign.kernels.peer_memory import PeerMemory

PACKET = 8  # elements of bfloat16
ELEMENT_BYTES = 2
MAX_WORLD = 8
COMPILING = 60.0  # seconds that a rank may be late with a launch of a kernel it has to compile


class PeerLostError(HardwareError):
    """A GPU of the group has stopped answering."""


class DeviceExchange(ctypes.Structure):
    """``struct Exchange`` of exchange.cuh, passed to kernels by value."""

    _fields_ = (
        ("inbox", ctypes.c_uint64 * MAX_WORLD),
        ("calls", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("report", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        ("patience", ctypes.c_uint64),
    )


class Exchange:
    """One rank's end of a group's exchange. Make it with ``open_exchange`` or ``local_exchanges``.

    All ranks must call the same operations with the same shapes in the same order, all on one
    stream; graphs may be replayed in any order that is the same everywhere.

    Attributes:
        rank: This rank in the group.
        world: Ranks of the group.
        max_elements: Elements of bfloat16 that one call can exchange.
        group: Of the processes; None within one process.
        on_device: What kernels take; None on a CPU.
    """

    def __init__(
        self,
        inboxes: Sequence[int],
        *,
        rank: int,
        inbox: Tensor | None,
        max_elements: int = 0,
        group: dist.ProcessGroup | None = None,
        patience: float = 5.0,
    ) -> None:
        self.rank, self.world = rank, len(inboxes)
        self.max_elements, self.group = max_elements, group
        self.on_device: DeviceExchange | None = None
        self._inbox = inbox
        if inbox is None:
            return
        self._calls = torch.zeros(1, dtype=torch.int32, device=inbox.device)
        self._lost = torch.zeros_like(self._calls)
        # Kernels write it and the host reads it, without a copy.
        self._report = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.on_device = DeviceExchange(
            inbox=(ctypes.c_uint64 * MAX_WORLD)(*inboxes),
            calls=self._calls.data_ptr(),
            lost=self._lost.data_ptr(),
            report=self._report.data_ptr(),
            rank=rank,
            bytes=max_elements * ELEMENT_BYTES,
            patience=int(patience * 1e9),
        )
        self.reset()

    def reset(self, *, calls: int = 0) -> None:
        """Empty all slots and forget a lost peer. Every rank must do it.

        Args:
            calls: What the counter starts from: the number of calls made so far.
        """
        assert self._inbox is not None, "no memory is shared on a CPU"
        self._line_up()  # packets of calls that failed have arrived
        self._inbox.fill_(0xFF)
        counter = (calls << 16) & 0xFFFFFFFF
        self._calls.fill_(counter - (1 << 32) if counter >> 31 else counter)
        self._lost.zero_()
        self._report.zero_()
        self._line_up()

    def _line_up(self) -> None:
        assert self._inbox is not None, "no memory is shared on a CPU"
        torch.cuda.synchronize(self._inbox.device)
        if self.group is not None:
            # On the GPU, and without a warning in groups that have gloo, too.
            dist.all_reduce(torch.zeros(1, device=self._inbox.device), group=self.group)
            torch.cuda.synchronize(self._inbox.device)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Let launches inside wait for a rank that compiles; captured ones keep what was usual."""
        if self.on_device is None:
            yield
            return
        usual, self.on_device.patience = self.on_device.patience, int(COMPILING * 1e9)
        try:
            yield
        finally:
            self.on_device.patience = usual

    def check(self) -> None:
        """Raise if a kernel that has run so far waited in vain; costs no synchronisation.

        Raises:
            PeerLostError: If a packet did not come in time. Results since then are void.
        """
        if self.on_device is not None and (lost := int(self._report[0])):
            raise PeerLostError(
                f"rank {self.rank} waited {self.on_device.patience / 1e9:g} s in vain for rank "
                f"{lost - 1} of its tensor-parallel group; start the run again"
            )


def open_exchange(
    group: dist.ProcessGroup | None,
    *,
    max_elements: int,
    device: torch.device | str,
    patience: float = 5.0,
) -> Exchange:
    """Return this rank's end of a new exchange; every rank of the group must call it.

    Args:
        group: The tensor-parallel group; None for a group of one.
        max_elements: Elements of bfloat16 that one call can exchange, a multiple of 8. A GPU
            keeps 4 bytes of memory for each and for each rank.
        device: Where the operations will run.
        patience: Seconds after which a packet that has not come counts as lost.

    Raises:
        HardwareError: If the GPUs cannot reach each other's memory.
    """
    assert max_elements % PACKET == 0, f"{max_elements} elements are no whole packets"
    device = torch.device(device)
    world = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    if device.type == "cpu":
        return Exchange([0] * world, rank=rank, inbox=None, group=group)
    if group is None:
        return local_exchanges(1, max_elements=max_elements, device=device)[0]
    assert world <= MAX_WORLD, f"{world} ranks in a tensor-parallel group"
    memory = PeerMemory(_inbox_bytes(world, max_elements), group, device)
    return Exchange(
        memory.pointers,
        rank=rank,
        inbox=memory.own,
        max_elements=max_elements,
        group=group,
        patience=patience,
    )


def local_exchanges(
    world: int, *, max_elements: int, device: torch.device | str, patience: float = 5.0
) -> list[Exchange]:
    """Return the ranks' sides of an exchange whose ranks are streams of one GPU, for tests."""
    size = _inbox_bytes(world, max_elements)
    inboxes = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(world)]
    return [
        Exchange(
            [other.data_ptr() for other in inboxes],
            rank=rank,
            inbox=inbox,
            max_elements=max_elements,
            patience=patience,
        )
        for rank, inbox in enumerate(inboxes)
    ]


def _inbox_bytes(world: int, max_elements: int) -> int:
    return 2 * world * max_elements * ELEMENT_BYTES  # two halves
