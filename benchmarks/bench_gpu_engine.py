"""The engine on rank groups: losslessness, round spans, graph replays, and big random shapes.

    python -m benchmarks.bench_gpu_engine TARGET [--draft DRAFT] [--out DIRECTORY]

One GPU: plain and serial speculation. Two or more: also one rank each for target and draft, and
the target on two ranks. Every run is compared token for token with plain decoding at the same
padded number of rows, greedy and at temperature 0.7.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.bench_forward import one_request
from benchmarks.common import READ_BANDWIDTH, SHAPES, need_gpus, write_result
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine import EngineRun
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.heads import DraftHead, StepHead, TargetHead
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.ranks import DRAFT_MODEL, TARGET_MODEL, Rank
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import bucket_of, crowd_of, pack_step
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.engine.rank_weights import RankWeights, StateReader
from codesign.models.shape import ModelShape, model_shape
from codesign.models.tokenizer import Tokenizer
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest, encode_user_turn, load_prompts
from codesign.records import SPANS

SAMPLINGS = {"greedy": Sampling(), "temperature 0.7": Sampling(temperature=0.7, seed=3)}
CONTEXTS = (500, 1000)
NUM_REQUESTS, NEW_TOKENS = 64, 256


@dataclass
class Bench:
    """What all runs share, and the rows that they leave."""

    target: Path
    draft: Path
    requests: list[BoundRequest]
    rows: list[dict[str, Any]] = field(default_factory=list)
    reference: dict[tuple[str, int], EngineRun] = field(default_factory=dict)

    def run(
        self, policy: str, sampling: str, *, target_ranks: int = 1, draft_ranks: int = 0,
        max_batch: int = 1, smallest_bucket: int = 8, count: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Serve the requests and compare with plain decoding of the same bucket."""
        requests = self.requests[:count]
        candidate = Candidate(
            Deployment(target_ranks, draft_ranks), parse_policy(policy), max_batch
        )
        tokens = 2048 * max_batch
        setup = rank_setup(
            candidate, requests, target=self.target, draft=self.draft, sampling=SAMPLINGS[sampling],
            max_kv_tokens=tokens, smallest_bucket=smallest_bucket, **options,
        )  # fmt: skip
        seen: dict[str, Any] = {}

        def inspect(rank: Rank) -> None:
            seen["faults"] = sum(model.num_faults() for model in rank.models.values())
            if "check" not in options:
                seen["steps_ms"] = step_times(rank)

        start = perf_counter()
        run = run_on_ranks(setup, candidate, requests, max_kv_tokens=tokens, inspect=inspect)
        row = {
            "run": f"{policy} on {candidate.deployment.label}, batch {max_batch}",
            "sampling": sampling,
            "bucket": smallest_bucket,
            "options": {k: str(v) for k, v in options.items()},
            "start_and_run_seconds": round(perf_counter() - start, 2),
            **summary(run),
            **seen,
        }
        key = (sampling, smallest_bucket)
        reference = self.reference.setdefault(key, run)
        row["requests_that_differ_from_plain"] = sum(
            tokens != reference.outputs[request] for request, tokens in run.outputs.items()
        )
        self.rows.append(row)
        print(row, flush=True)


def summary(run: EngineRun) -> dict[str, Any]:
    """Speed, acceptance and spans of a run; spans in milliseconds per round without prefill."""
    rounds = run.records.rounds
    emitted, batch = rounds.column("num_emitted_tokens"), rounds.column("batch")
    quiet = rounds.column("prefill") == 0
    spans = {name: 1e3 * rounds.column(name)[quiet] for name in SPANS}
    return {
        "requests": len(run.outputs),
        "tokens": sum(len(tokens) for tokens in run.outputs.values()),
        "tokens_per_second": round(
            sum(len(t) for t in run.outputs.values()) / run.records.seconds, 1
        ),
        "decode_tokens_per_second": round(
            float(emitted[quiet].sum() / (sum(v.sum() for v in spans.values()) / 1e3)), 1
        ),
        "acceptance_length": round(float(emitted.sum() / batch.sum()), 3),
        "rounds": len(rounds),
        "span_ms_median": {name: round(float(np.median(v)), 4) for name, v in spans.items()},
        "span_ms_mean": {name: round(float(v.mean()), 4) for name, v in spans.items()},
        "notes": run.records.notes,
    }


def step_times(rank: Rank) -> dict[str, Any]:
    """Milliseconds of graph replays, and of steps seen by the host, by model, rows and context."""
    if rank.setup.target_ranks > 1:
        return {}  # followers have ended: collectives would wait
    times = {}
    for model, name in ((TARGET_MODEL, "target"), (DRAFT_MODEL, "draft")):
        if model in rank.models:
            times[name] = model_times(rank.models[model], (1, 8, 32))
    return times


