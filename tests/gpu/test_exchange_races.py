"""The exchange between GPUs under stress: what cannot be seen in one call.

Every rank replays graphs of several calls of changing shapes, with delays of its own between them
and before replays. Each value tells its step, call, rank and place; every rank computes what the
sum must be and counts the values that differ, on the device, for every call.

    python tests/gpu/test_exchange_races.py [REPLAYS] [GPUS]
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from codesign.kernels.all_reduce import all_reduce_add
from codesign.kernels.gemm import linear
from codesign.kernels.gemm_all_reduce import linear_all_reduce
from codesign.kernels.int4 import Int4Weight
from codesign.kernels.packing import PackedLinear, pack_int4
from codesign.kernels.symmetric import Exchange, PeerLostError, open_exchange

SHAPES = [(8, 8192), (1, 8192), (8, 2048), (3, 576), (32, 1024), (16, 8192), (1, 8)]
GRAPHS, CALLS = 5, 6
MAX_SLEEP = 40_000  # cycles


def tagged(step: Tensor, call: int, ranks: Tensor, rows: int, hidden: int) -> Tensor:
    """Small integers, exact in bfloat16, that differ in step, call, rank and place: (R, T, D)."""
    place = torch.arange(rows * hidden, device="cuda")
    tag = place * 37 + step * 101 + call * 17 + ranks[:, None] * 59 + (place >> 9) * step
    return (tag % 509 - 254).to(torch.bfloat16).view(-1, rows, hidden)


class Rank:
    """One rank's graphs and its count of wrong values."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.step = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.ranks = torch.arange(exchange.world, device="cuda")
        self.weight = random_weight(seed=exchange.rank)

    def call(self, index: int, rows: int, hidden: int, cycles: int) -> None:
        """One all-reduce, checked."""
        parts = tagged(self.step, index, self.ranks, rows, hidden)
        residual = parts[0] * 2
        out = torch.full_like(residual, float("nan"))
        torch.cuda._sleep(cycles)
        rank = self.exchange.rank
        all_reduce_add(
            parts[rank].contiguous(), residual, exchange=self.exchange, out_TD=out, pdl=True
        )
        wanted = (parts.float().sum(0) + residual.float()).to(torch.bfloat16)
        self.wrong += (out != wanted).sum()

    def fused_call(self, index: int, rows: int, cycles: int) -> None:
        """A map with its all-reduce in one launch, against the two apart."""
        columns = self.weight.num_columns
        x = tagged(self.step, index, self.ranks[:1] + self.exchange.rank, rows, columns)[0]
        torch.cuda._sleep(cycles)
        fused = linear_all_reduce(x, self.weight, None, exchange=self.exchange)
        part = linear(x, self.weight)
        apart = all_reduce_add(part, None, exchange=self.exchange)
        self.wrong += (fused != apart).sum()

    def capture(self, seed: int) -> torch.cuda.CUDAGraph:
        """A graph of calls: the same shapes on every rank, delays of this one."""
        shared, own = random.Random(seed), random.Random(seed * 100 + self.exchange.rank)
        shapes = [shared.choice(SHAPES) for _ in range(CALLS)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index, (rows, hidden) in enumerate(shapes):
                cycles = own.choice([1, 1, own.randrange(MAX_SLEEP)])
                self.call(index, rows, hidden, cycles)
            self.fused_call(CALLS, shared.choice([1, 8, 16]), own.choice([1, own.randrange(9000)]))
            self.step += 1
        return graph

    def warm_up(self) -> None:
        """Load all code: capturing must not."""
        for rows, hidden in SHAPES:
            self.call(0, rows, hidden, 1)
        for rows in (1, 8, 16):
            self.fused_call(0, rows, 1)
        torch.cuda.synchronize()
        assert int(self.wrong) == 0, f"rank {self.exchange.rank}: {int(self.wrong)} wrong at first"


def random_weight(seed: int) -> PackedLinear:
    generator = torch.Generator("cuda").manual_seed(seed)
    words = torch.randint(0, 1 << 31, (2048, 64), device="cuda", generator=generator)
    scales = torch.rand(2048, 4, device="cuda", generator=generator).half()
    zeros = torch.full((2048, 4), 8, device="cuda", dtype=torch.uint8)
    return pack_int4(Int4Weight(words.to(torch.int32), scales, zeros))


def stress(rank: int, world: int, port: int, replays: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", address, rank=rank, world_size=world, device_id=device)
    exchange = open_exchange(dist.group.WORLD, max_elements=16 * 8192, device=device, patience=20.0)
    state = Rank(exchange)
    state.warm_up()
    graphs = [state.capture(seed) for seed in range(GRAPHS)]
    exchange.reset(calls=(1 << 16) - 999)  # the counter wraps on the way
    shared, own = random.Random(0), random.Random(rank + 1)
    start = time.perf_counter()
    for replay in range(replays):
        if own.random() < 0.01:
            time.sleep(own.random() * 2e-3)
        shared.choice(graphs).replay()
        if replay % 500 == 499:
            torch.cuda.synchronize()
            exchange.check()
    torch.cuda.synchronize()
    exchange.check()
    assert int(state.wrong) == 0, f"rank {rank}: {int(state.wrong)} values differ"
    if rank == 0:
        calls, seconds = replays * (CALLS + 2), time.perf_counter() - start
        report = f"{calls} calls over {world} GPUs in {replays} replays, {seconds:.1f} s: all exact"
        sys.stdout.write(report + "\n")
    check_lost_peer(rank, world, device)
    dist.destroy_process_group()


def check_lost_peer(rank: int, world: int, device: torch.device) -> None:
    """A rank that stays away is named by the others; nothing hangs."""
    exchange = open_exchange(dist.group.WORLD, max_elements=8192, device=device, patience=0.5)
    part = torch.ones(1, 8192, device=device, dtype=torch.bfloat16)
    all_reduce_add(part, None, exchange=exchange)
    torch.cuda.synchronize()
    exchange.check()
    if rank != world - 1:
        all_reduce_add(part, None, exchange=exchange)
        torch.cuda.synchronize()
        with pytest.raises(PeerLostError, match=f"for rank {world - 1}"):
            exchange.check()
    exchange.reset()
    out = all_reduce_add(part, None, exchange=exchange)
    assert torch.equal(out, part * world)


def run(replays: int, world: int) -> None:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(stress, (world, port, replays), nprocs=world)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thousand_replays_with_delays_are_exact_on_every_rank():
    for world in {2, torch.cuda.device_count()}:
        run(1000, world)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
