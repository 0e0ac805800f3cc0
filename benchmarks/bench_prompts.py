"""Prompts over int4 weights on one GPU, by every way and number of rows, against a dense product.

    python -m benchmarks.bench_prompts [--models NAME ...] [--rows N ...] [--cuts] [--out DIRECTORY]

A few layers of random weights are run as the engine runs a prompt, launch by launch, and counted as
all layers of the model; a rank of a tensor-parallel group without the sums over ranks. The floor is
a dense bfloat16 product at 790 TFLOP/s, or the reading of the packed weights. Behind each time
stands what the estimate in ``expected`` says, and at the end where the ways meet: the thresholds of
``codesign/kernels/prompt_linear.py``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.bench_forward import MODELS, RandomWeights
from benchmarks.common import READ_BANDWIDTH, need_gpus, write_result
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.tensor_group import SingleRank, TensorGroup
from codesign.kernels import prompt_linear
from codesign.kernels.packing import GROUP, TILE
from codesign.kernels.tiling import RECORD_BYTES
from codesign.models.shape import ModelShape

ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
DENSE_RATE = 790e12  # operations per second, measured on an H200
NEVER = 1 << 30
WEIGHT_BYTES = RECORD_BYTES / (TILE * GROUP)
REPEATS = 5  # timings whose median counts
# FEW_ROWS, DECODED_ROWS and DENSE_ROWS that send every prompt the same way
WAYS = {
    "decoding kernels": (NEVER, NEVER, NEVER),
    "fused": (0, 0, NEVER),
    "unpacked": (0, 0, 0),
}
# The decoding kernels read at this pace, once for 64 rows, with what each time costs besides.
DECODED_BANDWIDTH, DECODED_START = 2.7e12, 3e-6
TENSOR_RATE, CUBLAS_RATE = 990e12, 700e12
ISSUED = 132 * 128 * 1.7e9  # instructions of threads a second
WEIGHT_INSTRUCTIONS = 4.4  # of a program for each of its weights, counted in the machine code
OVERLAP = 1.3  # of tensor cores and other instructions, one after the other; 0.65 would be perfect


class Prompt:
    """Some layers of a model, and prompts that run through them."""

    def __init__(
        self, model: str, num_layers: int, most: int, group: TensorGroup | None = None
    ) -> None:
        name, size, _ = MODELS[model]
        weights: Any = RandomWeights(name, size)
        self.num_all = weights.shape.layers
        weights.shape = replace(weights.shape, layers=num_layers)
        self.shape: ModelShape = weights.shape
        self.forward = RankForward(weights, group or SingleRank())
        self.slabs = Slabs(
            self.shape,
            num_slots=1,
            max_tokens=most,
            dtype=self.forward.dtype,
            device=self.forward.device,
        )

    @torch.inference_mode()
    def seconds(self, rows: int) -> tuple[float, float]:
        """A layer's time on the GPU, and the host's time to launch it."""
        tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        hidden, spans, hosts = tokens, [], []
        for _ in range(REPEATS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            since = perf_counter()
            start.record()
            hidden = self.forward.prompt_hidden(tokens, 0, self.slabs)
            end.record()
            hosts.append(perf_counter() - since)
            torch.cuda.synchronize()
            spans.append(start.elapsed_time(end) * 1e-3)
        assert bool(hidden.isfinite().all()), "not finite"
        layers = self.shape.layers
        return statistics.median(spans[2:]) / layers, statistics.median(hosts[2:]) / layers


def matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """Features and columns of a layer's maps."""
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        (query + 2 * keys, shape.hidden),
        (shape.hidden, query),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ]


