"""Serving on one GPU: pages, prefix reuse, chunks and preemption; whether tokens differ; a trace.

    python -m benchmarks.bench_serving --trace mooncake_conversation_trace.jsonl [--out DIRECTORY]

The target is an inflated random int4 model, its draft a small noisy one: nothing is downloaded, and
acceptance means nothing here. Three parts: the same requests served in every way, with their tokens
compared; four requests that decode while a long prompt comes; a stretch of a trace with its prefix
blocks, whole prompts against chunks and a prefix cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import need_gpus, write_result
from benchmarks.random_pair import inflate_source, small_config, write_source_pair
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine import EngineRun
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest, bind_prompts, load_prompts
from codesign.traces import load_trace

VOCABULARY = 4096
CONFIG = small_config(layers=16, vocabulary=VOCABULARY, max_positions=131072, rope_theta=500000.0)
WIDE = 1 << 17  # KV rows: no limit here
ROWS = 64  # of a target forward: a batch of 8 trees of 8
START = 600.0  # seconds into the trace
NUM_REPLAYED = 60  # of its requests
RATE = 2.0  # times its own
LONGEST = 16_384  # tokens of a prompt; longer ones are cut
ALL = Serving(prefill_chunk=512, prefix_cache=True, preemption=True)


def make_pair(root: Path, shape: str) -> tuple[Path, Path]:
    """Directories of a target of a published shape (small without one) and of a draft: random."""
    write_source_pair(root, CONFIG)
    target = inflate_source(root, shape, prefix="bench") if shape else root / "source"
    return target, root / "draft"


class Bench:
    """Serves on one GPU.

    Args:
        pair: Target and draft.
        device: "cuda"; "cpu" to try the script.
    """

    def __init__(self, pair: tuple[Path, Path], device: str) -> None:
        self._pair = pair
        self._device = device
        self.rows: list[dict[str, Any]] = []

    def serve(
        self, name: str, policy: str, requests: Sequence[BoundRequest], serving: Serving, *,
        max_kv_tokens: int = WIDE, max_batch: int = 8, sampling: Sampling | None = None,
        against: EngineRun | None = None,
    ) -> EngineRun:  # fmt: skip
        """Serve and note what happened."""
        candidate = Candidate(Deployment(1), parse_policy(policy), max_batch)
        begin = time.perf_counter()
        setup = rank_setup(
            candidate, requests, target=self._pair[0], draft=self._pair[1], serving=serving,
            sampling=sampling, max_kv_tokens=max_kv_tokens, smallest_bucket=ROWS,
            device=self._device, dtype="bfloat16" if self._device == "cuda" else "float32",
        )  # fmt: skip
        run = run_on_ranks(setup, candidate, requests, serving=serving, max_kv_tokens=max_kv_tokens)
        row = {
            "run": name, "policy": policy, "serving": serving.to_dict(),
            "max_kv_tokens": max_kv_tokens, "pages": bool(setup.target_paging),
            "seconds_with_start": round(time.perf_counter() - begin, 2), **told(run),
        }  # fmt: skip
        if against is not None:
            pairs = [(against.outputs[i], tokens) for i, tokens in run.outputs.items()]
            row["requests_that_differ"] = sum(a != b for a, b in pairs)
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return run


def told(run: EngineRun) -> dict[str, Any]:
    """What users see of a run, and what was shared."""
    records, rounds = run.records.requests, run.records.rounds
    done = [r for r in records if r.finish is not None and r.first_token is not None]
    first = [1e3 * ((r.first_token or 0.0) - r.arrival) for r in done]
    each = [
        1e3 * ((r.finish or 0.0) - (r.first_token or 0.0)) / (r.output_tokens - 1)
        for r in done
        if r.output_tokens > 1
    ]
    decodes = rounds.column("batch") > 0
    gaps = 1e3 * np.diff(rounds.column("start")[decodes])
    prompts = sum(r.prompt_tokens for r in records)
    return {
        "requests": len(records), "finished": len(done), "notes": run.records.notes,
        "seconds": round(run.records.seconds, 3),
        "tokens_per_second": round(sum(map(len, run.outputs.values())) / run.records.seconds, 1),
        "ttft_ms": [round(float(q), 2) for q in np.quantile(first, (0.5, 0.9, 0.99))],
        "tpot_ms": [round(float(q), 3) for q in np.quantile(each, (0.5, 0.9, 0.99))],
        "round_gap_ms": [round(float(q), 2) for q in np.quantile(gaps, (0.5, 0.9, 0.99, 1.0))],
        "largest_batch": int(rounds.column("batch").max()),
        "prefill_tokens_a_step": int(rounds.column("prefill_tokens").max()),
        "cached_share": round(sum(r.cached_tokens for r in records) / prompts, 4),
        "preemptions": sum(r.num_preemptions for r in records),
    }  # fmt: skip


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())


def mixed(count: int, new_tokens: int) -> list[BoundRequest]:
    """Prompts of 100 to 2200 tokens; most begin with one or two of three common stretches."""
    starts = [prompt(1024, 100 + i) for i in range(3)]
    sizes = np.random.default_rng(0)
    requests = []
    for i in range(count):
        start = starts[i % 3][: 512 * int(sizes.integers(0, 3))]
        rest = prompt(int(sizes.integers(1, 1200)), i)
        requests.append(BoundRequest(i, 0.0, "", (*start, *rest), new_tokens))
    return requests


def same_tokens(bench: Bench, count: int, new_tokens: int) -> None:
    """The same requests in every way; all run their prompts in the same pieces."""
    requests = mixed(count, new_tokens)
    tight = 3 * max(len(r.prompt_ids) + r.max_new_tokens for r in requests) // 2
    chunks, pages = Serving(prefill_chunk=512), Serving(prefill_chunk=512, preemption=True)
    for name, sampling in (("greedy", Sampling()), ("0.7", Sampling(temperature=0.7, seed=3))):
        alone = bench.serve(f"slabs, {name}", "plain", requests, chunks, sampling=sampling)
        common = {"sampling": sampling, "against": alone}
        if name == "greedy":
            bench.serve(f"pages, {name}", "plain", requests, pages, **common)
            bench.serve(f"all, {name}", "plain", requests, ALL, max_kv_tokens=tight, **common)
        bench.serve(f"all, {name}", "tree-8x4x2", requests, ALL, max_kv_tokens=tight, **common)


def long_prompt(bench: Bench, length: int, new_tokens: int) -> None:
    """Four requests decode; a long prompt comes."""
    requests = [BoundRequest(i, 0.0, "", prompt(200, i), new_tokens) for i in range(4)]
    requests.append(BoundRequest(4, 0.3, "", prompt(length, 9), 8))
    for name, chunk in (("whole", None), ("2048", 2048), ("512", 512)):
        bench.serve(
            f"{length} prompt tokens beside 4 that decode, chunk {name}", "plain", requests,
            Serving(prefill_chunk=chunk, preemption=True),
        )  # fmt: skip


def replay(bench: Bench, path: str) -> None:
    """A stretch of a trace with prefix blocks, faster."""
    trace = load_trace(path).scale_lengths(max_prompt=LONGEST, max_output=128)
    trace = trace.slice(START, 3600.0).head(NUM_REPLAYED).scale_rate(RATE)
    requests = bind_prompts(
        trace.requests.assign(category=""), load_prompts("run"),
        lambda text: [1, 2, 3, *text.encode(), 4, 5], seed=0,
    )  # fmt: skip
    requests = [replace(r, arrival=r.arrival - requests[0].arrival) for r in requests]
    name = f"{NUM_REPLAYED} requests of {Path(path).stem} from {START:g} s, {RATE:g} x its rate"
    ways = {
        "whole prompts": Serving(),
        "chunks": Serving(prefill_chunk=2048, preemption=True),
        "chunks, prefix cache": Serving(prefill_chunk=2048, prefix_cache=True, preemption=True),
    }
    for way, serving in ways.items():
        bench.serve(
            f"{name}: {way}", "plain", requests, serving, max_batch=16, max_kv_tokens=200_000
        )


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="a trace with hash_ids: a file or a name")
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--small", action="store_true", help="to try the script on a CPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpus()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(make_pair(Path(folder), args.shape), args.device)
        try:
            same_tokens(bench, 4 if args.small else 24, 8 if args.small else 96)
            long_prompt(bench, 1500 if args.small else 30_000, 20 if args.small else 400)
            if args.trace:
                replay(bench, args.trace)
        finally:
            note = "random int4 target, bf16; quantiles 0.5, 0.9, 0.99 (gaps: and the largest)"
            if args.device == "cuda":
                print(write_result("serving", bench.rows, directory=args.out, note=note))


if __name__ == "__main__":
    main()
