"""What ranks that measure together agree on, over processes of a CPU; no forward is real."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from codesign.kernels.symmetric import open_exchange
from codesign.kernels.tiling import Tiling

ROOT = Path(__file__).parents[2]
WORLD = 2
MAPS = {(512, 16): "o", (512, 56): "down"}


def run_rank(rank: int, work: Callable, store: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    exchange = open_exchange(dist.group.WORLD, max_elements=64, device="cpu")
    ranks = importlib.import_module("benchmarks.over_ranks").Ranks(dist.group.WORLD, exchange)
    torch.save(work(ranks), f"{results}.{rank}")
    dist.destroy_process_group()


@pytest.fixture
def of_ranks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))

    def run(work: Callable) -> list:
        results = str(tmp_path / "found")
        arguments = (work, str(tmp_path / "store"), results)
        mp.start_processes(run_rank, arguments, nprocs=WORLD, start_method="forkserver")
        return [torch.load(f"{results}.{rank}", weights_only=False) for rank in range(WORLD)]

    return run


def what_ranks_say(ranks) -> list:
    found = [ranks.slowest([ranks.rank, -ranks.rank, 0.1])]
    for mine in (b"same", b"other" if ranks.rank == 1 else b"same"):
        try:
            ranks.agree(mine, "a word")
            found.append("")
        except AssertionError as error:
            found.append(str(error))
    bits = torch.zeros(4, dtype=torch.bfloat16)
    ranks.agree_on_bits(bits)
    bits[0] = -0.0 if ranks.rank == 1 else 0.0  # equal, but not the same bits
    with pytest.raises(AssertionError, match="bits"):
        ranks.agree_on_bits(bits)
    forwards = importlib.import_module("benchmarks.tiled_forwards").Forwards(None, ranks)
    with pytest.raises(AssertionError, match="the tilings that they try"):  # and launches none
        forwards.ms({(512, 16): Tiling(8, 2, 2 if ranks.rank else 1)})
    return found


def test_the_slowest_counts_and_a_difference_of_one_is_known_to_all(of_ranks):
    differ = [f"rank {rank}: ranks differ in a word" for rank in range(WORLD)]
    slowest = [1.0, 0.0, 0.1]
    assert of_ranks(what_ranks_say) == [[slowest, "", said] for said in differ]


def searched_by_a_rank(ranks) -> dict:
    """Each rank has a clock of its own: alone it would choose otherwise."""
    script = importlib.import_module("benchmarks.search_tilings")
    trial = importlib.import_module("benchmarks.tiled_forwards")
    now = script.table_of(MAPS, 8)
    ways = script.tried(now, 8, 12)
    tried = []

    class Step:
        hidden = None

        def measure(self, run, replays):
            of_table = {cut: trial.MEASURED[cut][0] for cut in MAPS}
            tried.append(of_table)
            own = hash((ranks.rank, *of_table.values())) % 100 / 100
            return sorted(ranks.slowest([1 + own] * 3))

    forwards = trial.Forwards(Step(), ranks)
    best, found = script.searched(MAPS, now, ways, forwards.ms, lambda line: None)
    return {"best": best, "found": found, "tried": tried}


def test_ranks_with_clocks_of_their_own_try_the_same_and_choose_the_same(of_ranks):
    first, *others = of_ranks(searched_by_a_rank)
    assert len(first["tried"]) > 50
    assert all(isinstance(tiling, Tiling) for way in first["tried"] for tiling in way.values())
    assert others == [first] * (WORLD - 1)
    assert first["found"]["ms"]["best"] < first["found"]["ms"]["now"]


def test_tilings_on_trial_go_to_the_table_that_the_launches_read(monkeypatch):
    from codesign.kernels import gemm, gemm_all_reduce, tiling

    monkeypatch.syspath_prepend(str(ROOT))
    trial = importlib.import_module("benchmarks.tiled_forwards")
    monkeypatch.setattr(trial, "MEASURED", dict(tiling.MEASURED))
    monkeypatch.setattr(tiling, "MEASURED", trial.MEASURED)
    monkeypatch.setattr(gemm_all_reduce, "_kernel", lambda count, by, world, plan: by)
    monkeypatch.setattr(gemm_all_reduce.Plan, "of", lambda kernel, *_, **how: kernel)
    cut, old, new = (512, 16), tiling.MEASURED[512, 16][0], Tiling(16, 1)
    assert gemm.most_rows(*cut, None, 132) == 32
    assert gemm_all_reduce._plan(*cut, 1, 132, 4) == old
    trial.Forwards(SimpleNamespace(), None).take({cut: new})
    assert gemm_all_reduce._plan(*cut, 1, 132, 4) == new
    assert gemm.most_rows(*cut, None, 132) == 16, "what was known of the old one"
    gemm.most_rows.cache_clear()
    gemm_all_reduce._plan.cache_clear()
