"""Sums over ranks of a prompt's rows, which go over NCCL: the bits of their definition, in graphs.

python -m pytest tests/gpu/test_large_sums.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from codesign.kernels.all_reduce import add_by_rows, add_gathered, all_reduce_add
from codesign.kernels.reference import sum_of_ranks
from codesign.kernels.symmetric import open_exchange

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]
ROWS = (512, 513)  # as many for each rank, and not


def check_in_a_graph(add: Callable[..., Tensor], residual: Tensor, wanted: Tensor) -> None:
    """Into memory of its own, and captured into the residual's."""
    assert torch.equal(add(residual_TD=residual, out_TD=torch.empty_like(residual)), wanted)
    into = residual.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        add(residual_TD=into, out_TD=into)
    for _ in range(3):
        into.copy_(residual)
        graph.replay()
        assert torch.equal(into, wanted)
    del graph  # communicators do not end while one holds a collective


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
        for add in (add_by_rows, add_gathered):
            check_in_a_graph(partial(add, parts[rank], group=group), residual, wanted)
        own = partial(all_reduce_add, parts[rank], exchange=exchange)
        check_in_a_graph(own, residual, wanted)
    dist.barrier(group)
    dist.destroy_process_group()


def test_ranks_that_share_out_rows_end_with_the_same_bits_in_a_graph(tmp_path: Path):
    mp.spawn(add_on_a_rank, (GPUS, str(tmp_path / "store")), nprocs=GPUS)
