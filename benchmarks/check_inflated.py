"""Build an inflated model on one GPU and hold its greedy tokens against the small model's.

    python -m benchmarks.check_inflated --shape llama-3-70b --json out.json

The small model is random, of SmolLM2-135M's shape, so that nothing needs to be downloaded. Both run
the plain PyTorch path in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.common import need_gpus
from benchmarks.random_pair import random_tensors
from codesign.engine.inflate import InflatedReader
from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder, state_decoder
from codesign.engine.rank_weights import RankWeights
from codesign.engine.rows import RowBatch
from codesign.fit.priced_model import parse_model
from codesign.models.recipe import Recipe, inflated_shape

SMALL = parse_model("smollm2-135m").shape
PROMPT = [504, 3575, 282, 4649, 314, 7042, 30, 2]


def greedy(decoder: Decoder, num_tokens: int) -> tuple[list[int], float]:
    """Return greedy tokens and seconds per token after the first."""
    device = decoder.embedding_VD.device
    cache = KVCache(decoder.shape, num_slots=1, max_tokens=64, device=device)
    slot, done, new = cache.take(), 0, PROMPT
    tokens: list[int] = []
    began = 0.0
    for index in range(num_tokens):
        if index == 1:
            began = time.perf_counter()
        batch = RowBatch(
            slots=(slot,),
            counts=(len(new),),
            tokens=torch.tensor(new, device=device),
            positions=torch.arange(done, done + len(new), device=device),
            visible=(None,),
        )
        hidden = decoder.forward(batch, cache)
        done += len(new)
        new = [int(decoder.logits(hidden[-1:]).argmax())]
        tokens += new
    return tokens, (time.perf_counter() - began) / max(1, num_tokens - 1)


def main() -> None:
    """Build, decode twice, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="llama-3-70b")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpus()
    state = random_tensors(SMALL.tensors(), 0)
    state["model.embed_tokens.weight"] *= 0.5
    big = inflated_shape(args.shape, SMALL)
    began = time.perf_counter()
    recipe = Recipe(args.shape, "target", "random", "", seed=0)
    reader = InflatedReader(recipe, SMALL, state, big=big, device=args.device)
    weights = RankWeights(reader, device=args.device, dtype=torch.float32)
    decoder = Decoder(weights)
    result = {"shape": args.shape, "torch": torch.__version__, "device": args.device}
    if args.device == "cuda":
        torch.cuda.synchronize()
        result |= {
            "gpu": torch.cuda.get_device_name(),
            "allocated_gb": torch.cuda.memory_allocated() / 1e9,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
    result["build_seconds"] = time.perf_counter() - began
    got, seconds = greedy(decoder, args.tokens)
    small = state_decoder(reader.small, reader.small_state(), device=args.device)
    want, _ = greedy(small, args.tokens)
    result |= {"seconds_per_token": seconds, "tokens": got, "small_tokens": want}
    result["equal"] = got == want
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(got != want)


if __name__ == "__main__":
    main()
