"""Fits that were measured before the maps' kernels of 28 November, less what a step saves since.

    python -m benchmarks.correct_maps FIT --savings FILE --parts 1,2,1+1 [--write]

FILE has the microseconds that all layers of a model save, by GPUs and rows. Between the models in
it what is saved follows the bytes of a rank's maps, down to nothing at none. Prompts of up to 64
tokens are read by the same kernels; of longer ones nothing is taken off. Records of 1,056 bytes
instead of 1,088 leave memory for more KV rows. Without --write the steps of eight rows are printed:
as they are and as they would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common import SHAPES
from benchmarks.fit_corrections import run
from codesign.kernels.packing import GROUP, TILE
from codesign.kernels.tiling import RECORD_BYTES
from codesign.models.shape import model_shape
from codesign.models.sharding import Sharding

OLD_RECORD_BYTES = 1088
PROMPT_ROWS = 64  # of the longest prompt that decoding's kernels read


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

    def step(self, model: str, gpus: int, rows: int, *, is_draft: bool) -> float:
        """Seconds of a step, whoever takes it."""
        return self.of(num_weights(model, gpus), rows)

    def prompt(self, model: str, gpus: int, rows: int, *, is_draft: bool) -> float:
        """Seconds of a prompt."""
        return self.step(model, gpus, rows, is_draft=is_draft) if rows <= PROMPT_ROWS else 0.0

    def freed(self, model: str, gpus: int) -> int:
        """Bytes of records that are shorter."""
        return num_weights(model, gpus) // (TILE * GROUP) * (OLD_RECORD_BYTES - RECORD_BYTES)


if __name__ == "__main__":
    run(__doc__, "--savings", Savings)
