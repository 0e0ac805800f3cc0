"""What follows the layers of a step: sampling, walk, key and value moves, a draft's choices.

    python -m benchmarks.bench_step_ends [--rows 8 64] [--out DIRECTORY]

Each kernel in a CUDA graph beside the same in plain PyTorch operations. The floor is the reading of
the logits, or of the head's weight, or the rows moved read and written (4.2 TB/s on an H200).
Prints a line and writes a row for each. Samples, from logits to tokens, are taken in every way of
``WAYS`` from two kinds of logits: random ones, which leave half of all tokens to a top-p, and
peaked ones, like a language model's, of which fifty stand out and leave it a few.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import READ_BANDWIDTH, graph_time, need_gpus, write_result
from codesign.kernels import keyed_sampling as sampling
from codesign.kernels.embedding import embed_rows
from codesign.kernels.int4 import quantize_int4
from codesign.kernels.packed_linear import LinearMap, logits_map
from codesign.kernels.packing import GROUP, TILE
from codesign.kernels.row_attention import move_rows
from codesign.kernels.row_choices import choice_words, words_of
from codesign.kernels.row_samplings import AnySampling, RowSamplings, has_top_k, has_top_p
from codesign.kernels.tiling import RECORD_BYTES
from codesign.policy.walk import Sampling

VOCABULARY = 128_256
PATH = 136
# model: layers, key/value heads, head size; of one rank
CACHES = {"llama-3.2-1b": (16, 8, 64), "llama-8b": (32, 8, 128), "llama-70b TP4": (80, 2, 128)}
HEADS = {"llama-3.2-1b": 2048, "llama-3.2-3b": 3072}
# Of a run whose requests sample alike, or of its requests by turns.
WAYS = {
    "greedy": (Sampling(),),
    "temperature": (Sampling(0.7),),
    "temperature by row": (Sampling(0.7), Sampling(1.0), Sampling()),
    "top-p 0.9": (Sampling(0.7, top_p=0.9),),
    "top-k 50": (Sampling(0.7, top_k=50),),
    "top-k 50, top-p 0.9": (Sampling(0.7, top_k=50, top_p=0.9),),
    "cuts by row": (Sampling(0.7, top_p=0.9), Sampling(), Sampling(1.0, top_k=50), Sampling(1.0)),
}
Call = Callable[[], object]


def by_row(samplings: list[Sampling]) -> RowSamplings:
    """Of rows that sample each in its own way."""
    numbers = [(one.temperature, one.top_k, one.top_p) for one in samplings]
    columns = torch.tensor(numbers, dtype=torch.float64, device="cuda").T.contiguous()
    top_k, top_p = any(map(has_top_k, samplings)), any(map(has_top_p, samplings))
    return RowSamplings(*columns, has_top_k=top_k, has_top_p=top_p)


class Bench:
    """Rows of the result for one number of rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.results: list[dict[str, Any]] = []

    def note(self, op: str, kernel: str, call: Call, floor_bytes: int, calls: int = 20) -> None:
        """Time a call."""
        timing = graph_time(lambda _: call(), calls=calls, replays=20)
        floor = round(floor_bytes / READ_BANDWIDTH * 1e6, 3)
        row = {"op": op, "rows": self.rows, "kernel": kernel, "floor_us": floor}
        self.results.append(row | timing.microseconds)
        print(f"{op:36} rows {self.rows:3} {kernel:10} {timing.median * 1e6:8.2f} us", flush=True)

    def ints(self, value: int) -> torch.Tensor:
        """(T,) int32."""
        return torch.full((self.rows,), value, dtype=torch.int32, device="cuda")

    def random(self) -> Tensor:
        """Logits without a favourite."""
        return torch.randn(self.rows, VOCABULARY, device="cuda")

    def peaked(self) -> Tensor:
        """Logits of which fifty stand out, the largest by ten deviations."""
        logits = 2 * self.random()
        places = torch.rand_like(logits).topk(50, dim=1).indices
        values = 20 - 0.5 * torch.arange(50.0, device="cuda")
        return logits.scatter(1, places, values.expand(self.rows, -1))

    def samples(self) -> None:
        """Sampling and walk of a tree of one level."""
        low, high, positions = self.ints(7), self.ints(9), self.ints(600)
        for kind, logits in (("random", self.random()), ("peaked", self.peaked())):
            for name, ways in WAYS.items():
                op = f"sample, {name}, {kind}"
                how = ways[0] if len(ways) == 1 else by_row([*islice(cycle(ways), self.rows)])

                def sample(how: AnySampling = how, logits: Tensor = logits) -> object:
                    return sampling.sample_rows(logits, low, high, positions, how)

                def plain(how: AnySampling = how, logits: Tensor = logits) -> object:
                    keys = sampling.row_keys(low, high, positions)
                    return sampling.best_tokens(logits, keys, how)

                self.note(op, "ours", sample, logits.nbytes)
                self.note(op, "PyTorch", plain, logits.nbytes, 4)
        paths = torch.zeros(self.rows, PATH, dtype=torch.int32, device="cuda")
        paths[:, 1] = torch.arange(self.rows)
        tree = {"parents_T": self.ints(0), "firsts_T": self.ints(0), "path_TP": paths}
        tree["parents_T"][0] = -1
        tokens, depths = self.ints(5), self.ints(1)
        own = {"positions_T": positions, "prefixes_T": positions - 1, "slots_T": self.ints(0)}
        self.note(
            "walk",
            "ours",
            lambda: sampling.accepted_moves(
                tokens, tokens, places_T=positions, scratch_slot=1, **own, **tree
            ),
            paths.nbytes,
        )
        self.note(
            "walk, without the moves",
            "PyTorch",
            lambda: sampling.accepted_rows(tokens, tokens, depths_T=depths, **tree),
            paths.nbytes,
        )

    def moves(self) -> None:
        """Rows of all layers of one slab to other places of it."""
        for model, (layers, heads, size) in CACHES.items():
            shape = (layers, 2, heads, 2048, size)
            keys, values = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
            rows = torch.arange(self.rows, dtype=torch.int32, device="cuda")
            moves = torch.stack((rows * 0, 700 + 2 * rows, 700 + rows), dim=1).contiguous()
            count = self.ints(self.rows)[:1]
            moved = 4 * layers * heads * size * 2 * self.rows  # keys and values, read and written
            self.note(
                f"moves, {model}",
                "ours",
                lambda k=keys, v=values, m=moves, n=count: move_rows(k, v, m, n),
                moved,
            )
            froms, tos = moves[:, 1].long(), moves[:, 2].long()

            def indexed(
                caches: tuple[Tensor, Tensor] = (keys, values),
                froms: Tensor = froms,
                tos: Tensor = tos,
            ) -> None:
                for cache in caches:
                    cache[:, 0].index_copy_(2, tos, cache[:, 0].index_select(2, froms))

            self.note(f"moves, {model}", "PyTorch", indexed, moved)

    def choices(self) -> None:
        """The likeliest 8 tokens from logits, and from hidden states."""
        logits = torch.randn(self.rows, VOCABULARY, device="cuda")

        def plain() -> object:
            values, columns = logits.topk(8, dim=-1)
            return words_of(values, columns, torch.logsumexp(logits, dim=-1))

        self.note("choices of logits", "ours", lambda: choice_words(logits, 8), logits.nbytes)
        self.note("choices of logits", "PyTorch", plain, logits.nbytes)
        for model, hidden in HEADS.items():
            dense = torch.randn(VOCABULARY, hidden, device="cuda").bfloat16()
            x = torch.randn(self.rows, hidden, device="cuda").bfloat16()
            small = quantize_int4(dense, group=128)
            small_bytes = VOCABULARY * hidden * RECORD_BYTES // (TILE * GROUP)
            for name, head, size in (
                ("head", dense, dense.nbytes), ("int4 head", small, small_bytes)
            ):  # fmt: skip
                product = logits_map(head)

                def choose(x: Tensor = x, product: LinearMap = product) -> object:
                    return choice_words(product(x), 8)

                self.note(f"{name} and choices, {model}", "ours", choose, size, 8)

    def beginning(self) -> None:
        """Embedding and angles."""
        embedding = torch.randn(VOCABULARY, 2048, device="cuda").bfloat16()
        frequency = torch.rand(64, device="cuda")
        tokens, positions = self.ints(5), self.ints(600)

        def plain() -> object:
            angle = positions[:, None].float() * frequency
            return embedding[tokens.long()], angle.cos(), angle.sin()

        moved = 2 * self.rows * 2048 * 2
        self.note(
            "embedding and angles",
            "ours",
            lambda: embed_rows(tokens, positions, embedding, frequency),
            moved,
        )
        self.note("embedding and angles", "PyTorch", plain, moved)


def main() -> None:
    """Time everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    for rows in args.rows:
        bench = Bench(rows)
        for part in (bench.beginning, bench.samples, bench.moves, bench.choices):
            part()
        results += bench.results
    note = "medians in CUDA graphs; vocabulary 128,256; one request in all rows"
    print(write_result("step_ends", results, directory=args.out, note=note))


if __name__ == "__main__":
    main()
