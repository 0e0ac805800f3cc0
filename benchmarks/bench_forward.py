"""Whole forwards of int4 models, in one CUDA graph each, against the memory's floor.

    python -m benchmarks.bench_forward [--models NAME ...] [--rows 8] [--real-rows 4] [--sums]

Random weights of published shapes. A rank of a tensor-parallel group is timed on one GPU as a model
of its own size, without the sums over ranks; with ``--sums`` on as many GPUs as the group has, with
them, and the slowest rank of each replay counts. Targets end in tokens, drafts in their likeliest
tokens, both from the head's int8 copy. Random logits leave many tokens open, which a target
multiplies again, those of models few; so targets are timed with random ones and with ones of which
the largest lies 5.6 standard deviations above the mean (as it does for SmolLM2). The floor is the
reading of all weights once, the head's in bf16 (4.2 TB/s on an H200). With ``--real-rows`` the
other rows are padding, as where a step is smaller than its bucket.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import READ_BANDWIDTH, SHAPES, STANDS_OUT, need_gpus, write_result
from benchmarks.over_ranks import MAX_ELEMENTS, Ranks, over_ranks
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.request_rows import RequestRows
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import DeviceRows, pack_step
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.engine.rank_weights import EndWeights, LayerWeights
from codesign.kernels.int4 import Int4Weight, round_scales
from codesign.kernels.packed_linear import PackedMap, PackedSwiglu, logits_map
from codesign.kernels.packing import PackedLinear
from codesign.kernels.row_choices import choice_words
from codesign.models.shape import ModelShape, model_shape
from codesign.models.sharding import Sharding
from codesign.policy.walk import Sampling

# name: shape, tensor parallel degree, milliseconds to reach
MODELS = {
    "1b": ("llama-3.2-1b", 1, 0.41),
    "3b": ("llama-3.2-3b", 1, 0.84),
    "8b": ("llama-3.1-8b", 1, 1.45),
    "70b/4": ("llama-3-70b", 4, 3.4),
    "70b/2": ("llama-3-70b", 2, 5.6),
    "70b": ("llama-3-70b", 1, 9.7),
}
CHOICES = 8


class RandomWeights:
    """A rank's weights, made on the GPU when they are asked for; see ``RankWeights``."""

    def __init__(self, name: str, size: int) -> None:
        self._sharding = Sharding(model_shape(SHAPES / name), size=size, group=128)
        self.shape: ModelShape = self._sharding.shape

    def layer(self, index: int) -> LayerWeights:
        """A layer of the shape."""
        shape = self.shape
        query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        ones = torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda")
        return LayerWeights(
            input_norm=ones,
            qkv=random_int4(query + 2 * keys, shape.hidden),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=random_int4(shape.hidden, query),
            mlp_norm=ones.clone(),
            gate_up=random_int4(2 * shape.intermediate, shape.hidden),
            down=random_int4(shape.hidden, shape.intermediate),
        )

    def ends(self) -> EndWeights:
        """Embedding and head; of a tied model the same."""
        shape, rows = self.shape, self._sharding.head_rows.length
        embedding = torch.empty(shape.vocab, shape.hidden, dtype=torch.bfloat16, device="cuda")
        embedding.normal_(generator=torch.Generator("cuda").manual_seed(0))  # on every rank
        return EndWeights(
            embedding=embedding,
            norm=torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda"),
            head=embedding[:rows] if shape.tie else embedding[:rows].clone(),
            head_start=0,
            num_real=rows,
            num_tokens=shape.vocab,
            token_map=None,
        )