def expected(shape: ModelShape, rows: int, way: str) -> float:
    """Seconds of a layer's maps by a way, estimated; without attention."""
    total = 0.0
    for features, columns in matrices(shape):
        weights = features * columns
        packed = weights * WEIGHT_BYTES / READ_BANDWIDTH
        if way == "decoding kernels":
            launches = -(-rows // 64)
            total += launches * (weights * WEIGHT_BYTES / DECODED_BANDWIDTH + DECODED_START)
        elif way == "unpacked":
            dense = 2 * weights / READ_BANDWIDTH
            total += packed + dense + max(dense, 2 * rows * weights / CUBLAS_RATE) + 1e-5
        else:
            block = 128
            blocks = -(-rows // block)
            tensor = 2 * blocks * block * weights / TENSOR_RATE
            codes = blocks * weights * WEIGHT_INSTRUCTIONS / ISSUED
            splits = prompt_linear.splits(-(-features // 16), columns // 128)
            parts = 8 * splits * rows * features / READ_BANDWIDTH if splits > 1 else 0.0
            total += max(packed, OVERLAP * (tensor + codes)) + parts + 5e-6
    return total


def floor(shape: ModelShape, rows: int) -> float:
    """Seconds of a layer's maps at the dense rate or the memory's pace, whichever is longer."""
    weights = sum(features * columns for features, columns in matrices(shape))
    return max(2 * rows * weights / DENSE_RATE, weights * WEIGHT_BYTES / READ_BANDWIDTH)


@contextmanager
def only(way: str) -> Iterator[None]:
    """Send every prompt one way; ``chosen`` leaves the choice."""
    names = ("FEW_ROWS", "DECODED_ROWS", "DENSE_ROWS")
    kept = [getattr(prompt_linear, name) for name in names]
    for name, value in zip(names, WAYS.get(way, kept), strict=True):
        setattr(prompt_linear, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, kept, strict=True):
            setattr(prompt_linear, name, value)


def measure(model: str, rows: list[int], num_layers: int, *, cuts: bool) -> list[dict[str, Any]]:
    """Rows of the result for one model."""
    prompt = Prompt(model, num_layers, max(rows))
    found = []
    for count in rows:
        for way in ("chosen", *WAYS):
            if way == "decoding kernels" and count > 256:
                continue
            with only(way):
                found.append(row(model, prompt, count, way))
        if cuts and 16 < count <= 512:
            found += swept(model, prompt, count)
    meet(model, found)
    return found


def row(model: str, prompt: Prompt, rows: int, way: str) -> dict[str, Any]:
    """Time one way and show it."""
    seconds, host = prompt.seconds(rows)
    estimate = expected(prompt.shape, rows, way) if way in WAYS else None
    line = {
        "model": model,
        "rows": rows,
        "way": way,
        "layer_us": round(seconds * 1e6, 2),
        "host_us": round(host * 1e6, 2),
        "expected_us": None if estimate is None else round(estimate * 1e6, 2),
        "ms": round(seconds * prompt.num_all * 1e3, 3),
        "ms_a_token": round(seconds * prompt.num_all * 1e3 / rows, 4),
        "floor_ms": round(floor(prompt.shape, rows) * prompt.num_all * 1e3, 3),
    }
    line["ratio"] = round(line["ms"] / line["floor_ms"], 2)
    print(
        f"{model:6} {rows:5} rows {way:16} {line['layer_us']:9.1f} us a layer "
        f"(host {line['host_us']:.0f}, expected {line['expected_us']}), {line['ms']:9.2f} ms, "
        f"{line['ms_a_token']:.3f} a token, {line['ratio']:.2f} of the floor",
        flush=True,
    )
    return line


def swept(model: str, prompt: Prompt, rows: int) -> list[dict[str, Any]]:
    """Time the fused way with other cuts of its work."""
    from codesign.kernels import prompt_linear_triton

    chosen, found = prompt_linear_triton.CUT, []
    blocks = [32, 64] if rows <= 32 else [64, 128] if rows <= 128 else [128]
    for block in blocks:
        for channels in (64, 128):
            for stages in (2, 3, 4):
                cut = prompt_linear_triton.Cut(block, channels, stages)
                prompt_linear_triton.CUT = cut
                try:
                    with only("fused"):
                        found.append(row(model, prompt, rows, f"fused {block}x{channels}x{stages}"))
                except Exception as error:  # a cut that does not fit the multiprocessor
                    print(f"{cut}: {str(error).splitlines()[0]}", flush=True)
                finally:
                    prompt_linear_triton.CUT = chosen
    return found


def meet(model: str, found: list[dict[str, Any]]) -> None:
    """Say from which rows on a way is the fastest."""
    last = None
    for rows in sorted({line["rows"] for line in found}):
        ways = [line for line in found if line["rows"] == rows and line["way"] in WAYS]
        best = min(ways, key=lambda line: line["layer_us"])["way"]
        if best != last:
            print(f"{model}: from {rows} rows on: {best}", flush=True)
        last = best


def main() -> None:
    """Time every model and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["1b", "70b/4", "70b"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--layers", type=int, default=4, help="that are timed, of all")
    parser.add_argument("--cuts", action="store_true", help="time other cuts of the work, too")
    parser.add_argument("--expected", action="store_true", help="print the estimate only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.expected:
        estimates(args.models, args.rows)
        return
    need_gpus()
    torch.manual_seed(0)
    results = []
    for model in args.models:
        results += measure(model, args.rows, args.layers, cuts=args.cuts)
        torch.cuda.empty_cache()
    note = "medians of 5 eager prompts of some layers; floor: 790 TFLOP/s or "
    note += f"{READ_BANDWIDTH / 1e12:.1f} TB/s of int4"
    print(write_result("prompts", results, directory=args.out, note=note))


def estimates(models: list[str], rows: list[int]) -> None:
    """Print what the ways are expected to take, in milliseconds of all layers; needs no GPU."""
    for model in models:
        name, size, _ = MODELS[model]
        shape = RandomWeights(name, size).shape
        for count in rows:
            times = [expected(shape, count, way) for way in WAYS]
            ways = zip((*WAYS, "floor"), (*times, floor(shape, count)), strict=True)
            shown = ", ".join(f"{way} {seconds * shape.layers * 1e3:.2f}" for way, seconds in ways)
            print(f"{model:6} {count:5} rows: {shown}")


if __name__ == "__main__":
    main()
