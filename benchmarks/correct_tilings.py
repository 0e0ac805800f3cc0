"""Fits that were measured with other tilings, less what a step saves with those that were found.

    python -m benchmarks.correct_tilings FIT --found FILE --parts 1,2,1+1 [--write]

FILE is a result of ``search_tilings``; of its rows those count that say "taken": true. Steps and
prompts of up to 16 tokens change, of the models and degrees that were searched and of no others:
more rows have tilings of their own. Rows of 9 to 16 count only where they were searched alone:
behind 8 rows, "now" is not what the table had. Without --write the steps of eight rows are printed:
as they are and as they would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.fit_corrections import run

ROWS = (8, 16)  # that tilings are searched for: up to 8, and up to 16


class Found:
    """Seconds that a step saves.

    Args:
        rows: Of the file.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._saved = {
            (row["model"], row["tensor_parallel"], row["rows"]): _saved(row["ms"])
            for row in rows
            if row.get("taken")
        }

    def step(self, model: str, gpus: int, rows: int, *, is_draft: bool) -> float:
        """Seconds of a step, whoever takes it."""
        searched = next((count for count in ROWS if rows <= count), 0)
        return self._saved.get((model, gpus, searched), 0.0)

    def prompt(self, model: str, gpus: int, rows: int, *, is_draft: bool) -> float:
        """Seconds of a prompt; a draft's was timed with a forward of one row behind it."""
        if not is_draft:
            return self.step(model, gpus, rows, is_draft=False)
        behind, prompt = (self.step(model, gpus, n, is_draft=True) for n in (1, rows - 1))
        return behind + prompt

    def freed(self, model: str, gpus: int) -> int:
        """Bytes: tilings hold none."""
        return 0


def _saved(ms: dict[str, float]) -> float:
    return 1e-3 * (ms["now"] - ms["best"])


if __name__ == "__main__":
    run(__doc__, "--found", Found)