def random_int4(rows: int, columns: int) -> Int4Weight:
    """Random codes; scales that keep a row's values near one."""
    packed = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, columns // 8), device="cuda")
    scales = torch.full((rows, columns // 128), 0.2 * columns**-0.5, device="cuda")
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device="cuda")
    return Int4Weight(packed.to(torch.int32), round_scales(scales), zeros)


def one_request(rows: int, context: int) -> RequestRows:
    """A flat tree of ``rows`` rows: a root and its children."""
    return RequestRows(
        slot=0,
        tokens=(1,) * rows,
        positions=(context, *(context + 1,) * (rows - 1)),
        context=context,
        prefixes=(context,) * rows,
        paths=((0,), *((0, i) for i in range(1, rows))),
        parents=(-1, *(0,) * (rows - 1)),
    )


class Step:
    """A model and one step's rows: a root and its children behind a context, then padding.

    Args:
        name: Of the shape.
        size: GPUs that share the model.
        rows: Of the step.
        real_rows: That are no padding.
        context: Tokens behind them.
        ranks: Of which this is one; None times a rank alone, without sums.
    """

    def __init__(
        self,
        name: str,
        size: int,
        rows: int,
        real_rows: int,
        context: int,
        ranks: Ranks | None = None,
    ) -> None:
        weights: Any = RandomWeights(name, size)
        self.ranks = ranks
        group = SingleRank() if ranks is None else ranks.tensor_group
        assert group.size in (1, size), f"{group.size} ranks for {size}"
        self.forward = RankForward(weights, group)
        shape, device = self.forward.shape, self.forward.device
        dtype = self.forward.dtype
        self.slabs = Slabs(shape, num_slots=1, max_tokens=2048, dtype=dtype, device=device)
        self.rows = self.rows_of(rows, real_rows, context)
        self.ends = weights.ends()
        self.int4_head = logits_map(replace(self.ends, head_group=128).decoding_head())
        self.keys = self.rows.key_low_T, self.rows.key_high_T, self.rows.positions_T
        self.likely = self.ends.head[100 : 100 + rows]
        self.likely_size = torch.full_like(self.likely, STANDS_OUT * shape.hidden**-0.5)

    def rows_of(self, rows: int, real_rows: int, context: int) -> DeviceRows:
        """A step's rows on the device."""
        assert self.ranks is None or rows * self.forward.shape.hidden <= MAX_ELEMENTS, "too many"
        packed = pack_step([one_request(real_rows, context)], bucket=rows, scratch_slot=1)
        return DeviceRows.of(torch.from_numpy(packed).to(self.forward.device), rows)

    @property
    def maps(self) -> list[PackedLinear]:
        """What the layers' maps read."""
        maps = [
            linear
            for layer in self.forward._layers
            for linear in (layer.qkv, layer.out, layer.swiglu, layer.down)
        ]
        packed = [m.weight for m in maps if isinstance(m, PackedMap | PackedSwiglu)]
        assert len(packed) == len(maps), "a map is not packed"
        return packed

    @property
    def cuts(self) -> set[tuple[int, int]]:
        """Tiles and groups of each map."""
        return {(weight.num_tiles, weight.num_groups) for weight in self.maps}

    @property
    def floor(self) -> float:
        """Seconds of reading all weights."""
        size = sum(weight.num_bytes for weight in self.maps)
        return (size + self.ends.head.nbytes) / READ_BANDWIDTH

    def hidden(self) -> Tensor:
        """All layers."""
        return self.forward.hidden(self.rows, self.slabs, None)

    def logits(self) -> Tensor:
        """Those of the bf16 head."""
        return self.forward.head.logits(self.hidden())

    def tokens(self, *, stand_out: bool = True) -> Tensor:
        """What a target's step ends in; with logits of which the largest stand out."""
        hidden = self.hidden()
        if stand_out:
            hidden = hidden.addcmul(self.likely, self.likely_size)
        return self.forward.head.sample_rows(hidden, self.keys, Sampling())[1]

    def words(self) -> Tensor:
        """What a draft's step ends in."""
        return choice_words(self.forward.head.coarse_logits(self.hidden()), CHOICES)

    def int4_words(self) -> Tensor:
        """The same with a head in int4."""
        return choice_words(self.int4_head(self.hidden()), CHOICES)

    def measure(self, run: Callable[[], Tensor], replays: int = 40) -> list[float]:
        """Sorted milliseconds of replays of a graph, of each the slowest rank's."""
        stream, ranks = torch.cuda.Stream(), self.ranks
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream), self.forward.group.patient():
            run()
            run()
        torch.cuda.synchronize()
        graph, mode = torch.cuda.CUDAGraph(), "thread_local"  # NCCL has a thread of its own
        with (
            torch.inference_mode(),
            torch.cuda.graph(graph, stream=stream, capture_error_mode=mode),
        ):
            out = run()
        times = []
        for _ in range(replays + 5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if ranks is not None:
                ranks.line_up()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        self.forward.group.check()
        assert out.dtype == torch.int32 or bool(out.isfinite().all()), "not finite"
        if ranks is not None:
            ranks.agree_on_bits(out)  # also of a head: all ranks have the same one
            times = ranks.slowest(times)
        return sorted(times[5:])


def measure(
    ranks: Ranks | None, model: str, rows: int, real_rows: int, context: int
) -> list[dict[str, Any]]:
    """Rows of the result for one model."""
    name, size, goal = MODELS[model]
    step = Step(name, size, rows, real_rows, context, ranks)
    found = []

    def note(what: str, run: Callable[[], Tensor]) -> None:
        times = step.measure(run)
        middle = times[len(times) // 2]
        row = {
            "model": model,
            "rows": rows,
            "real_rows": real_rows,
            "context": context,
            "what": what,
            "sums": ranks is not None,
            "ms": round(middle, 4),
            "ms_p10": round(times[len(times) // 10], 4),
            "ms_p90": round(times[-1 - len(times) // 10], 4),
            "floor_ms": round(step.floor * 1e3, 4),
            "goal_ms": goal,
            "ratio": round(middle / step.floor / 1e3, 3),
        }
        found.append(row)
        if ranks is None or ranks.rank == 0:
            ratio = f"{row['ratio']:.2f} of the floor"
            print(f"{model:6} {what:40} {middle:8.4f} ms, {ratio}", flush=True)

    note("layers", step.hidden)
    note("layers and bf16 logits", step.logits)
    note("layers and tokens", step.tokens)
    note("layers and tokens, none stands out", partial(step.tokens, stand_out=False))
    note("layers and choices", step.words)
    note("layers, int4 head and choices", step.int4_words)
    return found


def main() -> None:
    """Time every model and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--real-rows", type=int, help="that are no padding; all without it")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--sums", action="store_true", help="add up over ranks, a GPU each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus(max(MODELS[model][1] for model in args.models) if args.sums else 1)
    torch.manual_seed(0)
    results = []
    for model in args.models:
        size = MODELS[model][1] if args.sums else 1
        what = model, args.rows, args.real_rows or args.rows, args.context
        results += over_ranks(measure, size, *what) if size > 1 else measure(None, *what)
        torch.cuda.empty_cache()
    note = "medians of 40 graph replays; random int4 weights; floor: bytes, of the head in bf16, / "
    note += f"{READ_BANDWIDTH / 1e12:.1f} TB/s"
    print(write_result("forward", results, directory=args.out, note=note))


if __name__ == "__main__":
    main()
