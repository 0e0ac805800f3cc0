"""Measurements of a tensor-parallel group: a process a GPU, and what its ranks agree on.

Ranks agree over the host (gloo), so that no kernel of NCCL runs near what is timed. The sums of a
forward go through the exchange, as in the engine.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

from codesign.engine.gpu.tensor_group import ProcessGroupRank
from codesign.kernels.symmetric import Exchange, open_exchange

MAX_ELEMENTS = 32 * 8192  # of a sum
LEAD = 400_000  # cycles, 0.2 ms: in which the host queues what is timed


class Ranks:
    """One rank's end of those that measure together.

    Args:
        group: All ranks; it needs gloo on a CPU.
        exchange: Theirs.
    """

    def __init__(self, group: dist.ProcessGroup, exchange: Exchange) -> None:
        self.rank = dist.get_rank(group)
        self.exchange = exchange
        self.tensor_group = ProcessGroupRank(group, exchange)
        self._group = group

    def meet(self) -> None:
        """Wait until all ranks are here."""
        dist.all_reduce(torch.zeros(1), group=self._group)

    def line_up(self) -> None:
        """Let the GPUs go on at the same time, with what the host queues next."""
        self.meet()
        torch.cuda._sleep(LEAD)
        part = torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")
        self.tensor_group.add(part, part)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over ranks, the same everywhere."""
        every = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(every, op=dist.ReduceOp.MAX, group=self._group)
        return every.tolist()

    def agree(self, what: bytes, name: str) -> None:
        """Fail on every rank if one has something else."""
        mine = float(zlib.crc32(what))
        high, low = self.slowest([mine, -mine])
        assert high == -low, f"rank {self.rank}: ranks differ in {name}"

    def agree_on_bits(self, found: Tensor) -> None:
        """Fail on every rank if one has other bits."""
        self.agree(found.contiguous().view(torch.uint8).cpu().numpy().tobytes(), "a result's bits")


def over_ranks(work: Callable[..., Any], size: int, *arguments: object) -> Any:
    """Return what ``work(ranks, *arguments)`` is on rank 0 of a process on each of ``size`` GPUs.

    Args:
        work: A module's function; its result is small.
        size: GPUs.
        arguments: Picklable.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no name look-ups
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = get_context("spawn").SimpleQueue()
    spawn(_run_rank, (size, port, results, work, arguments), nprocs=size)
    return results.get()


def _run_rank(
    rank: int,
    size: int,
    port: int,
    results: Any,
    work: Callable[..., Any],
    arguments: Sequence[object],
) -> None:
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", address, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None, "no process group"
    device = torch.device("cuda", rank)
    ranks = Ranks(group, open_exchange(group, max_elements=MAX_ELEMENTS, device=device))
    with ranks.tensor_group.patient():  # the others compile, too
        ranks.line_up()
    torch.manual_seed(rank)  # a part of the weights of its own
    found = work(ranks, *arguments)
    if rank == 0:
        results.put(found)
    ranks.meet()
    dist.destroy_process_group()
