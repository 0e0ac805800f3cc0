"""The all-reduce of tensor parallelism, alone and in the GEMM's epilogue, against NCCL and PyTorch.

    python -m benchmarks.bench_collectives [--gpus N] [--alone] [--peers] [--out DIRECTORY]

One process a GPU on one host. Times are medians over graph replays, which begin together on all
GPUs; of all ranks the slowest counts. Weights are used in turn (more than the second-level cache
holds). The floor of the all-reduce is its wire time one way at 450 GB/s, of a prompt's rows twice
that of a rank's share of them; that of a GEMM the reading of its weight.
With ``--peers``, FlashInfer's fused sums come last, and the result is written before them, too:
their kernels wait for a rank without a limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from benchmarks.common import (
    COLD_BYTES,
    READ_BANDWIDTH,
    graph_time,
    need_gpus,
    why_not,
    write_result,
)
from benchmarks.over_ranks import Ranks, over_ranks
from benchmarks.peers.collectives import FusedSums
from codesign.kernels.all_reduce import add_by_rows, add_gathered, all_reduce_add
from codesign.kernels.gemm import linear
from codesign.kernels.gemm_all_reduce import linear_all_reduce
from codesign.kernels.int4 import Int4Weight, round_scales
from codesign.kernels.packing import PackedLinear, pack_int4
from codesign.kernels.reference import sum_of_ranks

WIRE_BANDWIDTH = 450e9
SIZES = [(8, 2048), (8, 4096), (8, 8192), (16, 8192), (32, 8192)]
PROMPTS = [(256, 8192), (512, 8192), (1024, 8192), (2048, 8192)]
# model, op, inputs over all ranks, outputs
LAYERS = [
    ("llama-70b", "o", 8192, 8192),
    ("llama-70b", "down", 28_672, 8192),
    ("llama-8b", "o", 4096, 4096),
    ("llama-8b", "down", 14_336, 4096),
    ("llama-3.2-1b", "down", 8192, 2048),
]
Call = Callable[[int], Any]


class Bench:
    """One rank's measurements; rank 0 keeps the rows."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.exchange = ranks, ranks.exchange
        group = dist.group.WORLD
        assert group is not None, "no process group"
        self.group = group
        self.rows: list[dict[str, Any]] = []

    def measure(self, what: dict[str, Any], version: str, call: Call, floor: float) -> None:
        """Time a version on all ranks at once."""
        timing = graph_time(call, before=self.ranks.line_up)
        self.exchange.check()
        slowest = self.ranks.slowest([timing.median, timing.low, timing.high])
        median, low, high = (round(value * 1e6, 3) for value in slowest)
        times = {"us": median, "us_p10": low, "us_p90": high, "floor_us": round(floor * 1e6, 3)}
        self.rows.append(what | {"version": version} | times)
        if self.exchange.rank == 0:
            name = " ".join(str(value) for value in what.values())
            print(f"{name:34} {version:26} {median:8.2f} us, floor {floor * 1e6:.2f}", flush=True)

    def all_reduces(self, rows: int, hidden: int) -> None:
        """The collective alone."""
        part = torch.randn(rows, hidden, device="cuda").to(torch.bfloat16)
        residual, out = torch.zeros_like(part), torch.empty_like(part)
        shared = symmetric_memory.empty(rows * hidden, dtype=torch.bfloat16, device=part.device)
        symmetric_memory.rendezvous(shared, self.group)
        shared.copy_(part.flatten())
        name = self.group.group_name
        self.check_sum(part)

        def ours(i: int, *, pdl: bool = False) -> None:
            all_reduce_add(part, residual, exchange=self.exchange, out_TD=out, pdl=pdl)

        what = size_of(part)
        floor = part.nbytes * (self.exchange.world - 1) / WIRE_BANDWIDTH
        ops = torch.ops.symm_mem
        for version, call in {
            "ours, residual added": ours,
            "ours, PDL": lambda i: ours(i, pdl=True),
            "symm_mem one-shot": lambda i: ops.one_shot_all_reduce(shared, "sum", name),
            "symm_mem two-shot": lambda i: ops.two_shot_all_reduce_(shared, "sum", name),
            "NCCL": lambda i: dist.all_reduce(part, group=self.group),
        }.items():
            part.normal_()
            shared.normal_()
            self.measure(what, version, call, floor)

    def prompts(self, rows: int, hidden: int) -> None:
        """The collective of a prompt's rows."""
        part = torch.randn(rows, hidden, device="cuda").to(torch.bfloat16)
        residual, out = torch.zeros_like(part), torch.empty_like(part)
        ways = {"every rank adds all": add_gathered, "each adds some": add_by_rows}
        sums = [way(part, residual, self.group, torch.empty_like(part)) for way in ways.values()]
        assert torch.equal(*sums), "the ways differ"
        floor = part.nbytes * 2 * (self.exchange.world - 1) / self.exchange.world / WIRE_BANDWIDTH
        for version, way in ways.items():
            self.measure(
                size_of(part),
                version,
                lambda i, way=way: way(part, residual, self.group, out),
                floor,
            )
        self.measure(
            size_of(part), "NCCL", lambda i: dist.all_reduce(part, group=self.group), floor
        )

    def peers(self) -> None:
        """FlashInfer's one-shot sums, or why there is no time of them."""
        try:
            sums = FusedSums(self.group, max(rows for rows, _ in SIZES), SIZES[-1][1])
            for rows, hidden in SIZES:
                part = torch.randn(rows, hidden, device="cuda").to(torch.bfloat16)
                what = size_of(part)
                floor = part.nbytes * (self.exchange.world - 1) / WIRE_BANDWIDTH
                for version, call in sums.calls(part).items():
                    self.measure(what, version, call, floor)
        except Exception as error:  # theirs may raise whatever it likes
            row = {"op": "all-reduce", "version": "FlashInfer", "status": why_not(error)}
            self.rows.append(row)
            print(row, flush=True)

    def check_sum(self, part: Tensor) -> None:
        """Compare one call with the definition, bit by bit."""
        parts = [torch.empty_like(part) for _ in range(self.exchange.world)]
        dist.all_gather(parts, part, group=self.group)
        found = all_reduce_add(part, parts[0], exchange=self.exchange)
        assert torch.equal(found, sum_of_ranks(parts, parts[0])), "not the sum of the ranks"

    def write(self, directory: Path | None) -> None:
        """Write all rows so far."""
        if self.exchange.rank == 0:
            note = "medians over replays of 50 calls, slowest rank; bf16, residual added, 8 rows"
            name = f"collectives_tp{self.exchange.world}"
            print(write_result(name, self.rows, directory=directory, note=note), flush=True)

    def layers(self, model: str, op: str, inputs: int, outputs: int) -> None:
        """A row-parallel map with its all-reduce, fused and not."""
        world = self.exchange.world
        columns = -(-inputs // (128 * world)) * 128
        weights = random_weights(outputs, columns)
        x = torch.randn(8, columns, device="cuda").to(torch.bfloat16)
        residual, out = (torch.zeros(8, outputs, device="cuda", dtype=x.dtype) for _ in range(2))
        shared = symmetric_memory.empty(8 * outputs, dtype=x.dtype, device=x.device)
        symmetric_memory.rendezvous(shared, self.group)
        name = self.group.group_name

        def weight(i: int) -> PackedLinear:
            return weights[i % len(weights)]

        def fused(i: int) -> None:
            linear_all_reduce(x, weight(i), residual, exchange=self.exchange, out_MN=out)

        def apart(i: int) -> None:
            part = linear(x, weight(i), out=shared.view(8, outputs))
            all_reduce_add(part, residual, exchange=self.exchange, out_TD=out, pdl=True)

        def with_symmetric_memory(i: int) -> None:
            linear(x, weight(i), out=shared.view(8, outputs))
            torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)

        def with_nccl(i: int) -> None:
            linear(x, weight(i), out=out)
            dist.all_reduce(out, group=self.group)

        fused(0)
        found = out.clone()
        apart(0)
        assert torch.equal(found, out), "fused and unfused differ"
        what = {"op": op, "model": model, "tensor_parallel": world, "inputs": columns}
        floor = weights[0].num_bytes / READ_BANDWIDTH
        for version, call in {
            "fused": fused,
            "GEMM, then ours": apart,
            "GEMM, then symm_mem": with_symmetric_memory,
            "GEMM, then NCCL": with_nccl,
            "GEMM alone": lambda i: linear(x, weight(i), out=out),
        }.items():
            self.measure(what, version, call, floor)


