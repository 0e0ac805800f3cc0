"""Sums over ranks of a prompt's rows, which go over NCCL: the bits of their definition, in graphs.

python -m pytest tests/gpu/test_large_sums.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from codesign.kernels.all_reduce import add_by_rows, add_gathered, all_reduce_add
from codesign.kernels.reference import sum_of_ranks
from codesign.kernels.symmetric import open_exchange

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(GPUS < 3, reason="needs three GPUs"),
]
ROWS = (512, 513)  # as many for each rank of four, and not


def add_on_a_rank(rank: int, world: int, store: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", f"file://{store}", rank=rank, world_size=world, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    exchange = open_exchange(group, max_elements=8 * 8192, device=device)
    for rows in ROWS:
        torch.manual_seed(rows)
        *parts, residual = torch.randn(world + 1, rows, 8192, device=device).bfloat16()
        wanted = sum_of_ranks(parts, residual)
        out = torch.empty_like(residual)
        for add in (add_by_rows, add_gathered):
            assert torch.equal(add(parts[rank], residual, group, out), wanted)
        into_itself = residual.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            all_reduce_add(parts[rank], into_itself, exchange=exchange, out_TD=into_itself)
        for _ in range(3):
            into_itself.copy_(residual)
            graph.replay()
            assert torch.equal(into_itself, wanted)
        del graph  # communicators do not end while one holds a collective
    dist.barrier(group)
    dist.destroy_process_group()


def test_ranks_that_share_out_rows_end_with_the_same_bits_in_a_graph(tmp_path: Path):
    mp.spawn(add_on_a_rank, (GPUS, str(tmp_path / "store")), nprocs=GPUS)
