"""The linear maps of a decoder layer in CUDA graphs, against the memory's floor and PyTorch's own.

    python -m benchmarks.bench_kernels [--rows 1 8 16] [--peers] [--out DIRECTORY]

Weights are used in turn, more bytes than the second-level cache holds. Norm, SwiGLU and residual
are fused where a layer has them; the baselines are the product alone: cuBLAS over bfloat16 weights,
PyTorch's int4 product and, with ``--peers``, those of other projects (``peers.gemm``). Every kernel
is compared with float64 before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    COLD_BYTES,
    READ_BANDWIDTH,
    Timing,
    graph_time,
    need_gpus,
    why_not,
    write_result,
)
from benchmarks.peers import gemm as peer_gemm
from codesign.kernels import gemm, packed_reference
from codesign.kernels.int4 import round_scales
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import GROUP, TILE, PackedLinear
from codesign.kernels.tiling import Tiling, choose, row_tiles, tile_bytes

PIECE_ROWS, EVERY = 16, slice(None)
PIECE = 256  # tiles that the reference unpacks at a time
# name: hidden size, query columns, key and value columns, channels of the MLP; of one rank
MODELS = {
    "llama-70b TP1": (8192, 8192, 1024, 28672),
    "llama-70b TP4": (8192, 2048, 256, 7168),
    "llama-8b TP1": (4096, 4096, 1024, 14336),
    "llama-3.2-3b TP1": (3072, 3072, 1024, 8192),
    "llama-3.2-1b TP1": (2048, 2048, 512, 8192),
}


@dataclass(frozen=True)
class Map:
    """A linear map and what is fused with it."""

    model: str
    op: str
    columns: int  # K
    features: int  # N
    norm: bool = False
    residual: bool = False

    @property
    def tiles(self) -> int:
        """Of 16 features."""
        return -(-self.features // TILE)

    @property
    def groups(self) -> int:
        """Of 128 columns."""
        return -(-self.columns // GROUP)


def maps() -> Iterator[Map]:
    """The maps of a layer of every model."""
    for model, (hidden, query, keys, channels) in MODELS.items():
        yield Map(model, "qkv", hidden, query + 2 * keys, norm=True)
        yield Map(model, "o", query, hidden, residual=True)
        yield Map(model, "gate_up", hidden, 2 * channels, norm=True)
        yield Map(model, "down", channels, hidden, residual=True)


class Case:
    """Weights of enough layers to keep the cache cold, rows, and the result in float64."""

    def __init__(self, of: Map, rows: int) -> None:
        self.of, self.rows = of, rows
        size = of.tiles * tile_bytes(of.groups)
        self.weights = [random_weight(of) for _ in range(max(4, int(COLD_BYTES / size)))]
        self.x = torch.randn(rows, of.columns, device="cuda").to(torch.bfloat16)
        self.norm = None
        if of.norm:
            self.norm = Norm(torch.randn(of.columns, device="cuda").to(torch.bfloat16), 1e-5)
        outputs = of.features // 2 if of.op == "gate_up" else of.features
        self.out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.randn_like(self.out) if of.residual else None
        self.expected = self.reference()

    def reference(self) -> Tensor:
        """What the first weight gives, (M, N) or (M, I) float64."""
        weight = self.weights[0]
        pieces = []
        for start in range(0, self.of.tiles, PIECE):
            data = weight.data[start : start + PIECE]
            features = min(PIECE * TILE, self.of.features - start * TILE)
            piece = PackedLinear(data, features, self.of.columns)
            op = packed_reference.gate_up if self.of.op == "gate_up" else packed_reference.linear
            pieces.append(op(self.x, piece, norm=self.norm))
        out = torch.cat(pieces, dim=1)
        return out if self.residual is None else out + self.residual.double()

    def call(self, i: int, *, pdl: bool = True, rows: slice = EVERY) -> None:
        """One launch over the i-th weight, or over some rows."""
        weight, x, out = self.weights[i % len(self.weights)], self.x[rows], self.out[rows]
        options: dict[str, Any] = {"norm": self.norm, "out": out, "pdl": pdl}
        if self.of.op == "gate_up":
            gemm.gate_up(x, weight, **options)
        else:
            residual = None if self.residual is None else self.residual[rows]
            gemm.linear(x, weight, residual_MN=residual, **options)

    def error(self) -> float:
        """Relative error of the first weight's result."""
        self.out.fill_(torch.nan)
        self.call(0)
        return float((self.out.double() - self.expected).norm() / self.expected.norm())

    def time(self, call: Callable[[int], object], replays: int) -> Timing:
        """Graph of as many calls as there are weights, at least 24."""
        return graph_time(call, calls=max(24, len(self.weights)), replays=replays)

    def measured(self, *, pdl: bool = True) -> dict:
        """A row of the result."""
        error = self.error()
        assert error < 5e-3, f"{self.of}: relative error {error}"
        timing = self.time(lambda i: self.call(i, pdl=pdl), 20)
        return self.row("ours" if pdl else "ours, no PDL", timing) | {
            "tiling": str(self.chosen()),
            "relative_error": round(error, 6),
        }

    def in_pieces(self) -> dict[str, Any]:
        """What launches of sixteen rows take, one after another."""
        starts = range(0, self.rows, PIECE_ROWS)

        def call(i: int) -> None:
            for start in starts:
                self.call(i, rows=slice(start, start + PIECE_ROWS))

        return self.row(f"launches of {PIECE_ROWS} rows", self.time(call, 20))

    def chosen(self) -> Tiling:
        """What ``choose`` takes."""
        count = row_tiles(self.rows)
        return choose(tiles=self.of.tiles, groups=self.of.groups, num_row_tiles=count)

    def label(self, kernel: str) -> dict[str, Any]:
        """What every row is about."""
        return {
            "model": self.of.model,
            "op": self.of.op,
            "rows": self.rows,
            "kernel": kernel,
        }

    def row(self, kernel: str, timing: Timing) -> dict[str, Any]:
        """What every row of a kernel that ran has."""
        weight_bytes = self.weights[0].num_bytes
        floor = weight_bytes / READ_BANDWIDTH
        return self.label(kernel) | {
            "weight_bytes": weight_bytes,
            "floor_us": round(floor * 1e6, 3),
            "ratio": round(timing.median / floor, 3),
            **timing.microseconds,
        }

    def baselines(self) -> list[dict[str, Any]]:
        """The product alone: cuBLAS over bfloat16, PyTorch's int4."""
        columns, features = self.of.columns, self.of.features
        count = max(4, int(COLD_BYTES / (2 * columns * features)))
        size = (count, features, columns)
        dense = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        timing = self.time(lambda i: torch.mm(self.x, dense[i % count].t()), 12)
        rows = [self.row("torch bf16 (cuBLAS)", timing)]
        codes = torch.randint(0, 256, (features, columns // 2), device="cuda", dtype=torch.uint8)
        packed = [
            torch.ops.aten._convert_weight_to_int4pack(codes, 8) for _ in range(len(self.weights))
        ]
        ends = torch.rand(self.of.groups, features, 2, device="cuda").to(torch.bfloat16)
        timing = self.time(
            lambda i: torch.ops.aten._weight_int4pack_mm(
                self.x, packed[i % len(packed)], GROUP, ends
            ),
            12,
        )
        return [*rows, self.row("torch int4 (tinygemm)", timing)]

    def peer(self, peer: peer_gemm.Peer) -> dict[str, Any]:
        """Another project's product alone, or why there is no time of it."""
        try:
            return self.timed_peer(peer)
        except Exception as error:  # theirs may raise whatever it likes
            return self.label(peer.name) | {"status": why_not(error)}

    def timed_peer(self, peer: peer_gemm.Peer) -> dict[str, Any]:
        """Check the first weight, then time copies in turn."""
        size = (self.of.features, self.of.columns)
        weight = peer_gemm.random_int4(
            *size, group=GROUP, device="cuda", is_symmetric=peer.is_symmetric
        )
        x = self.x.to(peer.dtype)
        products = [peer.load(weight, self.rows, peer.dtype) for _ in self.weights]
        error = peer_gemm.relative_error(products[0], weight, x)
        timing = self.time(lambda i: products[i % len(products)](x), 12)
        return self.row(peer.name, timing) | {"relative_error": round(error, 6)}


def random_weight(of: Map) -> PackedLinear:
    """Random codes, scales and zero points."""
    size = (of.tiles, tile_bytes(of.groups))
    data = torch.randint(0, 256, size, device="cuda", dtype=torch.uint8)
    weight = PackedLinear(data, of.features, of.columns)
    scales = round_scales(torch.rand(of.tiles, of.groups, 16, device="cuda") * 0.02)
    zeros = torch.randint(0, 16, scales.shape, device="cuda", dtype=torch.int16)
    weight.records[..., 1024:] = (scales.view(torch.int16) << 1 | zeros).view(torch.uint8)
    return weight


def main() -> None:
    """Time everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS)[1:])
    parser.add_argument("--peers", action="store_true", help="time other projects' products, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    note = "medians in CUDA graphs, weights in turn; floor: weight bytes / "
    note += f"{READ_BANDWIDTH / 1e12:.1f} TB/s"
    write = partial(write_result, "kernels", results, directory=args.out, note=note)
    for of in maps():
        if of.model not in args.models:
            continue
        for rows in args.rows:
            found = measured_case(Case(of, rows), peers=args.peers)
            results += found
            show(found)
            write()  # each time: another project's kernel may break or stop what comes next
    print(write())


def measured_case(case: Case, *, peers: bool) -> list[dict[str, Any]]:
    """All rows of one map at one number of rows."""
    found = [case.measured(), case.measured(pdl=False)]
    if case.rows == 8:
        found += case.baselines()
    if case.rows > PIECE_ROWS:
        found.append(case.in_pieces())
    if peers:
        found += [case.peer(peer) for peer in peer_gemm.PEERS]
    return found


def show(found: list[dict[str, Any]]) -> None:
    """Print the rows of one case."""
    first = found[0]
    print(f"{first['model']} {first['op']} rows {first['rows']} floor {first['floor_us']:.2f} us")
    for row in found:
        time = f"{row['us']:8.2f}" if "us" in row else f"{'-':>8}"
        remark = row.get("tiling", row.get("status", ""))
        print(f"  {time} {row['kernel']} {remark}", flush=True)


if __name__ == "__main__":
    main()