def size_of(part: Tensor) -> dict[str, Any]:
    """What a row of a sum is about."""
    rows, hidden = part.shape
    return {"op": "all-reduce", "rows": rows, "hidden": hidden, "kib": part.nbytes // 1024}


def random_weights(outputs: int, columns: int) -> list[PackedLinear]:
    """Enough copies of a random int4 weight to keep the cache cold."""
    groups = columns // 128
    packed = torch.randint(-(1 << 31), (1 << 31) - 1, (outputs, columns // 8), device="cuda")
    weight = pack_int4(
        Int4Weight(
            packed.to(torch.int32),
            round_scales(torch.rand(outputs, groups, device="cuda") * 0.01),
            torch.randint(0, 16, (outputs, groups), device="cuda", dtype=torch.uint8),
        )
    )
    copies = max(2, int(COLD_BYTES / weight.num_bytes))
    return [weight, *(copy_of(weight) for _ in range(copies - 1))]


def copy_of(weight: PackedLinear) -> PackedLinear:
    """The same weight in other memory."""
    return PackedLinear(weight.data.clone(), weight.num_rows, weight.num_columns)


def measure(ranks: Ranks, arguments: argparse.Namespace) -> None:
    """What each process does."""
    bench = Bench(ranks)
    for rows, hidden in SIZES:
        bench.all_reduces(rows, hidden)
    for rows, hidden in PROMPTS:
        bench.prompts(rows, hidden)
    torch.manual_seed(0)
    for layer in [] if arguments.alone else LAYERS:
        bench.layers(*layer)
    bench.write(arguments.out)
    if arguments.peers:
        torch.manual_seed(ranks.rank)
        bench.peers()
        bench.write(arguments.out)


def main() -> None:
    """Start a process a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--alone", action="store_true", help="leave out maps with their sums")
    parser.add_argument("--peers", action="store_true", help="time FlashInfer's sums, too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    need_gpus(max(1, arguments.gpus))
    over_ranks(measure, arguments.gpus, arguments)


if __name__ == "__main__":
    main()
