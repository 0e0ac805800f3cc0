"""Fits that were measured before the maps' kernels of 28 November, less what a step saves since.

    python -m benchmarks.correct_maps FIT --savings FILE --parts 1,2,1+1 [--write]

FILE has the microseconds that all layers of a model save, by GPUs and rows. Between the models in
it what is saved follows the bytes of a rank's maps, down to nothing at none. Prompts of up to 64
tokens are read by the same kernels; of longer ones nothing is taken off. Records of 1,056 bytes
instead of 1,088 leave memory for more KV rows. Without --write the steps of eight rows are printed:
as they are and as they would be.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import SHAPES
from benchmarks.correct_heads import models_of, row_bytes, times_of
from codesign.artifacts import write_text
from codesign.config import parse_deployment
from codesign.kernels.packing import GROUP, TILE
from codesign.kernels.tiling import RECORD_BYTES
from codesign.models.shape import model_shape
from codesign.models.sharding import Sharding

OLD_RECORD_BYTES = 1088
PROMPT_ROWS = 64  # of the longest prompt that decoding's kernels read
STEPS = {"target": "prefill", "draft": "draft_prefill"}


def num_weights(model: str, gpus: int) -> int:
    """Of a rank's maps."""
    shape = Sharding(model_shape(SHAPES / model), size=gpus, group=GROUP).shape
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * query + 2 * keys)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


class Savings:
    """Seconds that a step saves.

    Args:
        rows: Of the file.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._lines: dict[int, tuple[list[int], list[float]]] = {}
        for count in sorted({row["rows"] for row in rows}):
            points = sorted(
                (num_weights(row["model"], row["gpus"]), row["saved_us"] * 1e-6)
                for row in rows
                if row["rows"] == count
            )
            sizes, saved = zip((0, 0.0), *points, strict=True)
            self._lines[count] = list(sizes), list(saved)

    def of(self, size: int, rows: int) -> float:
        """Of a step of so many rows through maps of ``size`` weights.

        Steps of more rows than all that were measured read the weights as often as they have to.
        """
        most = max(self._lines)
        count = next((known for known in self._lines if known >= rows), most)
        saved = float(np.interp(size, *self._lines[count]))
        return saved * max(rows / most, 1.0)


def correct(fit: dict[str, Any], models: tuple[str, str], parts: list[str], saved: Savings) -> None:
    """Take off a fit's steps, and add KV rows, in place.

    Args:
        fit: As in its file.
        models: Shapes of target and draft.
        parts: Labels of deployments.
        saved: What is taken off.
    """
    for label in parts:
        deployment = parse_deployment(label)
        sides = deployment.target_workers, deployment.draft_workers or deployment.target_workers
        for op, model, gpus in zip(STEPS, models, sides, strict=True):
            size = num_weights(model, gpus)
            for time in times_of(fit, label, op):
                _take_off(time, size, saved, most=None)
            for time in times_of(fit, label, STEPS[op]):
                _take_off(time, size, saved, most=PROMPT_ROWS)
        freed = [num_weights(model, sides[0]) // (TILE * GROUP) for model in models]
        freed = [records * (OLD_RECORD_BYTES - RECORD_BYTES) for records in freed]
        rows = [row_bytes(model, sides[0]) for model in models]
        cost, alone = fit["costs"][label], freed[0] // rows[0]
        cost["kv_tokens"] += alone if deployment.draft_workers else sum(freed) // sum(rows)
        cost["plain_kv_tokens"] += alone


def _take_off(time: dict[str, Any], size: int, saved: Savings, *, most: int | None) -> None:
    time["seconds"] = [
        seconds - (saved.of(size, rows) if most is None or rows <= most else 0.0)
        for rows, seconds in zip(time["rows"], time["seconds"], strict=True)
    ]


def main() -> None:
    """Correct a fit, or show how."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fit", type=Path, help="folder of a fit that ships")
    parser.add_argument("--savings", type=Path, required=True)
    parser.add_argument("--parts", required=True, help="labels of deployments, with commas")
    parser.add_argument("--write", action="store_true", help="change the fit")
    args = parser.parse_args()
    file, parts = args.fit / "fit.json", args.parts.split(",")
    before, fit = (json.loads(file.read_text()) for _ in range(2))
    saved = Savings(json.loads(args.savings.read_text())["rows"])
    correct(fit, models_of(args.fit), parts, saved)
    for label in parts:
        for op in STEPS:
            old, new = (each["costs"][label][op] for each in (before, fit))
            at = old["rows"].index(8)
            print(f"{label:4} {op:6} {old['seconds'][at] * 1e3:.4f} {new['seconds'][at] * 1e3:.4f}")
    if args.write:
        write_text(file, json.dumps(fit, indent=2) + "\n")


if __name__ == "__main__":
    main()
