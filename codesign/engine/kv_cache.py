"""Keys and values of running requests: one contiguous slab each, [prefix | tree].

A slab row holds one token's rotated key and value in every layer. Its position was fixed when it
was computed, so a tree row that becomes part of the prefix moves as it is: accepting a path is
``gather``, dropping a tree is ``truncate``.

Letters in shapes: L layers, B slabs, G key/value heads, M rows of a slab, E head size, S rows in
use, n new rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from codesign.engine.rows import RowBatch
from codesign.models.shape import ModelShape


class CapacityError(RuntimeError):
    """No slab, or no row in a slab, is left: the caller admitted more than it reserved."""


class KVCache:
    """Slabs of ``max_tokens`` rows for up to ``num_slots`` requests.

    Args:
        shape: Decoder whose keys and values are kept.
        num_slots: Requests that fit at once.
        max_tokens: Rows of a slab, tree rows included.
        device: Where they lie.
        check: Keep position and token of every row, and assert in every forward pass that the
            rows a new row sees are those of its own path (see ``extend``). For tests.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_slots: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        check: bool = False,
    ) -> None:
        size = (shape.layers, num_slots, shape.kv_heads, max_tokens, shape.head_dim)
        # Memory of a large zero tensor is claimed page by page, as slabs fill. Slabs made inside
        # inference mode could not be changed outside it.
        with torch.inference_mode(False):
            self._keys_LBGME = torch.zeros(size, dtype=torch.float32, device=device)
            self._values_LBGME = torch.zeros(size, dtype=torch.float32, device=device)
        self._lengths = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._labels: list[list[tuple[int, int]]] | None = None
        if check:
            self._labels = [[] for _ in range(num_slots)]

    @property
    def max_tokens(self) -> int:
        """Rows of a slab."""
        return self._keys_LBGME.shape[3]

    @property
    def num_free(self) -> int:
        """Slabs that ``take`` can still give."""
        return len(self._free)

    def take(self) -> int:
        """Return a free slab, now empty.

        Raises:
            CapacityError: If none is free.
        """
        if not self._free:
            raise CapacityError(f"all {len(self._lengths)} slabs are in use")
        slot = self._free.pop()
        self._set_length(slot, 0)
        return slot

    def free(self, slot: int) -> None:
        """Give a slab back."""
        assert slot not in self._free, f"slab {slot} is free already"
        self._set_length(slot, 0)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Return the rows in use."""
        return self._lengths[slot]

    def extend(self, batch: RowBatch) -> None:
        """Make room for a batch's rows behind those in use; the decoder then fills it.

        Raises:
            CapacityError: If a slab is too short for its rows; no slab has changed then.
            AssertionError: With ``check``, if positions of the prefix are not 0, 1, 2, ..., or
                those a new row sees, itself included, are not 0 up to its own, each once.
        """
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            if self._lengths[slot] + count > self.max_tokens:
                raise CapacityError(
                    f"slab {slot} holds {self._lengths[slot]} of {self.max_tokens} rows; "
                    f"{count} more do not fit"
                )
        if self._labels is not None:
            self._check_batch(batch, self._labels)
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            self._lengths[slot] += count

    def append(self, layer: int, slot: int, keys_nGE: Tensor, values_nGE: Tensor) -> None:
        """Fill the last n rows in use of one layer of a slab, after ``extend`` made room.

        Args:
            layer: Number of the layer.
            slot: Number of the slab.
            keys_nGE: Rotated keys of the n rows.
            values_nGE: Their values.
        """
        end = self._lengths[slot]
        start = end - keys_nGE.shape[0]
        self._keys_LBGME[layer, slot, :, start:end] = keys_nGE.transpose(0, 1)
        self._values_LBGME[layer, slot, :, start:end] = values_nGE.transpose(0, 1)

    def rows(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Return keys and values in use, each (G, S, E), as views of the slab."""
        end = self._lengths[slot]
        return self._keys_LBGME[layer, slot, :, :end], self._values_LBGME[layer, slot, :, :end]

    def copy_rows(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows in all layers, each (L, G, n, E), as copies."""
        assert end <= self._lengths[slot], f"{end} > {self._lengths[slot]} rows in use"
        rows = (slice(None), slot, slice(None), slice(start, end))
        return self._keys_LBGME[rows].clone(), self._values_LBGME[rows].clone()

    def put_rows(
        self, slot: int, keys_LGnE: Tensor, values_LGnE: Tensor, tokens: Sequence[int]
    ) -> None:
        """Append rows of a prefix that were computed before; see ``copy_rows``.

        Args:
            slot: Slab; its rows in use are at positions 0, 1, ...
            keys_LGnE: Their keys.
            values_LGnE: Their values.
            tokens: What they stand for, for ``check``.
        """
        start = self._lengths[slot]
        end = start + keys_LGnE.shape[2]
        self._keys_LBGME[:, slot, :, start:end] = keys_LGnE
        self._values_LBGME[:, slot, :, start:end] = values_LGnE
        if self._labels is not None:
            self._labels[slot].extend(enumerate(tokens, start))
        self._lengths[slot] = end

    def gather(self, slot: int, base: int, rows: Sequence[int]) -> None:
        """Keep the first ``base`` rows and then ``rows``, in this order; drop all others.

        Args:
            slot: Slab.
            base: Rows that stay where they are.
            rows: Absolute slab rows from ``base`` on, each at most once, in any order.
        """
        length = self._lengths[slot]
        assert all(base <= row < length for row in rows), f"rows {rows} not in [{base}, {length})"
        assert len(set(rows)) == len(rows), f"a row is kept twice: {rows}"
        end = base + len(rows)
        if any(row != base + i for i, row in enumerate(rows)):
            index = torch.tensor(rows, device=self._keys_LBGME.device)
            for slab_LBGME in (self._keys_LBGME, self._values_LBGME):
                # index_select copies before anything is overwritten, so overlap does no harm
                slab_LBGME[:, slot, :, base:end] = slab_LBGME[:, slot].index_select(2, index)
        if self._labels is not None:
            labels = self._labels[slot]
            self._labels[slot] = labels[:base] + [labels[row] for row in rows]
        self._lengths[slot] = end

    def truncate(self, slot: int, length: int) -> None:
        """Drop all rows from ``length`` on."""
        assert 0 <= length <= self._lengths[slot], f"{length} > {self._lengths[slot]} rows in use"
        self._set_length(slot, length)

    def assert_prefix(self, slot: int, tokens: Sequence[int]) -> None:
        """Assert, with ``check``, that a slab begins with these tokens at positions 0, 1, ...

        For the caller to state after a gather what the slab must hold: a wrong row at the right
        position is not to be seen otherwise. Without ``check`` it does nothing.
        """
        if self._labels is None:
            return
        found = self._labels[slot][: len(tokens)]
        wanted = list(enumerate(tokens))
        assert found == wanted, f"slab {slot} begins with {found}, must be {wanted}"

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        if self._labels is not None:
            del self._labels[slot][length:]

    def _check_batch(self, batch: RowBatch, labels: list[list[tuple[int, int]]]) -> None:
        """Check each request's rows, then label the new ones (position, token)."""
        pairs = list(zip(batch.positions.tolist(), batch.tokens.tolist(), strict=True))
        first = 0
        for slot, count, visible in zip(batch.slots, batch.counts, batch.visible, strict=True):
            new = pairs[first : first + count]
            _check_positions([p for p, _ in labels[slot]], [p for p, _ in new], visible)
            labels[slot].extend(new)
            first += count


def _check_positions(old: list[int], new: list[int], visible: Tensor | None) -> None:
    """Assert that each new row sees exactly one row at every position up to its own."""
    if visible is None:
        visible = torch.ones(len(new), len(new), dtype=torch.bool).tril()
    prefix = len(old) - (visible.shape[1] - len(new))
    assert visible.shape[0] == len(new), f"{visible.shape[0]} mask rows for {len(new)} rows"
    assert prefix >= 0, f"mask spans {visible.shape[1]} rows, the slab and the batch hold fewer"
    assert old[:prefix] == list(range(prefix)), f"prefix positions {old[:prefix]}"
    tail = old[prefix:] + new
    for row, position in enumerate(new):
        assert bool(visible[row, visible.shape[1] - len(new) + row]), f"row {row} not its own"
        seen = sorted(p for p, v in zip(tail, visible[row].tolist(), strict=True) if v)
        assert seen == list(range(prefix, position + 1)), (
            f"the row at position {position} sees tree positions {seen} after {prefix} of prefix"
        )
