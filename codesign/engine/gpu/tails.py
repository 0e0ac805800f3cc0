"""How long a tail a step's graph is captured for, and how long those of the step's requests are.

The tail of a request in a step is its slab rows from the last full 16 of its shortest prefix to its
last new row: what rows do not all see. Fused attention holds it in shared memory. A graph has room
for one length, which takes room from the keys and values that are on their way meanwhile. Rows
beyond it would be neither attended nor written, and nothing would say so: whoever packs a step
checks it (``step_rows.pack_step``).

- A target's rows hang on their whole prefix: a tail is the new rows, at most the bucket, and up to
  15 rows in front of them (``target_tail``).
- A draft's leaves see nodes of earlier steps. The tail holds the tree, with the new leaves at most
  MAX_TREE_ROWS, and up to 15 rows, in every bucket and in steps that run ahead. Rows that catch up
  see all before them and have no tree: at most the bucket and 15. All fit in MAX_TAIL.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from codesign.kernels.fused_attention import MAX_TAIL, TAIL_BLOCK

if TYPE_CHECKING:
    from codesign.engine.gpu.step_rows import RequestRows


def target_tail(bucket: int) -> int:
    """Return the longest tail of a target's step of ``bucket`` rows, padding among them."""
    return min(bucket + TAIL_BLOCK - 1, MAX_TAIL)


def check_tails(requests: Iterable[RequestRows], max_tail: int) -> None:
    """Hold requests of a step, whose prefixes never fall, against what its graph has room for.

    Raises:
        AssertionError: If a tail is longer: rows were packed for another graph.
    """
    for request in requests:
        context = request.context
        first = min(context, request.prefixes[0])
        tail = context + len(request.tokens) - first // TAIL_BLOCK * TAIL_BLOCK
        assert tail <= max_tail, (
            f"slab {request.slot}: a tail of {tail} rows in a step whose graph holds {max_tail}"
        )
