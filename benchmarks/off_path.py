"""How sure a draft is behind a wrong token, where simulations have nothing that was recorded.

    python -m benchmarks.off_path [--prompts 16] [--out FILE]      # 2 minutes on two cores

Profiles record a draft's chances along the answers that the target gave. The trees of a round also
grow behind tokens that the target does not say, and a simulation takes recorded chances for these,
too (codesign/sim/acceptance.py). Here the small target answers, and at every third place the draft
goes on behind each of its four likeliest tokens that are wrong, by its likeliest one each time.
Told is the mean log chance of the likeliest token at each depth, and along the answer from there.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codesign.artifacts import command_line
from codesign.artifacts.machine import hardware
from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder, load_decoder
from codesign.engine.rows import causal_rows
from codesign.engine.run import DraftSource
from codesign.models import resolve_model
from codesign.models.tokenizer import Tokenizer
from codesign.prompts import encode_user_turn, load_prompts

TARGET, DRAFT = "smollm2-135m", "smollm2-135m-draft"
ANSWER, EVERY, WRONG, DEPTH = 48, 3, 4, 4
LONGEST = 400  # tokens of a prompt


class Speaker:
    """A model and one slab of its keys and values."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._cache = KVCache(decoder.shape, num_slots=1, max_tokens=LONGEST + ANSWER)
        self._slot = self._cache.take()

    def read(self, tokens: list[int], start: int = 0) -> Tensor:
        """Log probabilities (T, V) after each of these tokens, of which the first is at a place."""
        self._cache.truncate(self._slot, start)
        hidden = self._decoder.forward(causal_rows(self._slot, tokens, start=start), self._cache)
        return torch.log_softmax(self._decoder.logits(hidden), dim=-1)


def answer_of(target: Speaker, prompt: list[int]) -> list[int]:
    """The target's greedy answer."""
    answer, tokens = [], prompt
    for place in range(ANSWER):
        start = 0 if not answer else len(prompt) + place - 1
        answer.append(int(target.read(tokens, start)[-1].argmax()))
        tokens = answer[-1:]
    return answer


def behind_wrong_tokens(
    draft: Speaker, token_map: Tensor, prompt: list[int], answer: list[int]
) -> list[tuple[int, list[float], list[float]]]:
    """Of each wrong token its rank, the draft's log chances behind it, and along the answer."""
    whole = prompt + answer
    log_probs = draft.read(whole)[len(prompt) - 1 : -1]
    tops, columns = log_probs.topk(WRONG, dim=-1)
    found = []
    for place in range(0, ANSWER - DEPTH, EVERY):
        draft.read(whole[: len(prompt) + place])  # what stands before the wrong token
        along = tops[place + 1 : place + 1 + DEPTH, 0].tolist()
        for rank in range(WRONG):
            token = int(token_map[columns[place, rank]])
            if token == answer[place]:
                continue
            chances = []
            for depth in range(DEPTH):
                after = draft.read([token], len(prompt) + place + depth)[0]
                chances.append(float(after.max()))
                token = int(token_map[after.argmax()])
            found.append((rank, chances, along))
    return found


@torch.inference_mode()
def measure(num_prompts: int) -> list[dict[str, Any]]:
    """A row for each rank of a wrong token."""
    folder = resolve_model(TARGET)
    decoder = load_decoder(folder)
    source = DraftSource(resolve_model(DRAFT), folder)
    drafter = source.load(decoder)
    assert drafter is not None, "n-grams have no chances"
    token_map = drafter.token_map
    assert token_map is not None, f"{DRAFT} has the target's vocabulary"
    target, draft, encode = Speaker(decoder), Speaker(drafter), encode_user_turn(Tokenizer(folder))
    prompts = load_prompts()
    rows: dict[int, list[tuple[list[float], list[float]]]] = defaultdict(list)
    for prompt in prompts[:: max(len(prompts) // num_prompts, 1)][:num_prompts]:
        ids = list(encode(prompt.text))[:LONGEST]
        for rank, chances, along in behind_wrong_tokens(
            draft, token_map, ids, answer_of(target, ids)
        ):
            rows[rank].append((chances, along))
    return [row_of(rank, rows[rank]) for rank in sorted(rows)]


def row_of(rank: int, found: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Means over the wrong tokens of a rank."""
    behind, along = (
        np.array(part).mean(axis=0).round(3).tolist() for part in zip(*found, strict=True)
    )
    return {"rank": rank, "tokens": len(found), "behind": behind, "along": along}


def main() -> None:
    """Measure, print, and keep the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = measure(args.prompts)
    for row in rows:
        print(row)
    if args.out is not None:
        about = {"benchmark": "off_path", "command": command_line(), "hardware": hardware()}
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
