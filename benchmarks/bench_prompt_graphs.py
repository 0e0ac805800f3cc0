"""Prompts through a whole model on one GPU: as graphs, and launched kernel by kernel.

    python -m benchmarks.bench_prompt_graphs [--models NAME ...] [--rows N ...] [--out DIRECTORY]

The time from the message to the token is the host's clock; beside it stands the graph alone, by
events of the GPU. The first prompt of a length is timed by itself, for a library may plan it anew.
The floor is the packed weights read once (4.2 TB/s on an H200), or a dense product at 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.bench_forward import MODELS, RandomWeights
from benchmarks.bench_prompts import DENSE_RATE
from benchmarks.common import READ_BANDWIDTH, need_gpus, write_result
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.heads import TargetHead
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.prompt_rows import LONG_BUCKETS, PROMPT_BUCKETS, prompt_message
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import Words
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.kernels.packing import GROUP, TILE
from codesign.kernels.tiling import RECORD_BYTES
from codesign.models.shape import ModelShape
from codesign.policy.walk import Sampling

TOKENS = 2304
ROWS = [16, 64, 77, 147, 256, 300, 512, 700, 1024, 1500, 2048]
REPEATS = 7  # timings whose median counts
INT4_BITS = 8 * RECORD_BYTES / (TILE * GROUP)  # with scale and zero point


def made_up(count: int, seed: int, vocab: int) -> Words:
    """A prompt's message for the first slab."""
    random = torch.Generator().manual_seed(seed)
    return prompt_message(torch.randint(0, vocab, (count,), generator=random).tolist(), 0, 0)


def milliseconds(rank: ModelRank, message: Words) -> float:
    """From the message to the token; a first call is left out."""
    spans = []
    for _ in range(REPEATS + 1):
        since = perf_counter()
        rank.answer(message)
        spans.append(perf_counter() - since)
    return 1e3 * statistics.median(spans[1:])


def replayed(rank: ModelRank, bucket: int) -> float:
    """Milliseconds of a bucket's graph alone, over what the last message left on the device."""
    spans = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        rank._prompts._steps[bucket].run()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end))
    return statistics.median(spans)


def floor(shape: ModelShape, rows: int) -> float:
    """Milliseconds below which no forward over int4 weights can be."""
    weights = shape.layers * shape.layer_weights
    return 1e3 * max(weights * INT4_BITS / 8 / READ_BANDWIDTH, 2 * rows * weights / DENSE_RATE)


def rank_of(forward: RankForward, **slab_options: Any) -> ModelRank:
    """A greedy target of two slabs."""
    slabs = Slabs(
        forward.shape,
        num_slots=2,
        max_tokens=TOKENS,
        dtype=forward.dtype,
        device=forward.device,
        **slab_options,
    )
    return ModelRank(forward, slabs, TargetHead(Sampling()))


def times(name: str, counts: list[int]) -> Iterator[dict[str, Any]]:
    """Rows of the result for a model."""
    shape_name, size, _ = MODELS[name]
    weights: Any = RandomWeights(shape_name, size)
    forward = RankForward(weights, SingleRank())
    launched, graphs = rank_of(forward), rank_of(forward)
    since = perf_counter()
    buckets = (*PROMPT_BUCKETS, *LONG_BUCKETS)  # also those that a run would not take
    graphs.prepare((8,), buckets)
    capture = perf_counter() - since
    for count in counts:
        bucket = next(bucket for bucket in buckets if bucket >= count)
        message = made_up(count, count, forward.shape.vocab)
        firsts = []
        for rank in (graphs, launched):
            torch.cuda.synchronize()
            since = perf_counter()
            rank.answer(message)
            firsts.append(round(1e3 * (perf_counter() - since), 3))
        row = {
            "model": name,
            "rows": count,
            "bucket": bucket,
            "graph_ms": round(milliseconds(graphs, message), 3),
            "graph_alone_ms": round(replayed(graphs, bucket), 3),
            "launched_ms": round(milliseconds(launched, message), 3),
            "first_graph_ms": firsts[0],
            "first_launched_ms": firsts[1],
            "floor_ms": round(floor(forward.shape, count), 3),
            "capture_s": round(capture, 2),
        }
        print(row, flush=True)
        yield row


def main() -> None:
    """Time the models and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["1b", "8b", "70b"], choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus()
    rows = []
    for name in options.models:
        with torch.inference_mode():
            rows += times(name, options.rows)
        gc.collect()
        torch.cuda.empty_cache()
    note = (
        "medians of 7 after a first call; int4 group 128, greedy; sharded models: one rank, no sums"
    )
    print(write_result("prompt_graphs", rows, directory=options.out, note=note))


if __name__ == "__main__":
    main()
