"""Keys and values on one rank: a slab per request, [prefix | tree], and one for padding rows.

Slabs are whole, or lie in pages of which requests hold as many as they need. Whoever leads the rank
group knows which slab and which pages belong to whom and how many rows are in use (``paging.py``);
a rank just holds the tensors. The policy's state machines count rows, so nothing is counted twice.

Letters in shapes: L layers, B slabs (the last is scratch) or pages, S slabs, K pages of a slab, G
key/value heads, M rows of a slab or page, E head size, T rows of a step, N rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from codesign.engine.gpu.paging import Paging
from codesign.engine.gpu.step_rows import DeviceRows, Words
from codesign.kernels.row_attention import SeenRows, move_rows, places_of
from codesign.models.shape import ModelShape
from codesign.policy.step_time import BUCKETS


class Slabs:
    """Slabs of ``max_tokens`` rows for ``num_slots`` requests, and scratch.

    Args:
        shape: The rank's own part of the model.
        num_slots: Requests that fit at once.
        max_tokens: Rows of a slab, tree rows included.
        dtype: Of keys and values.
        device: Where they lie.
        paging: The pages that slabs lie in; None for whole slabs.
        check: Carry (position, token) with every row, and count rows that are not where a new row
            expects them (``num_faults``). For tests.

    Attributes:
        keys_LBGME: Keys.
        values_LBGME: Values.
        layers: Keys and values of each layer.
        tables_SK: Page of each slab's rows, int32; None for whole slabs.
        max_tokens: Rows of a slab.
        scratch_slot: Slab of padding rows.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        paging: Paging | None = None,
        check: bool = False,
    ) -> None:
        self.max_tokens = max_tokens
        self.scratch_slot = num_slots
        self.tables_SK: Tensor | None = None
        self._entries_SK: Tensor | None = None
        pieces, rows = num_slots + 1, max_tokens
        if paging is not None:
            tables_SK = _first_tables(paging, num_slots, max_tokens)
            pieces, rows = int(tables_SK.max()) + 1, paging.page_rows
            self._entries_SK = tables_SK.pin_memory() if device.type == "cuda" else tables_SK
            self.tables_SK = tables_SK.to(device, copy=True)
        size = (shape.layers, pieces, shape.kv_heads, rows, shape.head_dim)
        self.keys_LBGME = torch.zeros(size, dtype=dtype, device=device)
        self.values_LBGME = torch.zeros(size, dtype=dtype, device=device)
        self.layers = [*zip(self.keys_LBGME.unbind(), self.values_LBGME.unbind(), strict=True)]
        self.num_faults_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self._labels_BM2: Tensor | None = None
        if check:
            self._labels_BM2 = torch.full((pieces, rows, 2), -1, dtype=torch.int32, device=device)

    def enter(self, entries_N3: Words) -> None:
        """Write entries of page tables, (slot, index, page) each, before steps that read them.

        Of several for one place the last one counts.
        """
        assert self.tables_SK is not None, "whole slabs have no pages"
        assert self._entries_SK is not None, "tables have a copy on the host"
        slots, indices, pages = entries_N3.T
        self._entries_SK.numpy()[slots, indices] = pages  # the same memory
        self.tables_SK.copy_(self._entries_SK, non_blocking=True)

    def prompt_rows(self, slot: int, count: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        """The first ``count`` keys and values of a slab, of a layer, each (1, G, count, E).

        Those in pages are copied when a layer is asked for: its rows must be written by then.
        """
        if self.tables_SK is None:
            keys = self.keys_LBGME[:, slot : slot + 1, :, :count].unbind()
            values = self.values_LBGME[:, slot : slot + 1, :, :count].unbind()
            return lambda layer: (keys[layer], values[layer])
        pages = self.tables_SK[slot, : -(-count // self.keys_LBGME.shape[3])]

        def gathered(slabs_BGME: Tensor) -> Tensor:
            return slabs_BGME[pages].transpose(0, 1).flatten(1, 2)[None, :, :count]

        return lambda layer: (gathered(self.layers[layer][0]), gathered(self.layers[layer][1]))

    def places(self, slots_N: Tensor, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Where slab rows lie; see ``row_attention.places_of``."""
        return places_of(slots_N, rows_N, self.tables_SK, self.keys_LBGME.shape[3])

    def prompt_places(
        self,
        slot: int | Tensor,
        positions_N: Tensor,
        first_written: int | Tensor,
        end: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Slab and slab row that rows of a prompt go to.

        Into scratch below ``first_written``, which are there, and from ``end`` on: padding.
        """
        outside = (positions_N < first_written) | (positions_N >= end)
        slots_N = (torch.zeros_like(positions_N) + slot).masked_fill(outside, self.scratch_slot)
        return slots_N, torch.where(outside, positions_N % BUCKETS[-1], positions_N)

    def move(self, moves_N3: Tensor, num_moves_1: Tensor) -> None:
        """Move rows of all layers; see ``row_attention.move_rows``."""
        move_rows(self.keys_LBGME, self.values_LBGME, moves_N3, num_moves_1, self.tables_SK)
        if self._labels_BM2 is not None:
            labels = self._labels_BM2[None, :, None]  # as one layer of one head
            move_rows(labels, labels.clone(), moves_N3, num_moves_1, self.tables_SK)

    def label(self, rows: DeviceRows) -> None:
        """Note position and token of the rows that a step is about to write; check what they see.

        A row at position p must see exactly one row at each position 0..p, its own last.
        """
        if self._labels_BM2 is None:
            return
        new = torch.stack((rows.positions_T, rows.tokens_T), dim=-1)
        self._labels_BM2[self.places(rows.slots_T, rows.kv_rows_T)] = new
        expected = torch.arange(self.max_tokens, device=new.device)
        seen_TM = seen_slab_rows(rows, expected).clamp(max=self.max_tokens - 1)
        slots_TM = rows.slots_T[:, None].expand_as(seen_TM)
        found_TM = self._labels_BM2[self.places(slots_TM, seen_TM)][..., 0]
        is_seen_TM = expected <= rows.positions_T[:, None]
        self.num_faults_1 += ((found_TM != expected) & is_seen_TM).sum()

    def label_prompt(
        self,
        tokens_N: Tensor,
        slot: int | Tensor,
        *,
        start: int | Tensor = 0,
        first_written: int | Tensor = 0,
        count: Tensor | None = None,
    ) -> None:
        """Note position and token of a prompt's rows; check that those before them are there.

        Args:
            tokens_N: Of the rows.
            slot: The slab; as a tensor, of one entry, as are the next ones.
            start: Position of the first row.
            first_written: See ``prompt_places``.
            count: Rows that are no padding; None: all.
        """
        if self._labels_BM2 is None:
            return
        device = tokens_N.device
        new = torch.arange(len(tokens_N), device=device) + start
        end = start + (len(tokens_N) if count is None else count)
        places = self.places(*self.prompt_places(slot, new, first_written, end))
        self._labels_BM2[places] = torch.stack((new, tokens_N.long()), dim=-1).int()
        expected = torch.arange(self.max_tokens, device=device)
        found = self._labels_BM2[self.places(torch.zeros_like(expected) + slot, expected)]
        self.num_faults_1 += ((found[:, 0] != expected) & (expected < end)).sum()

    def labels(self, slot: int) -> list[tuple[int, int]]:
        """Position and token of a slab's rows, with ``check``; junk where it has no pages."""
        assert self._labels_BM2 is not None, "made without check"
        rows = torch.arange(self.max_tokens, device=self._labels_BM2.device)
        found = self._labels_BM2[self.places(torch.full_like(rows, slot), rows)]
        return [(pair[0], pair[1]) for pair in found.tolist()]


def _first_tables(paging: Paging, num_slots: int, max_tokens: int) -> Tensor:
    """Page tables before anyone holds a page: scratch has pages of its own behind all others."""
    scratch = paging.pages_of(BUCKETS[-1])
    tables_SK = torch.zeros(
        num_slots + 1, max(paging.pages_of(max_tokens), scratch), dtype=torch.int32
    )
    tables_SK[num_slots, :scratch] = torch.arange(paging.num_pages, paging.num_pages + scratch)
    return tables_SK


def seen_slab_rows(rows: DeviceRows, positions_M: Tensor) -> Tensor:
    """Slab row that each row of a step sees at each position, (T, M) int64; junk beyond its own."""
    behind_TM = positions_M - rows.prefixes_T[:, None]
    longest = rows.path_TP.shape[1] - 1
    steps_TM = rows.path_TP.long().gather(1, behind_TM.clamp(0, longest).long())
    tree_TM = rows.prefixes_T[:, None] + steps_TM
    return torch.where(behind_TM >= 0, tree_TM, positions_M).long()


def seen_rows(rows: DeviceRows, slabs: Slabs) -> SeenRows:
    """What the attention of a step reads."""
    columns = (rows.slots_T, rows.positions_T, rows.prefixes_T, rows.path_TP)
    return SeenRows(*columns, slabs.tables_SK, padding_slot=slabs.scratch_slot)
