"""How often a draft's first choice, and its first four, hold the target's greedy token.

Teacher-forced on prompts with the target's greedy answers: one JSON object a line with "cat",
"prompt_ids" and "out_ids" (plain or .xz). The figure reported is the mean over categories. Runs on
a CPU in about a minute.

usage: evaluate_draft.py --target DIRECTORY --draft DIRECTORY --rows ROWS [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import lzma
import platform
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draft_model import Draft, DraftShape
from target_model import Checkpoint, load_target

from codesign.engine.draft_weights import load_draft_state

NUM_CHOICES = 4


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of answer tokens: first choice right, within the first four, in the vocabulary."""

    first: float
    top_four: float
    in_vocabulary: float
    num_tokens: int

    def as_dict(self) -> dict[str, float | int]:
        """Rounded for a report."""
        return {
            "first": round(self.first, 4),
            "top4": round(self.top_four, 4),
            "in_vocabulary": round(self.in_vocabulary, 4),
            "tokens": self.num_tokens,
        }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Prompts with the target's greedy answers."""
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


@torch.no_grad()
def agreement(draft: Draft, rows: list[dict[str, Any]]) -> dict[str, Agreement]:
    """Agreement by category, and "mean": the mean over categories."""
    device = draft.embedding.device
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    known = torch.zeros(draft.target.vocab_size, dtype=torch.bool, device=device)
    known[draft.draft_to_target] = True
    for row in rows:
        prompt, answer = row["prompt_ids"], row["out_ids"]
        ids = torch.tensor([prompt + answer[:-1]], device=device)
        hidden = draft(ids)[len(prompt) - 1 :]
        ranked = draft.lm_head(hidden).float().topk(NUM_CHOICES, dim=-1).indices
        is_right = draft.draft_to_target[ranked] == torch.tensor(answer, device=device)[:, None]
        counts = (
            int(is_right[:, 0].sum()),
            int(is_right.any(1).sum()),
            int(known[torch.tensor(answer, device=device)].sum()),
            len(answer),
        )
        for i, count in enumerate(counts):
            sums[row["cat"]][i] += count
    found = {
        category: Agreement(first / tokens, four / tokens, known / tokens, tokens)
        for category, (first, four, known, tokens) in sorted(sums.items())
    }
    found["mean"] = _mean(list(found.values()))
    return found


def _mean(parts: list[Agreement]) -> Agreement:
    def over(values: list[float]) -> float:
        return sum(values) / len(values)

    return Agreement(
        over([part.first for part in parts]),
        over([part.top_four for part in parts]),
        over([part.in_vocabulary for part in parts]),
        sum(part.num_tokens for part in parts),
    )


def load_draft(directory: Path, checkpoint: Checkpoint) -> Draft:
    """A shipped draft over the target's embedding."""
    config = json.loads((directory / "config.json").read_text())
    state = load_draft_state(directory)
    shape = DraftShape(
        num_layers=config["num_hidden_layers"],
        ffn_width=config["intermediate_size"],
        vocab_size=config["codesign_draft"]["draft_vocab_size"],
    )
    draft = Draft(
        checkpoint.shape,
        shape,
        embedding=checkpoint.tensors["model.embed_tokens.weight"],
        draft_to_target=state["draft_to_target"],
    )
    draft.load_state(state)
    return draft


def table(found: dict[str, Agreement]) -> str:
    """A plain table, one category a line."""
    lines = [f"{'category':16s} first   top 4   known   tokens"]
    lines += [
        f"{name:16s} {a.first:.3f}   {a.top_four:.3f}   {a.in_vocabulary:.3f}   {a.num_tokens}"
        for name, a in found.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the agreement of a shipped draft."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = agreement(load_draft(args.draft, load_target(args.target)), read_rows(args.rows))
    print(table(found))
    if args.json:
        report = {
            "agreement": {name: part.as_dict() for name, part in found.items()},
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
