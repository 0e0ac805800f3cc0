"""Fits that were measured with bf16 heads, less what int8 copies save a step and take of memory.

    python -m benchmarks.correct_heads FIT --heads FILE --parts 4,3+1 [--write]

FILE is ``bench_heads``' of the same kind of GPU. What a head saves grows with its bytes, so a line
over the heads of FILE gives it for each number of rows. A prompt ends in a token; a draft's was
timed with the forward of its root. KV rows lose the memory of the copies. Without --write the steps
of eight rows are printed: as they are and as they would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.bench_heads import DRAFTS
from benchmarks.common import SHAPES
from benchmarks.fit_corrections import BF16, run
from codesign.models.shape import model_shape
from codesign.models.sharding import Sharding

# Of a target's head what a draft needs; the bf16 row beside it has samples, too, which take so many
# microseconds with 8 and with 64 rows (step_ends_2026-11-22_h200.json).
LOGITS_ONLY, SAMPLING = "logits only", ((8, 64), (4.5, 12.0))
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

    def step(self, model: str, gpus: int, rows: int, *, is_draft: bool) -> float:
        """Seconds of a step."""
        return self.of(head_bytes(model, gpus), max(rows, FEWEST), is_draft=is_draft)

    def prompt(self, model: str, gpus: int, rows: int, *, is_draft: bool) -> float:
        """Seconds of a prompt, however long."""
        return self.step(model, gpus, FEWEST, is_draft=is_draft)

    def freed(self, model: str, gpus: int) -> int:
        """Bytes of the copy, which are taken."""
        return -(head_bytes(model, gpus) // 2)


def _counts(row: dict[str, Any]) -> bool:
    """Whether a row is of greedy steps in which a logit stands out."""
    return row.get("what", "greedy") in ("greedy", LOGITS_ONLY)


def _place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["model"], row["gpus"], row["rows"]


if __name__ == "__main__":
    run(__doc__, "--heads", Savings)
