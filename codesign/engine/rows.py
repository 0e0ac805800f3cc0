"""The rows of one forward pass: ragged, several requests side by side.

Letters in shapes: B requests, T rows in all, n_i rows of request i, tree_i rows of its tree that
lie in its slab already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowBatch:
    """What to compute, request after request.

    Attributes:
        slots: (B,) KV slab of each request, no two the same.
        counts: (B,) rows of each request, at least one; their sum is T.
        tokens: (T,) int64.
        positions: (T,) int64, absolute position of each row in its request.
        visible: (B,) each (n_i, tree_i + n_i) bool: which of the request's tree rows (in the
            slab after its prefix) and new rows a row sees, itself included. The whole prefix is
            always visible. None: no tree rows, and each new row sees those up to itself.
    """

    slots: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: Tensor
    positions: Tensor
    visible: tuple[Tensor | None, ...]

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.counts) == len(self.visible), "one entry a request"
        assert len(set(self.slots)) == len(self.slots), f"slab used twice: {self.slots}"
        assert self.tokens.shape == self.positions.shape == (sum(self.counts),), "one entry a row"
        assert all(n > 0 for n in self.counts), f"request without rows: {self.counts}"

    @property
    def num_rows(self) -> int:
        """Rows of all requests together."""
        return self.tokens.shape[0]


def causal_rows(slot: int, tokens: Sequence[int], *, start: int = 0) -> RowBatch:
    """Return the rows of a prompt, or of a piece of it whose first token is at ``start``."""
    return RowBatch(
        slots=(slot,),
        counts=(len(tokens),),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.arange(start, start + len(tokens)),
        visible=(None,),
    )


def join_rows(batches: Sequence[RowBatch]) -> RowBatch:
    """Return the rows of several batches as one."""
    return RowBatch(
        slots=tuple(slot for batch in batches for slot in batch.slots),
        counts=tuple(count for batch in batches for count in batch.counts),
        tokens=torch.cat([batch.tokens for batch in batches]),
        positions=torch.cat([batch.positions for batch in batches]),
        visible=tuple(mask for batch in batches for mask in batch.visible),
    )