def model_times(model: ModelRank, row_counts: Sequence[int]) -> dict[str, Any]:
    """Median and 90th percentile over 200 replays of one model's steps."""
    times = {}
    for rows in row_counts:
        for context in CONTEXTS:
            if context + rows > model.slabs.max_tokens:
                continue
            request = one_request(rows, context)
            bucket = bucket_of(rows)
            message = pack_step([request], bucket=bucket, scratch_slot=model.slabs.scratch_slot)
            model.answer(message)
            in_pairs = model.forward.pairs_do_more(crowd_of(message))
            replay = model._steps[bucket, in_pairs].run
            gpu, host = [], []
            for _ in range(200):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                replay()
                end.record()
                end.synchronize()
                gpu.append(start.elapsed_time(end))
                at = perf_counter()
                model.answer(message)
                host.append(1e3 * (perf_counter() - at))
            at = perf_counter()
            for _ in range(50):
                pack_step([request], bucket=bucket, scratch_slot=1)
            times[f"{rows} rows, context {context}"] = {
                "graph": _quantiles(gpu),
                "host": _quantiles(host),
                "pack": round((perf_counter() - at) / 50 * 1e3, 4),
            }
    return times


def _quantiles(values: Sequence[float]) -> list[float]:
    return [round(float(q), 4) for q in np.quantile(values, (0.5, 0.9))]


class RandomState(dict[str, torch.Tensor]):
    """Random bf16 tensors of a shape, made on the GPU when they are asked for."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._sizes = shape.tensors()

    def __missing__(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self._sizes[name], dtype=torch.bfloat16, device="cuda")
        return tensor.normal_(std=tensor.shape[-1] ** -0.5) if tensor.ndim == 2 else tensor.fill_(1)


def big_shape(name: str, *, is_draft: bool, fused: bool = True) -> dict[str, Any]:
    """Step times of a random bf16 model of a published shape on one GPU."""
    shape = model_shape(SHAPES / name)
    weights = RankWeights(StateReader(shape, RandomState(shape)), device="cuda")
    forward = RankForward(weights, SingleRank(), fused=fused)
    slabs = Slabs(
        forward.shape, num_slots=1, max_tokens=2048, dtype=forward.dtype, device=forward.device
    )
    head: StepHead = DraftHead(8) if is_draft else TargetHead(Sampling())
    model = ModelRank(forward, slabs, head, max_moves=136 if is_draft else 0)
    model.prepare((8,))
    read = 2 * (shape.parameters - (0 if shape.tie else shape.vocab * shape.hidden))
    row = {
        "run": f"{name}, bf16, random weights, {'draft' if is_draft else 'target'} on 1 GPU",
        "floor_ms": round(read / READ_BANDWIDTH * 1e3, 4),
        "steps_ms": model_times(model, (8,)),
        "temperature_steps_ms": {},
    }
    if not is_draft:
        warm = ModelRank(forward, slabs, TargetHead(Sampling(temperature=0.7)))
        row["temperature_steps_ms"] = model_times(warm, (8,))
    print(row, flush=True)
    return row


def requests_of(target: Path) -> list[BoundRequest]:
    """Real prompts, all there at once; the shipped ones in turn."""
    encode = encode_user_turn(Tokenizer(target))
    prompts = load_prompts()
    return [
        BoundRequest(i, 0.0, prompt.category, tuple(encode(prompt.text)), NEW_TOKENS)
        for i, prompt in ((i, prompts[i % len(prompts)]) for i in range(NUM_REQUESTS))
    ]


def main() -> None:
    """Run what this machine's GPUs allow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="one GPU's runs (1), several GPUs' (2), shapes")
    args = parser.parse_args()
    need_gpus(2 if args.only == "2" else 1)
    bench = Bench(args.target, args.draft, requests_of(args.target))
    try:
        if args.only in ("", "1"):
            _one_gpu(bench)
        if args.only in ("", "2") and torch.cuda.device_count() > 1:
            _two_gpus(bench)
        if args.only in ("", "shapes"):
            for name, is_draft in (("llama-3.2-1b", True), ("llama-3.1-8b", False)):
                bench.rows.append(big_shape(name, is_draft=is_draft))
    finally:
        path = write_result(
            f"gpu_engine{args.only}", bench.rows, directory=args.out,
            note="bf16; seconds of real prompts; spans per round without prefill",
        )  # fmt: skip
        print(path)


def _one_gpu(bench: Bench) -> None:
    for sampling in SAMPLINGS:
        for policy in ("plain", "tree-8x4x2", "chain-3"):
            bench.run(policy, sampling, max_batch=4, smallest_bucket=32)
    for policy in ("plain", "tree-8x4x2", "tree-8x4x4"):
        bench.run(policy, "greedy", count=12)
    bench.run("tree-8x4x2", "greedy", count=4, check=True)


def _two_gpus(bench: Bench) -> None:
    if ("greedy", 32) not in bench.reference:
        for sampling in SAMPLINGS:
            bench.run("plain", sampling, max_batch=4, smallest_bucket=32)
        bench.run("plain", "greedy", count=12)
    for sampling in SAMPLINGS:
        bench.run("async-tree-8x4x2", sampling, draft_ranks=1, max_batch=4, smallest_bucket=32)
    for policy in ("async-tree-8x4x2", "async-tree-8x4x4"):
        bench.run(policy, "greedy", draft_ranks=1, count=12)
    bench.run("tree-8x4x2", "greedy", target_ranks=2, count=12)


if __name__ == "__main__":
    main()
