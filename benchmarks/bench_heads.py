"""Heads in bf16 and their int8 copies (``kernels/head_codes.py``), from hidden rows to an answer.

    python -m benchmarks.bench_heads [--rows 1 8 64] [--out DIRECTORY]

Heads of published shapes, one rank's part. Targets end in a token a row, greedy and at a
temperature of 0.7, drafts in logits. A row's
largest logit lies 5.6 standard deviations above their mean, as SmolLM2's does; with
``--nothing-stands-out`` it is the largest of random ones, which leaves more tokens open. The floor
is the reading of what a product reads once: bf16 or int8.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    READ_BANDWIDTH,
    SHAPES,
    STANDS_OUT,
    graph_time,
    need_gpus,
    write_result,
)
from codesign.kernels import keyed_sampling
from codesign.kernels.head_codes import HeadCodes, coarse_logits, sample_rows
from codesign.kernels.packed_linear import logits_map
from codesign.models.shape import model_shape
from codesign.models.sharding import Sharding
from codesign.policy.walk import Sampling

# Shape: tensor parallel degrees, as a target or as a draft.
TARGETS = {"llama-3.1-8b": (1, 2, 3, 4), "llama-3-70b": (1, 2, 3, 4), "qwen2-72b": (1, 2, 3, 4)}
DRAFTS = {"llama-3.2-1b": (1, 2, 3, 4), "llama-3.2-3b": (1, 2, 4), "qwen2-1.5b": (1, 2, 4)}
WAYS = {"": Sampling(), ", sampled": Sampling(0.7)}


class Head:
    """A rank's head and hidden rows.

    Args:
        model: Name of its shape.
        size: Tensor parallel degree.
        stands_out: By how many standard deviations of its logits a row's largest is larger.
    """

    def __init__(self, model: str, size: int, stands_out: float) -> None:
        cut = Sharding(model_shape(SHAPES / model), size=size)
        tokens, hidden = cut.head_rows.length, cut.whole.hidden
        self.head_VD = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda").normal_()
        self.codes = HeadCodes.of(self.head_VD)
        self._stands_out = stands_out * hidden**-0.5

    def calls(self, rows: int, *, is_draft: bool) -> dict[str, Callable[[], object]]:
        """From ``rows`` hidden rows, by the kind of head."""
        x_TD = torch.randn(rows, self.head_VD.shape[1], device="cuda")
        x_TD = (x_TD + self._stands_out * self.head_VD[:rows]).bfloat16()
        whole, codes = logits_map(self.head_VD), self.codes
        if is_draft:
            return {"bf16": lambda: whole(x_TD), "int8": lambda: coarse_logits(codes, x_TD)}
        low, high, positions = torch.arange(3 * rows, dtype=torch.int32, device="cuda").chunk(3)
        noise = low, high, positions
        calls: dict[str, Callable[[], object]] = {}
        for name, way in WAYS.items():
            calls["bf16" + name] = lambda w=way: keyed_sampling.sample_rows(whole(x_TD), *noise, w)
            calls["int8" + name] = lambda w=way: sample_rows(codes, x_TD, *noise, w)
        return calls


def measure(model: str, size: int, rows: list[int], stands_out: float) -> list[dict[str, Any]]:
    """Rows of the result for one head."""
    head = Head(model, size, stands_out)
    found = []
    for count in rows:
        for kind, call in head.calls(count, is_draft=model in DRAFTS).items():
            timing = graph_time(lambda _, call=call: call(), calls=8, replays=12)
            size_bytes = head.head_VD.nbytes // (1 if kind.startswith("bf16") else 2)
            row = {"model": model, "gpus": size, "rows": count, "head": kind}
            row["floor_us"] = round(size_bytes / READ_BANDWIDTH * 1e6, 3)
            found.append(row | timing.microseconds)
    for count in rows:
        times = "".join(f" {row['us']:7.1f}" for row in found if row["rows"] == count)
        print(f"{model:13} on {size}, rows {count:2}:{times} us", flush=True)
    return found


def main() -> None:
    """Time every head and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--nothing-stands-out", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    stands_out = 0.0 if args.nothing_stands_out else STANDS_OUT
    results: list[dict[str, Any]] = []
    for model, sizes in (TARGETS | DRAFTS).items():
        for size in sizes:
            results += measure(model, size, args.rows, stands_out)
            torch.cuda.empty_cache()
    note = f"medians in CUDA graphs; a row's largest logit stands out by {stands_out} deviations"
    print(write_result("heads", results, directory=args.out, note=note))


if __name__ == "__main__":
    main()
