"""What corrections of shipped fits share: where steps and KV rows stand in them, and the command.

A correction says what a rank saves: seconds of a step and of a prompt, and bytes of memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common import SHAPES
from codesign.artifacts import write_text
from codesign.config import parse_deployment
from codesign.models.shape import model_shape
from codesign.models.sharding import Sharding

BF16 = 2  # bytes
STEPS = {"target": "prefill", "draft": "draft_prefill"}


class Correction(Protocol):
    """What a rank of a model saves."""

    def step(self, model: str, gpus: int, rows: int, *, is_draft: bool) -> float:
        """Seconds of a step of so many rows."""
        ...

    def prompt(self, model: str, gpus: int, rows: int, *, is_draft: bool) -> float:
        """Seconds of a prompt of so many rows."""
        ...

    def freed(self, model: str, gpus: int) -> int:
        """Bytes; below 0 where more are taken."""
        ...


def row_bytes(model: str, gpus: int) -> int:
    """Of a token's keys and values on a rank."""
    shape = Sharding(model_shape(SHAPES / model), size=gpus).shape
    return 2 * BF16 * shape.layers * shape.kv_heads * shape.head_dim


def correct(
    fit: dict[str, Any], models: tuple[str, str], parts: Sequence[str], saved: Correction
) -> None:
    """Take off a fit's steps and change its KV rows, in place.

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
            for name, of in ((op, saved.step), (STEPS[op], saved.prompt)):
                for time in _times(fit, label, name):
                    time["seconds"] = [
                        seconds - of(model, gpus, rows, is_draft=op == "draft")
                        for rows, seconds in zip(time["rows"], time["seconds"], strict=True)
                    ]
        freed = [saved.freed(model, sides[0]) for model in models]
        rows = [row_bytes(model, sides[0]) for model in models]
        cost, alone = fit["costs"][label], int(freed[0] / rows[0])
        both = alone if deployment.draft_workers else int(sum(freed) / sum(rows))
        cost["kv_tokens"] += both  # a draft of its own has room to spare
        cost["plain_kv_tokens"] += alone


def _times(fit: dict[str, Any], label: str, op: str) -> list[dict[str, Any]]:
    """Where a fit has an operation's times."""
    found = [fit["costs"][label][op]]
    if f"{label}/{op}" in fit["steps"]:
        found.append(fit["steps"][f"{label}/{op}"]["time"])
    return found


def models_of(folder: Path) -> tuple[str, str]:
    """Shapes that a fit's folder is named after."""
    target, draft = folder.name.split("-", 1)[1].split("+")
    return target.removesuffix("-int4"), draft.removesuffix("-int4")


def run(
    description: str | None, flag: str, savings: Callable[[list[dict[str, Any]]], Correction]
) -> None:
    """Correct a fit, or show how.

    Args:
        description: Of the command.
        flag: That names the file with what was measured.
        savings: Of that file's rows.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("fit", type=Path, help="folder of a fit that ships")
    parser.add_argument(flag, dest="file", type=Path, required=True, help="what was measured")
    parser.add_argument("--parts", required=True, help="labels of deployments, with commas")
    parser.add_argument("--write", action="store_true", help="change the fit")
    args = parser.parse_args()
    file, parts = args.fit / "fit.json", args.parts.split(",")
    before, fit = (json.loads(file.read_text()) for _ in range(2))
    correct(fit, models_of(args.fit), parts, savings(json.loads(args.file.read_text())["rows"]))
    for label in parts:
        for op in STEPS:
            old, new = (each["costs"][label][op] for each in (before, fit))
            at = old["rows"].index(8)
            print(f"{label:4} {op:6} {old['seconds'][at] * 1e3:.4f} {new['seconds'][at] * 1e3:.4f}")
    if args.write:
        write_text(file, json.dumps(fit, indent=2) + "\n")
