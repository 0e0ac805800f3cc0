"""Search the tilings of a model's int4 maps within whole forwards, one map after the other.

    python -m benchmarks.search_tilings --model llama-3.1-8b --tensor-parallel 2 [--out FILE]
    python -m benchmarks.search_tilings --model llama-3.1-8b --tensor-parallel 2 --sums --rows 8 16

Milliseconds are of all layers of a rank's forward in a CUDA graph, as in ``bench_forward``: of one
rank without sums; with ``--sums`` of all ranks, a GPU each, and the tilings searched are those of
the maps that are summed, o and down. Candidates are what the kernel can run, by ``tiling.choose``'s
price; the fastest of a map are timed again in turns, and one has to gain ``WORTH`` to replace what
the table has. Then each map's ``paced`` is tried. What it prints as best goes into ``MEASURED`` of
kernels/tiling.py, behind ``tests/gpu/test_tilings.py``; other models may have a map of that size,
too, which no sum follows. For 16 rows warps and clusters stay those of 8, as a row's bits must not
depend on its neighbours; after 8 in the same call they are those that were found.

With sums all ranks must end every forward with the same bits; the best tilings' maps must then have
the bits of their product and sum in two launches. Others are not held to that: it would compile
each candidate twice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_forward import Step
from benchmarks.common import SHAPES, need_gpus, write_result
from benchmarks.over_ranks import Ranks, over_ranks
from benchmarks.tiled_forwards import Cut, Forwards, Tilings
from codesign.errors import CodesignError, HardwareError
from codesign.kernels import gemm
from codesign.kernels.packing import GROUP, TILE
from codesign.kernels.tiling import Tiling, choose, cost, layout, row_tiles
from codesign.models.shape import ModelShape, model_shape
from codesign.models.sharding import Sharding

SMS, MOST_THREADS = 132, 768  # of a multiprocessor: more leave a thread too few registers
AGAIN, TURNS, WORTH = 4, 3, 0.002  # a share of the forward
PACED = (0, 3, 4)  # beside 2
MOST_CANDIDATES = 24  # of each map
CONTEXT = 500  # tokens behind the rows
OPS = ("qkv", "o", "gate_up", "down")
SUMMED_OPS = ("o", "down")


def cuts(shape: ModelShape, ops: Sequence[str] = OPS) -> dict[Cut, str]:
    """Maps of a rank's layer; those of the same size are one."""
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[Cut, str] = {}
    for op, features, columns in (
        ("qkv", query + 2 * keys, shape.hidden),
        ("o", shape.hidden, query),
        ("gate_up", 2 * shape.intermediate, shape.hidden),
        ("down", shape.hidden, shape.intermediate),
    ):
        if op not in ops:
            continue
        cut = -(-features // TILE), -(-columns // GROUP)
        found[cut] = f"{found[cut]}, {op}" if cut in found else op
    return found


def candidates(cut: Cut, rows: int, like: Tiling | None = None) -> list[Tiling]:
    """What the kernel runs, also with a sum over ranks, cheapest first; ``like``: cut as this."""
    size = {"tiles": cut[0], "groups": cut[1], "num_sms": SMS}
    count = row_tiles(rows)
    found = [
        tiling
        for tiling in _even(cut[1])
        if like is None or (tiling.warps, tiling.cluster) == (like.warps, like.cluster)
        if tiling.threads(count) * tiling.blocks <= MOST_THREADS
        if layout(tiling, **size, num_row_tiles=count, keep=True).stages >= 2
    ]
    return sorted(found, key=lambda tiling: cost(tiling, **size))


def _even(groups: int) -> Iterator[Tiling]:
    """Tilings whose blocks have equally many chunks, with no more warps than these need."""
    for warps in range(1, min(16, groups) + 1):
        chunks = -(-groups // warps)
        if -(-groups // chunks) == warps:
            for cluster in (size for size in (1, 2, 4) if chunks % size == 0):
                for tiles in (1, 2, 4):
                    yield Tiling(warps, tiles, cluster)
                    yield Tiling(warps, tiles, cluster, 2, 1)


class Search:
    """The best tilings so far, and the least milliseconds of every forward that was tried."""

    def __init__(self, start: Tilings, time: Callable[[Tilings], float]) -> None:
        self.best = dict(start)
        self.tried: dict[tuple[Tiling, ...], float] = {}
        self._time = time

    def step(self, cut: Cut, others: Iterable[Tiling]) -> None:
        """Give a map the fastest of some tilings, where that is worth it."""
        old = self.best
        ways = [old | {cut: tiling} for tiling in others if tiling != old[cut]]
        fastest = sorted(ways, key=self.ms)[:AGAIN]
        now, *times = self.in_turns([old, *fastest])
        if times and min(times) < now * (1 - WORTH):
            self.best = fastest[times.index(min(times))]

    def in_turns(self, ways: list[dict[Cut, Tiling]]) -> list[float]:
        """Medians of some turns: what slows the machine for a while slows all of them."""
        turns = [[self.ms(way) for way in ways] for _ in range(TURNS)]
        return [statistics.median(times) for times in zip(*turns, strict=True)]

    def ms(self, way: dict[Cut, Tiling]) -> float:
        """Milliseconds of a forward, now."""
        ms, key = self._time(way), tuple(way.values())
        self.tried[key] = min(ms, self.tried.get(key, ms))
        return ms


def table_of(maps: Iterable[Cut], rows: int) -> dict[Cut, Tiling]:
    """What the table has."""
    count = row_tiles(rows)
    return {cut: choose(tiles=cut[0], groups=cut[1], num_row_tiles=count) for cut in maps}


def cut_alike(now: Tilings, few: Tilings, rows: int) -> dict[Cut, Tiling]:
    """``now``, or the cheapest where that does not cut the columns as ``few``."""
    return {
        cut: old
        if (old.warps, old.cluster) == (few[cut].warps, few[cut].cluster)
        else candidates(cut, rows, few[cut])[0]
        for cut, old in now.items()
    }


def tried(now: Tilings, rows: int, most: int) -> dict[Cut, list[Tiling]]:
    """The candidates of each map."""
    many = row_tiles(rows) > 1
    return {cut: candidates(cut, rows, old if many else None)[:most] for cut, old in now.items()}


def searched(
    maps: Mapping[Cut, str],
    now: Tilings,
    ways: Mapping[Cut, Iterable[Tiling]],
    time: Callable[[Tilings], float],
    say: Callable[[str], None],
) -> tuple[Tilings, dict[str, Any]]:
    """Search all maps; the best, and what the result says of them."""
    search = Search(now, time)
    for cut, op in maps.items():
        search.step(cut, ways[cut])
        say(f"{op}: {short(search.best[cut])}")
    for cut in maps:
        search.step(cut, [replace(search.best[cut], paced=paced) for paced in PACED])
    before, after = search.in_turns([dict(now), search.best])
    fastest = sorted(search.tried.items(), key=lambda item: item[1])[:8]
    return search.best, {
        "ms": {"now": round(before, 4), "best": round(after, 4)},
        "maps": {op: list(cut) for cut, op in maps.items()},
        "now": [short(tiling) for tiling in now.values()],
        "best": [short(tiling) for tiling in search.best.values()],
        "fastest": {"; ".join(map(short, key)): round(ms, 4) for key, ms in fastest},
        "num_tried": len(search.tried),
    }


def short(tiling: Tiling) -> str:
    """As the table of kernels/tiling.py has it."""
    words = [str(size) for size in (tiling.warps, tiling.tiles, tiling.cluster)]
    if (tiling.blocks, tiling.launched) != (1, 0):
        words += [str(tiling.blocks), str(tiling.launched)]
    return f"Tiling({', '.join(words + [f'paced={tiling.paced}'] * (tiling.paced != 2))})"


def table(found: Mapping[str, Any]) -> str:
    """Old and best of each map, and of the forward."""
    each = zip(found["maps"].items(), found["now"], found["best"], strict=True)
    lines = [(op, str(tuple(cut)), now, best) for (op, cut), now, best in each]
    tried = f"{found['num_tried']} forwards"
    lines = [("map", "size", "now", "best"), *lines, ("ms", tried, *found["ms"].values())]
    return "\n".join(f"{op:12} {size:14} {now!s:32} {best}" for op, size, now, best in lines)


def search_model(
    ranks: Ranks | None, model: str, tensor_parallel: int, each_rows: Sequence[int]
) -> list[dict[str, Any]]:
    """A row of the result for each number of rows, the second by what the first one found."""
    summed = ranks is not None
    sharding = Sharding(model_shape(SHAPES / model), tensor_parallel, group=GROUP)
    maps = cuts(sharding.shape, SUMMED_OPS if summed else OPS)
    step = Step(model, tensor_parallel, each_rows[0], each_rows[0], CONTEXT, ranks)
    assert step.cuts == cuts(sharding.shape).keys(), f"maps of {step.cuts} for {maps}"
    forwards = Forwards(step, ranks)

    def say(line: str) -> None:
        if ranks is None or ranks.rank == 0:
            print(line, file=sys.stderr, flush=True)

    # Before a search writes to it.
    tables = {rows: table_of(maps, rows) for rows in each_rows}
    found, few = [], None
    for rows in each_rows:
        now = tables[rows] if few is None else cut_alike(tables[rows], few, rows)
        ways = tried(now, rows, MOST_CANDIDATES)
        step.rows = step.rows_of(rows, rows, CONTEXT)
        forwards.compile(ways, rows)
        few, row = searched(maps, now, ways, forwards.ms, say)
        forwards.take(few)
        if summed:
            forwards.check_sums(rows)
        row = {"context": CONTEXT, **row}
        found.append(
            {"model": model, "tensor_parallel": tensor_parallel, "sums": summed, "rows": rows} | row
        )
        say(table(row))
    return found


def main() -> None:
    """Search one model."""
    parser = argparse.ArgumentParser(description="Search tilings within whole forwards.")
    names = sorted(path.name for path in SHAPES.iterdir())
    parser.add_argument("--model", required=True, choices=names, metavar="NAME", help="a shape")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--sums", action="store_true", help="use them all, and add up over ranks")
    parser.add_argument("--rows", type=int, nargs="+", default=[8], choices=(8, 16))
    parser.add_argument("--out", type=Path, help="JSON file; without it in benchmarks/results")
    args = parser.parse_args()
    size = args.tensor_parallel if args.sums else 1
    need_gpus(size)
    if args.sums and size == 1:
        parser.error("--sums needs --tensor-parallel 2 or more")
    try:
        Sharding(model_shape(SHAPES / args.model), args.tensor_parallel, group=GROUP)
    except CodesignError as error:
        parser.error(str(error))
    if torch.cuda.get_device_capability(0)[0] != 9 or gemm.num_sms(0) != SMS:
        found = f"{torch.cuda.get_device_name(0)} with {gemm.num_sms(0)}"
        print(f"search_tilings.py: needs a Hopper GPU with {SMS} multiprocessors, found {found}",
              file=sys.stderr)  # fmt: skip
        sys.exit(HardwareError.exit_code)
    torch.manual_seed(0)
    what = args.model, args.tensor_parallel, sorted(args.rows)
    rows = over_ranks(search_model, size, *what) if args.sums else search_model(None, *what)
    note = "all layers of a forward, milliseconds; medians of 20 graph replays, of 3 turns"
    print(write_result("tilings", rows, note=note, path=args.out))


if __name__ == "__main__":
    main()
