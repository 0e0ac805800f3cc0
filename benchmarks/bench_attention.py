"""Tree attention of one layer in a CUDA graph, against PyTorch's and the two-kernel version.

    python -m benchmarks.bench_attention [--peers] [--out DIRECTORY]

Slabs of many layers are used in turn (more than the second-level cache holds). The baselines
attend rotated queries over keys that are in place: rotation and KV write are extra there, and
``flash`` has no mask: every row sees all. With ``--peers``, those of ``peers.attention``, too. Each
baseline is compared with float64 before it is timed. Then batches of several requests over pages,
as served, in larger clusters and in pairs; ``--batches`` times nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import (
    COLD_BYTES,
    READ_BANDWIDTH,
    graph_time,
    need_gpus,
    why_not,
    write_result,
)
from benchmarks.peers import attention as peer_attention
from codesign.kernels import row_attention as two_kernels
from codesign.kernels.attention_shares import CLASSES
from codesign.kernels.fused_attention import fused_attention

# name, query heads, key/value heads, head size: of one rank
MODELS = [
    ("llama-70b TP4", 16, 2, 128),
    ("llama-70b TP1", 64, 8, 128),
    ("llama-8b TP1", 32, 8, 128),
    ("llama-3.2-3b TP1", 24, 8, 128),
    ("llama-3.2-1b TP1", 32, 8, 64),
]
CONTEXTS = (500, 1000, 4000, 8000, 32_000, 100_000)
ROWS = 8
# rows of a request, requests, mean context, share by which contexts differ from it at most
BATCHES = [
    *((1, requests, context, 0.0) for requests in (4, 8, 16) for context in (500, 4000)),
    *((1, requests, 300, 0.8) for requests in (3, 6, 8, 11, 14, 20, 24, 32)),
    (1, 8, 16_000, 0.0),
    (2, 4, 1000, 0.0),
    (4, 6, 300, 0.8),
    *((8, 1, context, 0.0) for context in (500, 4000, 8000, 32_000, 100_000)),
]
PAGE = 64
LARGEST_ERROR = 2e-2  # of results rounded to bfloat16


class Layers:
    """Slabs of enough layers to keep the cache cold, and one forward's rows."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, context: int) -> None:
        self.heads, self.context = heads, context
        slab_rows = -(-(context + 64) // 64) * 64
        layer_bytes = 2 * kv_heads * (context + ROWS) * head_dim * 2
        self.num_layers = min(64, max(4, int(COLD_BYTES / layer_bytes)))
        size = (self.num_layers, 1, kv_heads, slab_rows, head_dim)
        self.keys = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        self.values = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        columns = (heads + 2 * kv_heads) * head_dim
        self.qkv = torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16)
        paths = torch.arange(64, dtype=torch.int32).repeat(ROWS, 1)  # a chain of ROWS new rows
        rows = torch.arange(ROWS, dtype=torch.int32)
        self.places = (context + rows).cuda()
        self.seen = two_kernels.SeenRows(
            torch.zeros(ROWS, dtype=torch.int32, device="cuda"),
            (context + rows).cuda(),
            torch.full((ROWS,), context, dtype=torch.int32, device="cuda"),
            paths.cuda(),
        )
        angles = torch.rand(ROWS, head_dim // 2, device="cuda") * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.scratch = two_kernels.Scratch.make(ROWS, heads, head_dim, slab_rows, self.qkv.device)
        self.out = torch.empty(ROWS, heads * head_dim, device="cuda", dtype=torch.bfloat16)
        self.q_THE = torch.randn(ROWS, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        seen_by_row = torch.ones(ROWS, context + ROWS, dtype=torch.bool, device="cuda")
        self.mask_TS = seen_by_row.tril(context)
        self.floor = (layer_bytes + self.qkv.nbytes + self.out.nbytes) / READ_BANDWIDTH

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (1, G, M, E) each."""
        return self.keys[i % self.num_layers], self.values[i % self.num_layers]

    def ours(
        self, i: int, *, pdl: bool = False, max_tail: int = ROWS + 15, most_shares: int = CLASSES
    ) -> None:
        """One launch: rotation, KV write, attention."""
        fused_attention(
            self.qkv,
            self.cos,
            self.sin,
            *self.layer(i),
            self.seen,
            self.places,
            heads=self.heads,
            max_tail=max_tail,
            out_TN=self.out,
            pdl=pdl,
            most_shares=most_shares,
        )

    def two_launches(self, i: int) -> None:
        """Triton: rotate and append, chunks, join."""
        keys, values = self.layer(i)
        tables = (self.cos, self.sin, keys, values, self.seen.slots_T, self.places)
        q_THE = two_kernels.rotate_and_append(self.qkv, *tables, heads=self.heads)
        two_kernels.row_attention(q_THE, keys, values, self.seen, self.scratch)

    def sdpa(self, backend: SDPBackend, *, masked: bool) -> Callable[[int], Tensor]:
        """PyTorch's attention over the same keys; grouped query heads as rows of a head."""
        kv_heads = self.keys.shape[2]
        group = self.heads // kv_heads
        q_GTRE = self.q_THE.unflatten(1, (kv_heads, group)).transpose(0, 1)
        q_1GNE = q_GTRE.flatten(1, 2)[None]
        end = self.context + ROWS
        mask = None
        if masked:  # rows of a mask must be aligned
            hidden = ~self.mask_TS.repeat_interleave(group, 0)
            bias = q_1GNE.new_zeros(ROWS * group, -(-end // 8) * 8)
            bias[:, :end].masked_fill_(hidden, -torch.inf)
            mask = bias[None, None, :, :end].expand(1, kv_heads, -1, -1)

        def call(i: int) -> Tensor:
            keys, values = self.layer(i)
            with sdpa_kernel(backend):
                out_1GNE = F.scaled_dot_product_attention(
                    q_1GNE, keys[:, :, :end], values[:, :, :end], attn_mask=mask
                )
            return out_1GNE[0].unflatten(1, (ROWS, group)).transpose(0, 1)

        return call

    def baselines(self) -> dict[str, Callable[[int], Tensor]]:
        """PyTorch's versions; a name says whether there is a mask."""
        return {
            "sdpa efficient, masked": self.sdpa(SDPBackend.EFFICIENT_ATTENTION, masked=True),
            "sdpa flash, no mask": self.sdpa(SDPBackend.FLASH_ATTENTION, masked=False),
            "sdpa cudnn, masked": self.sdpa(SDPBackend.CUDNN_ATTENTION, masked=True),
        }

    def error(self, call: Callable[[int], Tensor], *, masked: bool) -> float:
        """Return how far a baseline's result for the first layer is from float64's.

        Raises:
            ValueError: If it is so far that it attends something else.
        """
        found = call(0).double().reshape(self.q_THE.shape)
        expected = peer_attention.expected_attention(self, self.mask_TS if masked else None)
        error = float((found - expected).norm() / expected.norm())
        if not error < LARGEST_ERROR:
            raise ValueError(f"other attention: relative error {error:.3g}")
        return error


def batch_call(
    model: tuple[str, int, int, int], rows: int, requests: int, context: int, spread: float
) -> tuple[Callable[..., None], float]:
    """Return one launch over the pages of some requests, and its floor in seconds."""
    _, heads, kv_heads, head_dim = model
    shares = torch.linspace(1 - spread, 1 + spread, requests)[torch.randperm(requests)]
    contexts = (context * shares).int().repeat_interleave(rows)
    total, pages = rows * requests, -(-(int(contexts.max()) + rows) // PAGE)
    layer_bytes = 2 * kv_heads * (context + rows) * requests * head_dim * 2
    num_layers = min(48, max(4, int(COLD_BYTES / layer_bytes)))
    size = (num_layers, requests * pages, kv_heads, PAGE, head_dim)
    keys = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    values = torch.randn_like(keys)
    places = (contexts + torch.arange(rows, dtype=torch.int32).repeat(requests)).cuda()
    seen = two_kernels.SeenRows(
        torch.arange(requests, dtype=torch.int32, device="cuda").repeat_interleave(rows),
        places,
        contexts.cuda(),
        torch.arange(64, dtype=torch.int32, device="cuda").repeat(total, 1),
        torch.randperm(requests * pages, device="cuda").int().view(requests, pages),
    )
    angles = torch.rand(total, head_dim // 2, device="cuda") * 6
    columns = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(total, columns, device="cuda", dtype=torch.bfloat16)
    tables = (angles.cos(), angles.sin())
    out = torch.empty(total, heads * head_dim, device="cuda", dtype=torch.bfloat16)

    def call(i: int, *, in_pairs: bool) -> None:
        layer = (keys[i % num_layers], values[i % num_layers])
        fused_attention(
            *(qkv, *tables, *layer, seen, places),
            heads=heads,
            out_TN=out,
            pdl=True,
            in_pairs=in_pairs,
        )

    return call, (layer_bytes + qkv.nbytes + out.nbytes) / READ_BANDWIDTH


def batch_rows(model: tuple[str, int, int, int]) -> Iterator[dict[str, Any]]:
    """Batches of one model, in larger clusters and in pairs."""
    for rows, requests, context, spread in BATCHES:
        torch.manual_seed(requests)
        call, floor = batch_call(model, rows, requests, context, spread)
        label = {"model": model[0], "context": context, "rows": rows, "requests": requests}
        label |= {"spread": spread} if spread else {}
        for in_pairs in (False, True):
            time = graph_time(partial(call, in_pairs=in_pairs)).microseconds
            version = "in pairs" if in_pairs else "in clusters"
            yield label | {"version": version} | time | {"floor_us": round(floor * 1e6, 2)}


def rows_of(
    model: tuple[str, int, int, int], context: int, *, peers: bool
) -> Iterator[dict[str, Any]]:
    """All versions of one model at one context."""
    name, heads, kv_heads, head_dim = model
    layers = Layers(heads, kv_heads, head_dim, context)
    ours: dict[str, Callable[[int], Any]] = {
        "one launch": layers.ours,
        "one launch, PDL": lambda i: layers.ours(i, pdl=True),
        "one launch, PDL, unshared": lambda i: layers.ours(i, pdl=True, most_shares=1),
        "two-kernel Triton": layers.two_launches,
    }
    label = {"model": name, "context": context, "rows": ROWS}
    for version, call in ours.items():
        yield label | {"version": version} | timed(layers, call)
    makers = {v: lambda call=call: call for v, call in layers.baselines().items()}
    if peers:
        makers |= peer_attention.makers(layers)
    for version, make in makers.items():
        yield label | {"version": version} | checked(layers, make, masked="no mask" not in version)


def timed(layers: Layers, call: Callable[[int], Any]) -> dict[str, Any]:
    """What a row says of the time."""
    return graph_time(call).microseconds | {"floor_us": round(layers.floor * 1e6, 2)}


def checked(
    layers: Layers, make: Callable[[], Callable[[int], Tensor]], *, masked: bool
) -> dict[str, Any]:
    """Compare a baseline with float64, then time it; or why there is no time of it."""
    try:
        call = make()
        error = layers.error(call, masked=masked)
        return timed(layers, call) | {"relative_error": round(error, 6)}
    except Exception as error:  # theirs may raise whatever it likes
        return {"status": why_not(error)}


def main() -> None:
    """Measure and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", type=int, default=len(MODELS))
    parser.add_argument("--peers", action="store_true", help="time other projects' kernels, too")
    parser.add_argument("--batches", action="store_true", help="time batches only")
    arguments = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    note = "medians over graph replays of 50 calls; layers in turn, cache cold; floor at "
    note += f"{READ_BANDWIDTH / 1e12:.1f} TB/s"
    write = partial(write_result, "attention", rows, directory=arguments.out, note=note)
    for model in MODELS[: arguments.models]:
        contexts = () if arguments.batches else CONTEXTS
        single = (rows_of(model, context, peers=arguments.peers) for context in contexts)
        for row in chain.from_iterable((*single, batch_rows(model))):
            rows.append(row)
            show(row)
            write()  # each time: another project's kernel may break or stop what comes next
    print(write())


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    what = (
        f"{row['model']:16} {row['rows']:2} x {row.get('requests', 1):2} behind {row['context']:6}"
        f"{' mixed' if row.get('spread') else ''}"
    )
    what += f" {row['version']:24}"
    time = f"{row['us']:8.2f} us, floor {row['floor_us']:.2f}" if "us" in row else row["status"]
    print(what, time, flush=True)


if __name__ == "__main__":
    main()
