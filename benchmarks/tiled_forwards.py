"""A model's forwards by tilings on trial: of one GPU, or of a tensor-parallel group's ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

import torch

from benchmarks.bench_forward import Step
from benchmarks.over_ranks import Ranks
from codesign.kernels import gemm, gemm_all_reduce
from codesign.kernels.all_reduce import all_reduce_add
from codesign.kernels.packed_linear import PackedMap
from codesign.kernels.tiling import MEASURED, Tiling, row_tiles

Cut = tuple[int, int]  # tiles of 16 features, groups of 128 columns
Tilings = Mapping[Cut, Tiling]
LAUNCHES = 100  # of a map, compared with two launches


class Forwards:
    """A model on a GPU, or a rank's part of it, with tilings on trial.

    Args:
        step: Of the model.
        ranks: Of which this is one; None without sums.
    """

    def __init__(self, step: Step, ranks: Ranks | None) -> None:
        self.step, self.ranks = step, ranks

    def take(self, tilings: Tilings) -> None:
        """Launch by these from now on; graphs that were captured before stay as they were."""
        MEASURED.update({cut: (tiling, tiling) for cut, tiling in tilings.items()})
        for module in (gemm, gemm_all_reduce):
            for kept in vars(module).values():  # launches, by the tilings before
                if hasattr(kept, "cache_clear"):
                    kept.cache_clear()

    def ms(self, tilings: Tilings) -> float:
        """Milliseconds of all layers, of the slowest rank; the same on all ranks."""
        if self.ranks is not None:
            self.ranks.agree(repr(tilings).encode(), "the tilings that they try")
        self.take(tilings)
        return statistics.median(self.step.measure(self.step.hidden, replays=20))

    def compile(self, ways: Mapping[Cut, Iterable[Tiling]], rows: int) -> None:
        """Compile a share of all kernels with sums: the other ranks find them in the cache."""
        if self.ranks is None:
            return
        world, count = self.ranks.exchange.world, row_tiles(rows)
        every = [(cut, tiling) for cut, tilings in ways.items() for tiling in tilings]
        for (tiles, groups), tiling in every[self.ranks.rank :: world]:
            sms = gemm.num_sms(self.ranks.rank)
            _, plan = gemm.chosen_layout(tiles, groups, count, tiling, sms, keep=True)
            gemm_all_reduce._kernel(count, tiling, world, plan)
        self.ranks.meet()

    def check_sums(self, rows: int) -> None:
        """Compare the summed maps of a layer with their product and sum in two launches."""
        assert self.ranks is not None, "no sums"
        exchange, layer = self.ranks.exchange, self.step.forward._layers[0]
        for linear in (layer.out, layer.down):
            assert isinstance(linear, PackedMap), "a map is not packed"
            weight = linear.weight
            x = torch.randn(rows, weight.num_columns, device="cuda").to(torch.bfloat16)
            residual = torch.ones(rows, weight.num_rows, dtype=x.dtype, device="cuda")
            tiles, groups = weight.num_tiles, weight.num_groups
            tiling = MEASURED[tiles, groups][0]
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            with exchange.patient():
                part = gemm.linear(x, weight, tiling=tiling)
                wanted = all_reduce_add(part, residual, exchange=exchange)
                for _ in range(LAUNCHES):
                    found = gemm_all_reduce.linear_all_reduce(
                        x, weight, residual, exchange=exchange
                    )
                    wrong += (found != wanted).sum()
            assert not int(wrong), f"{int(wrong)} values of {LAUNCHES} launches differ: {tiling}"
            exchange.check()
            self.ranks.agree_on_bits(wanted)
