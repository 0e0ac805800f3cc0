"""Tensor parallelism of any degree: which part of every tensor a rank holds.

A rank's share is made even by zeros: key-value heads are filled up to a multiple of the degree,
each with its query heads (the ratio stays), feed-forward channels and head rows likewise. Zero
heads and channels add nothing, so the tokens are those of one rank. ``head_dim`` is the unpadded
model's. Where weights are quantised in groups of columns, every share of a row-parallel matrix
(the attention's output, the feed-forward's second map) starts on a group boundary.

Needs neither torch nor the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from codesign.errors import InputError
from codesign.models.shape import ModelShape

# Channels and head rows of a rank come in multiples of these, for the kernels' tiles.
CHANNELS = 128
HEAD_ROWS = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries [start, stop) of a whole dimension, then zeros up to ``length``."""

    start: int
    stop: int
    length: int

    @property
    def num_real(self) -> int:
        """Entries that are not padding."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Sharding:
    """One rank's share of a model.

    Attributes:
        whole: The unpadded model.
        size: Tensor parallel degree.
        rank: 0 to size - 1.
        group: Columns that share a quantisation scale; None if the weights are not quantised.
        num_head_rows: Rows of the whole head; None = the vocabulary's. (The embedding is not cut.)
    """

    whole: ModelShape
    size: int = 1
    rank: int = 0
    group: int | None = None
    num_head_rows: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"tensor parallel degree must be at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise InputError(f"rank must be in [0, {self.size}), got {self.rank}")
        group, hidden = self.group, self.whole.hidden
        if group is not None and hidden % group:
            raise InputError(
                f"hidden size {hidden} is no multiple of the quantisation group {group}"
            )

    @property
    def shape(self) -> ModelShape:
        """The rank's own shape: its heads and channels, padding included; the rest is whole."""
        return replace(
            self.whole,
            heads=self._kv_heads * self._ratio,
            kv_heads=self._kv_heads,
            intermediate=self._channels,
        )

    @property
    def hidden(self) -> Cut:
        """The residual stream, which every rank holds whole."""
        return Cut(0, self.whole.hidden, self.whole.hidden)

    @property
    def q_rows(self) -> Cut:
        """Rows of the query projection; columns of the attention's output map."""
        return self._cut(self.whole.heads, self._kv_heads * self._ratio, self.whole.head_dim)

    @property
    def kv_rows(self) -> Cut:
        """Rows of the key and of the value projection."""
        return self._cut(self.whole.kv_heads, self._kv_heads, self.whole.head_dim)

    @property
    def channels(self) -> Cut:
        """Rows of the gate and of the up projection; columns of the down projection."""
        return self._cut(self.whole.intermediate, self._channels)

    @property
    def head_rows(self) -> Cut:
        """Rows of the language model head."""
        whole = self._whole_head
        unit = 1 if self.size == 1 else HEAD_ROWS
        return self._cut(whole, _ceil(whole, self.size * unit) * unit)

    @property
    def _ratio(self) -> int:
        return self.whole.heads // self.whole.kv_heads

    @property
    def _kv_heads(self) -> int:
        heads = _ceil(self.whole.kv_heads, self.size)
        if self.group is not None:
            while heads * self._ratio * self.whole.head_dim % self.group:
                heads += 1
        return heads

    @property
    def _channels(self) -> int:
        if self.size == 1 and self.group is None:
            return self.whole.intermediate
        unit = self.group or CHANNELS
        return _ceil(self.whole.intermediate, self.size * unit) * unit

    @property
    def _whole_head(self) -> int:
        return self.whole.vocab if self.num_head_rows is None else self.num_head_rows

    def _cut(self, whole: int, share: int, width: int = 1) -> Cut:
        """Return the rank's part of ``whole`` items of ``width`` entries, ``share`` a rank."""
        start = min(self.rank * share, whole)
        stop = min(start + share, whole)
        return Cut(start * width, stop * width, share * width)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
