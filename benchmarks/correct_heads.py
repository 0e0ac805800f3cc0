"""Fits that were measured with bf16 heads, less what int8 copies save a step and take of memory.

    python -m benchmarks.correct_heads FIT --heads FILE --parts 4,3+1 [--write]

FILE is ``bench_heads``' of the same kind of GPU. What a head saves grows with its bytes, so a line
over the heads of FILE gives it for each number of rows. A prompt ends in a token; a draft's was
timed with the forward of its root. KV rows lose the memory of the copies. Without --write the steps
of eight rows are printed: as they are and as they would be.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_heads import DRAFTS
from benchmarks.common import SHAPES
from codesign.artifacts import write_text
from codesign.config import parse_deployment
from codesign.models.shape import model_shape
from codesign.models.sharding import Sharding

# Of a target's head what a draft needs; the bf16 row beside it has samples, too, which take so many
# microseconds with 8 and with 64 rows (step_ends_2026-11-22_h200.json).
LOGITS_ONLY, SAMPLING = "logits only", ((8, 64), (4.5, 12.0))
BF16 = 2  # bytes
FEWEST = 8  # rows of a target's step


def head_bytes(model: str, gpus: int) -> int:
    """Of a rank's head in bf16."""
    cut = Sharding(model_shape(SHAPES / model), size=gpus)
    return BF16 * cut.head_rows.length * cut.whole.hidden


class Savings:
    """Seconds that a step saves.

    Args:
        rows: Of ``bench_heads``' file.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._lines: dict[tuple[bool, int], tuple[float, float]] = {}
        points: dict[tuple[bool, int], list[tuple[int, float]]] = {}
        bf16 = {_place(row): row["us"] for row in rows if row["head"] == "bf16" and _counts(row)}
        for row in rows:
            if row["head"] == "bf16" or not _counts(row):
                continue
            is_draft = row["model"] in DRAFTS or row.get("what") == LOGITS_ONLY
            beyond = np.interp(row["rows"], *SAMPLING) if row.get("what") == LOGITS_ONLY else 0.0
            saved = (bf16[_place(row)] - row["us"] - beyond) * 1e-6
            size = head_bytes(row["model"], row["gpus"])
            points.setdefault((is_draft, row["rows"]), []).append((size, saved))
        for place, both in points.items():
            sizes, saved = zip(*both, strict=True)
            slope, start = np.polyfit(sizes, saved, 1)
            self._lines[place] = float(start), float(slope)

    def of(self, size: int, rows: int, *, is_draft: bool) -> float:
        """Of a head of ``size`` bytes in bf16, in a step of ``rows`` rows; 0 beyond all rows."""
        known = sorted(count for draft, count in self._lines if draft == is_draft)
        fit = [count for count in known if count >= rows]
        if not fit:
            return 0.0
        start, slope = self._lines[is_draft, fit[0]]
        return max(start + slope * size, 0.0)


def _counts(row: dict[str, Any]) -> bool:
    """Whether a row is of greedy steps in which a logit stands out."""
    return row.get("what", "greedy") in ("greedy", LOGITS_ONLY)


def _place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["model"], row["gpus"], row["rows"]


def row_bytes(model: str, gpus: int) -> int:
    """Of a token's keys and values on a rank."""
    shape = Sharding(model_shape(SHAPES / model), size=gpus).shape
    return 2 * BF16 * shape.layers * shape.kv_heads * shape.head_dim


def correct(fit: dict[str, Any], models: tuple[str, str], parts: list[str], saved: Savings) -> None:
    """Take off a fit's steps and KV rows, in place.

    Args:
        fit: As in its file.
        models: Shapes of target and draft.
        parts: Labels of deployments.
        saved: What is taken off.
    """
    for label in parts:
        deployment = parse_deployment(label)
        sides = deployment.target_workers, deployment.draft_workers or deployment.target_workers
        for is_draft, (model, gpus) in enumerate(zip(models, sides, strict=True)):
            size = head_bytes(model, gpus)
            saving = partial(saved.of, size, is_draft=bool(is_draft))
            step, prompt = ("draft", "draft_prefill") if is_draft else ("target", "prefill")
            for time in times_of(fit, label, step):
                time["seconds"] = [
                    seconds - saving(max(rows, FEWEST))
                    for rows, seconds in zip(time["rows"], time["seconds"], strict=True)
                ]
            for time in times_of(fit, label, prompt):
                time["seconds"] = [seconds - saving(FEWEST) for seconds in time["seconds"]]
        copies = [head_bytes(model, sides[0]) // 2 for model in models]
        rows = [row_bytes(model, sides[0]) for model in models]
        cost, alone = fit["costs"][label], copies[0] // rows[0]
        both = alone if deployment.draft_workers else sum(copies) // sum(rows)
        cost["kv_tokens"] -= both  # a draft of its own has room to spare
        cost["plain_kv_tokens"] -= alone


def times_of(fit: dict[str, Any], label: str, op: str) -> list[dict[str, Any]]:
    """Where a fit has an operation's times."""
    found = [fit["costs"][label][op]]
    if f"{label}/{op}" in fit["steps"]:
        found.append(fit["steps"][f"{label}/{op}"]["time"])
    return found


def models_of(folder: Path) -> tuple[str, str]:
    """Shapes that a fit's folder is named after."""
    target, draft = folder.name.split("-", 1)[1].split("+")
    return target.removesuffix("-int4"), draft.removesuffix("-int4")


def main() -> None:
    """Correct a fit, or show how."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fit", type=Path, help="folder of a fit that ships")
    parser.add_argument("--heads", type=Path, required=True, help="of bench_heads")
    parser.add_argument("--parts", required=True, help="labels of deployments, with commas")
    parser.add_argument("--write", action="store_true", help="change the fit")
    args = parser.parse_args()
    file, parts = args.fit / "fit.json", args.parts.split(",")
    before, fit = (json.loads(file.read_text()) for _ in range(2))
    saved = Savings(json.loads(args.heads.read_text())["rows"])
    correct(fit, models_of(args.fit), parts, saved)
    for label in parts:
        for op in ("target", "draft"):
            old, new = (each["costs"][label][op] for each in (before, fit))
            at = old["rows"].index(8)
            print(f"{label:4} {op:6} {old['seconds'][at] * 1e3:.4f} {new['seconds'][at] * 1e3:.4f}")
    if args.write:
        write_text(file, json.dumps(fit, indent=2) + "\n")


if __name__ == "__main__":
    main()
