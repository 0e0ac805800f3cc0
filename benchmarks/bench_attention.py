"""Tree attention of one layer in a CUDA graph, against PyTorch's and the two-kernel version.

    python -m benchmarks.bench_attention [--out DIRECTORY]

Slabs of many layers are used in turn (more than the second-level cache holds). The baselines
attend rotated queries over keys that are in place: rotation and KV write are extra there, and
``flash`` sees the prefix only, without a mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import Timing, graph_time, write_result
from codesign.kernels import row_attention as two_kernels
from codesign.kernels.fused_attention import fused_attention

READ_BANDWIDTH = 4.2e12  # bytes per second, measured on an H200
COLD_BYTES = 250e6
# name, query heads, key/value heads, head size: of one rank
MODELS = [
    ("llama-70b TP4", 16, 2, 128),
    ("llama-70b TP1", 64, 8, 128),
    ("llama-8b TP1", 32, 8, 128),
    ("llama-3.2-3b TP1", 24, 8, 128),
    ("llama-3.2-1b TP1", 32, 8, 64),
]
CONTEXTS = (500, 1000, 4000, 32_000)
ROWS = 8


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
        self.floor = (layer_bytes + self.qkv.nbytes + self.out.nbytes) / READ_BANDWIDTH

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (1, G, M, E) each."""
        return self.keys[i % self.num_layers], self.values[i % self.num_layers]

    def ours(self, i: int, *, pdl: bool = False, max_tail: int = ROWS + 15) -> None:
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
        )

    def two_launches(self, i: int) -> None:
        """Triton: rotate and append, chunks, join."""
        keys, values = self.layer(i)
        tables = (self.cos, self.sin, keys, values, self.seen.slots_T, self.places)
        q_THE = two_kernels.rotate_and_append(self.qkv, *tables, heads=self.heads)
        two_kernels.row_attention(q_THE, keys, values, self.seen, self.scratch)

    def sdpa(self, backend: SDPBackend, *, masked: bool) -> Callable[[int], None]:
        """PyTorch's attention over the same keys; grouped query heads as rows of a head."""
        kv_heads, head_dim = self.keys.shape[2], self.keys.shape[4]
        group = self.heads // kv_heads
        q_1GRE = torch.randn(
            1, kv_heads, ROWS * group, head_dim, device="cuda", dtype=torch.bfloat16
        )
        end = self.context + ROWS
        mask = None
        if masked:  # rows of a mask must be aligned
            bias = torch.zeros(ROWS * group, -(-end // 8) * 8, device="cuda", dtype=torch.bfloat16)
            bias[:, self.context : end].masked_fill_(
                ~torch.ones(ROWS, ROWS, device="cuda").tril().bool().repeat_interleave(group, 0),
                -torch.inf,
            )
            mask = bias[None, None, :, :end].expand(1, kv_heads, -1, -1)

        def call(i: int) -> None:
            keys, values = self.layer(i)
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(
                    q_1GRE, keys[:, :, :end], values[:, :, :end], attn_mask=mask
                )

        return call


def measure(name: str, call: Callable[[int], Any]) -> Timing | None:
    """Time a version; None where it does not run."""
    try:
        return graph_time(call)
    except (RuntimeError, ValueError) as error:
        print(f"  {name}: {str(error).splitlines()[0][:100]}", flush=True)
        torch.cuda.synchronize()
        return None


def rows_of(model: tuple[str, int, int, int], context: int) -> list[dict[str, Any]]:
    """All versions of one model at one context."""
    name, heads, kv_heads, head_dim = model
    layers = Layers(heads, kv_heads, head_dim, context)
    versions: dict[str, Callable[[int], Any]] = {
        "one launch": layers.ours,
        "one launch, PDL": lambda i: layers.ours(i, pdl=True),
        "two-kernel Triton": layers.two_launches,
        "sdpa efficient, masked": layers.sdpa(SDPBackend.EFFICIENT_ATTENTION, masked=True),
        "sdpa flash, no mask": layers.sdpa(SDPBackend.FLASH_ATTENTION, masked=False),
        "sdpa cudnn, masked": layers.sdpa(SDPBackend.CUDNN_ATTENTION, masked=True),
    }
    rows = []
    for version, call in versions.items():
        timing = measure(version, call)
        if timing is not None:
            size = {"model": name, "context": context, "rows": ROWS, "version": version}
            rows.append(size | timing.microseconds | {"floor_us": round(layers.floor * 1e6, 2)})
            print(
                f"{name:18} {context:6} {version:24} {timing.median * 1e6:8.2f} us, "
                f"floor {layers.floor * 1e6:.2f}",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", type=int, default=len(MODELS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for model in MODELS[: arguments.models]:
        for context in CONTEXTS:
            rows += rows_of(model, context)
    note = "medians over graph replays of 50 calls; layers in turn, cache cold; floor at 4.2 TB/s"
    print(write_result("attention", rows, directory=arguments.out, note=note))


if __name__ == "__main__":
    main()
