"""Seconds of one decoding step of target and draft on this machine's CPU, in plain PyTorch.

One sequence with a cached context; 1 or 8 new rows (a chain step or a level of a draft tree),
float32. Target and draft take turns, so that a disturbance hits both.

usage: time_steps.py --target DIRECTORY --draft DIRECTORY [--threads 1 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from decode_kernels import rotate
from draft_model import Block, Draft, DraftShape, rms_norm
from evaluate_draft import load_draft
from target_model import Checkpoint, load_target, rope_tables
from torch import Tensor

CONTEXT = 256
ROWS = (1, 8)


@dataclass(frozen=True, slots=True)
class Timed:
    """A model and its cached keys and values, each [layers, kv heads, CONTEXT, head dim]."""

    model: Draft
    keys: Tensor
    values: Tensor


def whole_target(checkpoint: Checkpoint) -> Draft:
    """The target as a draft of all its layers and its whole vocabulary."""
    shape = checkpoint.shape
    size = DraftShape(shape.num_layers, shape.ffn_width, shape.vocab_size)
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    model = Draft(shape, size, embedding=embedding, draft_to_target=torch.arange(shape.vocab_size))
    model.start_from(checkpoint, list(range(shape.num_layers)))
    return model


def with_context(model: Draft) -> Timed:
    """The model behind a context of random keys and values; the time does not depend on them."""
    target = model.target
    size = (model.shape.num_layers, target.num_kv_heads, CONTEXT, target.head_dim)
    return Timed(model, torch.randn(size), torch.randn(size))


@torch.inference_mode()
def step(timed: Timed, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Logits [rows, N] of new rows that see the context and themselves."""
    model, rows = timed.model, ids.shape[0]
    group = model.target.num_heads // model.target.num_kv_heads
    x = F.embedding(ids, model.embedding)
    mask = torch.cat([torch.ones(rows, CONTEXT), torch.eye(rows)], dim=1).bool()
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Block)
        y = rms_norm(x, layer.input_layernorm, model.target.rms_norm_eps)
        size = (rows, -1, model.target.head_dim)
        query = rotate(layer.q_proj(y).view(size), cos, sin).transpose(0, 1)
        key = rotate(layer.k_proj(y).view(size), cos, sin).transpose(0, 1)
        value = layer.v_proj(y).view(size).transpose(0, 1)
        keys = torch.cat([timed.keys[index], key], dim=1).repeat_interleave(group, 0)
        values = torch.cat([timed.values[index], value], dim=1).repeat_interleave(group, 0)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = layer.mix(x, out.transpose(0, 1).reshape(rows, -1))
    return model.lm_head(rms_norm(x, model.norm, model.target.rms_norm_eps))


def seconds(timed: Timed, rows: int) -> float:
    """Wall-clock seconds of one step."""
    cos, sin = rope_tables(timed.model.target, CONTEXT + 1)
    cos, sin = cos[CONTEXT:, None], sin[CONTEXT:, None]
    ids = torch.arange(rows) + 100
    started = time.perf_counter()
    step(timed, ids, cos, sin)
    return time.perf_counter() - started


def measure(target: Timed, draft: Timed, rows: int, repetitions: int) -> dict[str, float]:
    """Median and fastest milliseconds of both, and the ratio of the medians."""
    pairs = [(seconds(target, rows), seconds(draft, rows)) for _ in range(repetitions + 2)][2:]
    of_target, of_draft = zip(*pairs, strict=True)
    middle = statistics.median(of_target), statistics.median(of_draft)
    return {
        "target_ms": round(1e3 * middle[0], 2),
        "target_fastest_ms": round(1e3 * min(of_target), 2),
        "draft_ms": round(1e3 * middle[1], 2),
        "draft_fastest_ms": round(1e3 * min(of_draft), 2),
        "ratio": round(middle[0] / middle[1], 2),
        "ratio_fastest": round(min(of_target) / min(of_draft), 2),
    }


def main() -> None:
    """Print the step times of target and draft."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    checkpoint = load_target(args.target)
    target = with_context(whole_target(checkpoint))
    draft = with_context(load_draft(args.draft, checkpoint))
    results = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for rows in ROWS:
            found = measure(target, draft, rows, args.repetitions)
            results.append({"threads": threads, "rows": rows, **found})
            print(results[-1], flush=True)
    if args.json:
        report = {
            "context": CONTEXT,
            "steps": results,
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
