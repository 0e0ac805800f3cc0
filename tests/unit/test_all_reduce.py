"""The sum over a tensor-parallel group: over processes on a CPU, over streams on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from codesign.kernels.all_reduce import add_by_rows, add_gathered, all_reduce_add
from codesign.kernels.reference import sum_of_ranks
from codesign.kernels.symmetric import Exchange, PeerLostError, local_exchanges, open_exchange

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def parts_of(world: int, rows: int, hidden: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, hidden, generator=generator).to(torch.bfloat16) for _ in range(world + 1)
    ]


WORLD = 3
SHARED = (6, 5, 4, 2, 1)  # rows: as many each, one fewer for the last, none for it or for two


def run_rank(rank: int, work: Callable[[int], list[Tensor]], store: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.save(work(rank), f"{results}.{rank}")
    dist.destroy_process_group()


def of_ranks(work: Callable[[int], list[Tensor]], folder: Path) -> list[list[Tensor]]:
    """What each of three processes of one group comes to."""
    results = str(folder / "sum")
    arguments = (work, str(folder / "store"), results)
    mp.start_processes(run_rank, arguments, nprocs=WORLD, start_method="forkserver")
    return [torch.load(f"{results}.{rank}") for rank in range(WORLD)]


def one_sum(rank: int) -> list[Tensor]:
    exchange = open_exchange(dist.group.WORLD, max_elements=1 << 16, device="cpu")
    *parts, residual = parts_of(WORLD, 5, 24, seed=0)
    return [all_reduce_add(parts[rank], residual, exchange=exchange)]


def test_ranks_end_with_the_same_bits(tmp_path: Path):
    *parts, residual = parts_of(WORLD, 5, 24, seed=0)
    wanted = sum_of_ranks(parts, residual)
    for (found,) in of_ranks(one_sum, tmp_path):
        assert torch.equal(found, wanted)
    exact = sum(part.double() for part in parts) + residual.double()
    torch.testing.assert_close(wanted.double(), exact, rtol=2**-8, atol=0)


def shared_sums(rank: int) -> list[Tensor]:
    found = []
    for rows in SHARED:
        *parts, residual = parts_of(WORLD, rows, 24, seed=rows)
        out = torch.full_like(residual, torch.nan)
        found.append(add_by_rows(parts[rank], None, dist.group.WORLD, out))
        assert found[-1] is out
        gathered = add_gathered(parts[rank], residual, dist.group.WORLD, torch.empty_like(residual))
        found.append(add_by_rows(parts[rank], residual, dist.group.WORLD, residual))  # into itself
        assert torch.equal(found[-1], gathered)
    return found


def test_many_rows_that_ranks_share_out_end_with_the_same_bits(tmp_path: Path):
    wanted = []
    for rows in SHARED:
        *parts, residual = parts_of(WORLD, rows, 24, seed=rows)
        wanted += [sum_of_ranks(parts, None), sum_of_ranks(parts, residual)]
    for found in of_ranks(shared_sums, tmp_path):
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)


def test_a_group_of_one_adds_the_residual():
    exchange = open_exchange(None, max_elements=64, device="cpu")
    part, residual = parts_of(1, 2, 8, seed=1)
    out = torch.empty_like(part)
    assert all_reduce_add(part, residual, exchange=exchange, out_TD=out) is out
    assert torch.equal(out, (part.float() + residual.float()).to(torch.bfloat16))
    assert torch.equal(all_reduce_add(part, None, exchange=exchange), part)
    exchange.check()


def run_ranks(
    exchanges: list[Exchange], parts: list[Tensor], residual: Tensor | None, outs: list[Tensor]
) -> None:
    """One call of every rank, each on a stream of its own; capturable."""
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in exchanges]
    for stream in streams:
        stream.wait_stream(here)
    for stream, exchange, part, out in zip(streams, exchanges, parts, outs, strict=True):
        with torch.cuda.stream(stream):
            all_reduce_add(part, residual, exchange=exchange, out_TD=out)
    for stream in streams:  # only now: a rank that waited for another's end would wait for ever
        here.wait_stream(stream)


def check_ranks(exchanges: list[Exchange], rows: int, hidden: int, seed: int) -> None:
    *parts, residual = (t.cuda() for t in parts_of(len(exchanges), rows, hidden, seed))
    for rest in (residual, None):
        outs = [torch.full_like(part, float("nan")) for part in parts]
        run_ranks(exchanges, parts, rest, outs)
        torch.cuda.synchronize()
        wanted = sum_of_ranks(parts, rest)
        for exchange, out in zip(exchanges, outs, strict=True):
            exchange.check()
            assert torch.equal(out, wanted), f"rank {exchange.rank}, {rows} rows of {hidden}"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("world", range(1, 9))
def test_ranks_on_streams_end_with_the_sum(world: int):
    exchanges = local_exchanges(world, max_elements=1 << 16, device="cuda")
    for seed, (rows, hidden) in enumerate([(8, 2048), (1, 8), (3, 576), (16, 4096), (1, 8)]):
        check_ranks(exchanges, rows, hidden, seed)


@pytest.mark.gpu
@needs_gpu
def test_the_call_counter_may_wrap():
    exchanges = local_exchanges(2, max_elements=1 << 12, device="cuda")
    for exchange in exchanges:
        exchange.reset(calls=(1 << 16) - 3)
    for seed in range(7):
        check_ranks(exchanges, 2, 1024, seed)


@pytest.mark.gpu
@needs_gpu
def test_values_that_are_not_finite_go_through():
    exchanges = local_exchanges(2, max_elements=1 << 12, device="cuda")
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16).cuda().view(64, 1024)
    for rows in every.split(4):
        ones = torch.ones_like(rows)
        outs = [torch.empty_like(rows) for _ in exchanges]
        run_ranks(exchanges, [rows.contiguous(), ones], None, outs)
        torch.cuda.synchronize()
        wanted = sum_of_ranks([rows, ones], None)
        for out in outs:
            torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    exchanges[0].check()


@pytest.mark.gpu
@needs_gpu
def test_a_captured_call_can_be_replayed():
    exchanges = local_exchanges(4, max_elements=1 << 14, device="cuda")
    *parts, residual = (t.cuda() for t in parts_of(4, 8, 2048, seed=0))
    outs = [torch.empty_like(part) for part in parts]
    check_ranks(exchanges, 8, 2048, seed=1)  # an odd number of calls before, and code loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_ranks(exchanges, parts, residual, outs)
    for seed in range(20):
        fresh = parts_of(4, 8, 2048, seed)
        for tensor, new in zip([*parts, residual], fresh, strict=True):
            tensor.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        wanted = sum_of_ranks(parts, residual)
        assert all(torch.equal(out, wanted) for out in outs)
        if seed % 3 == 0:
            check_ranks(exchanges, 1, 512, seed)  # another shape between


@pytest.mark.gpu
@needs_gpu
def test_a_peer_that_does_not_call_is_reported():
    exchanges = local_exchanges(3, max_elements=1 << 12, device="cuda", patience=0.2)
    parts = [part.cuda() for part in parts_of(3, 2, 512, seed=0)]
    outs = [torch.empty_like(part) for part in parts]
    run_ranks(exchanges[:1] + exchanges[2:], parts[:2], None, outs[:2])
    torch.cuda.synchronize()
    with pytest.raises(PeerLostError, match=r"rank 0 waited .* for rank 1"):
        exchanges[0].check()
    for exchange in exchanges:
        exchange.reset()
    check_ranks(exchanges, 2, 512, seed=1)
