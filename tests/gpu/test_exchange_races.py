"""The exchange between GPUs under stress: what cannot be seen in one call.

Every rank replays graphs of several calls of changing shapes, with delays of its own between them
and before replays. Each value tells its step, call, rank and place; every rank computes what the
sum must be and counts the values that differ, on the device, for every call. A replay takes about
as long as its delays, so that a million of them are an affordable test.

    python tests/gpu/test_exchange_races.py [REPLAYS] [GPUS]
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl

from codesign.kernels.all_reduce import all_reduce_add
from codesign.kernels.gemm import linear
from codesign.kernels.gemm_all_reduce import linear_all_reduce
from codesign.kernels.int4 import Int4Weight, round_scales
from codesign.kernels.packing import TILE, PackedLinear, pack_int4
from codesign.kernels.symmetric import Exchange, PeerLostError, open_exchange
from codesign.kernels.tiling import MEASURED

SHAPES = [(8, 8192), (1, 8192), (8, 2048), (3, 576), (32, 1024), (16, 8192), (1, 8)]
FUSED_ROWS = (1, 8, 16)
# Maps with their sums in one launch, features and columns: one as it is, then a 70B's o and down
# over four GPUs, in whose kernels every role sleeps at random.
FUSED = [(2048, 2048), (8192, 2048), (8192, 7168)]
GRAPHS, CALLS = 5, 6
BLOCK = 1024  # values of a program
MAX_SLEEP = 40_000  # cycles


@triton.jit
def tag_of(place, step, call, rank):
    """A small integer, exact in bfloat16, that differs in step, call, rank and place."""
    tag = place * 37 + step * 101 + call * 17 + rank * 59 + (place >> 9) * step
    return (tag % 509 - 254).to(tl.float32)


@triton.jit
def write_parts(part, residual, out, step, call, rank, count, BLOCK: tl.constexpr):
    """This rank's part, the residual that all have, and NaN where the sum will be."""
    place = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    now, there = tl.load(step), place < count
    tl.store(part + place, tag_of(place, now, call, rank).to(tl.bfloat16), there)
    tl.store(residual + place, (tag_of(place, now, call, 0) * 2).to(tl.bfloat16), there)
    tl.store(out + place, float("nan"), there)


@triton.jit
def count_wrong(out, wrong, step, call, count, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Add the number of values that are not the rounded sum."""
    place = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    now, there = tl.load(step), place < count
    wanted = tag_of(place, now, call, 0) * 2
    for rank in range(WORLD):
        wanted += tag_of(place, now, call, rank)
    found = tl.load(out + place, there, other=0.0).to(tl.float32)
    differs = there & (found != wanted.to(tl.bfloat16).to(tl.float32))
    number = tl.sum(differs.to(tl.int64))
    if number > 0:
        tl.atomic_add(wrong, number)


class Rank:
    """One rank's graphs and its count of wrong values."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.step = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.weights = [random_weight(*size, seed=exchange.rank) for size in FUSED]
        columns = {weight.num_columns for weight in self.weights}
        sizes = [*SHAPES, *((rows, wide) for rows in FUSED_ROWS for wide in columns)]
        # Calls of one size share memory: they follow one another on one stream.
        self.rooms = {
            size: torch.empty(3, *size, dtype=torch.bfloat16, device="cuda").unbind()
            for size in dict.fromkeys(sizes)
        }

    def call(self, index: int, rows: int, hidden: int, cycles: int) -> None:
        """One all-reduce, checked."""
        exchange, count = self.exchange, rows * hidden
        part, residual, out = self.rooms[rows, hidden]
        grid = (triton.cdiv(count, BLOCK),)
        write_parts[grid](part, residual, out, self.step, index, exchange.rank, count, BLOCK=BLOCK)
        torch.cuda._sleep(cycles)
        all_reduce_add(part, residual, exchange=exchange, out_TD=out, pdl=True)
        count_wrong[grid](
            out, self.wrong, self.step, index, count, WORLD=exchange.world, BLOCK=BLOCK
        )

    def fused_call(self, index: int, rows: int, weight: PackedLinear, cycles: int) -> None:
        """A map with its all-reduce in one launch, against the two apart."""
        x, residual, out = self.rooms[rows, weight.num_columns]
        write_parts[(triton.cdiv(x.numel(), BLOCK),)](
            x, residual, out, self.step, index, self.exchange.rank, x.numel(), BLOCK=BLOCK
        )
        torch.cuda._sleep(cycles)
        fused = linear_all_reduce(x, weight, None, exchange=self.exchange)
        part = linear(x, weight)
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
            rows, weight = shared.choice(FUSED_ROWS), shared.choice(self.weights)
            self.fused_call(CALLS, rows, weight, own.choice([1, own.randrange(9000)]))
            self.step += 1
        return graph

    def warm_up(self) -> None:
        """Load all code: capturing must not."""
        for rows, hidden in SHAPES:
            self.call(0, rows, hidden, 1)
        for rows in FUSED_ROWS:
            for weight in self.weights:
                self.fused_call(0, rows, weight, 1)
        torch.cuda.synchronize()
        assert int(self.wrong) == 0, f"rank {self.exchange.rank}: {int(self.wrong)} wrong at first"


def random_weight(features: int, columns: int, seed: int) -> PackedLinear:
    generator = torch.Generator("cuda").manual_seed(seed)
    size, groups = (features, columns // 8), columns // 128
    words = torch.randint(0, 1 << 31, size, device="cuda", generator=generator)
    scales = round_scales(torch.rand(features, groups, device="cuda", generator=generator))
    zeros = torch.full((features, groups), 8, device="cuda", dtype=torch.uint8)
    return pack_int4(Int4Weight(words.to(torch.int32), scales, zeros))


def delay_roles() -> None:
    """Let every role of the kernels sleep at random, of all fused maps but the first."""
    for features, columns in FUSED[1:]:
        cut = features // TILE, columns // 128
        few, many = MEASURED[cut]
        MEASURED[cut] = (replace(few, delays=True), replace(many, delays=True))


def stress(rank: int, world: int, port: int, replays: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", address, rank=rank, world_size=world, device_id=device)
    exchange = open_exchange(dist.group.WORLD, max_elements=16 * 8192, device=device, patience=20.0)
    delay_roles()
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
