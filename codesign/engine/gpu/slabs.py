"""Keys and values on one rank: a slab per request, [prefix | tree], and one for padding rows.

Whoever leads the rank group knows which slab belongs to whom and how many rows are in use; a rank
just holds the tensors. The policy's state machines count rows, so nothing is counted twice.

Letters in shapes: L layers, B slabs (the last is scratch), G key/value heads, M rows, E head size.
"""

from __future__ import annotations

import torch

from codesign.engine.gpu.step_rows import DeviceRows
from codesign.engine.kv_cache import CapacityError
from codesign.kernels.row_attention import SeenRows, move_rows
from codesign.models.shape import ModelShape


class Slabs:
    """Slabs of ``max_tokens`` rows for ``num_slots`` requests, and scratch.

    Args:
        shape: The rank's own part of the model.
        num_slots: Requests that fit at once.
        max_tokens: Rows of a slab, tree rows included.
        dtype: Of keys and values.
        device: Where they lie.
        check: Carry (position, token) with every row, and count rows that are not where a new row
            expects them (``num_faults``). For tests.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        check: bool = False,
    ) -> None:
        size = (shape.layers, num_slots + 1, shape.kv_heads, max_tokens, shape.head_dim)
        self.keys_LBGME = torch.zeros(size, dtype=dtype, device=device)
        self.values_LBGME = torch.zeros(size, dtype=dtype, device=device)
        self.scratch_slot = num_slots
        self.num_faults_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self._labels_BM2: torch.Tensor | None = None
        if check:
            labels = torch.full((num_slots + 1, max_tokens, 2), -1, dtype=torch.int32)
            self._labels_BM2 = labels.to(device)

    @property
    def max_tokens(self) -> int:
        """Rows of a slab."""
        return self.keys_LBGME.shape[3]

    def move(self, moves_N3: torch.Tensor, num_moves_1: torch.Tensor) -> None:
        """Move rows of all layers; see ``row_attention.move_rows``."""
        move_rows(self.keys_LBGME, self.values_LBGME, moves_N3, num_moves_1)
        if self._labels_BM2 is not None:
            labels = self._labels_BM2[None, :, None]  # as one layer of one head
            move_rows(labels, labels.clone(), moves_N3, num_moves_1)

    def label(self, rows: DeviceRows) -> None:
        """Note position and token of the rows that a step is about to write; check what they see.

        A row at position p must see exactly one row at each position 0..p, its own last.
        """
        if self._labels_BM2 is None:
            return
        slots, places = rows.slots_T.long(), rows.kv_rows_T.long()
        new = torch.stack((rows.positions_T, rows.tokens_T), dim=-1)
        self._labels_BM2[slots, places] = new
        expected = torch.arange(self.max_tokens, device=slots.device)
        seen_TM = seen_slab_rows(rows, expected)
        found_TM = self._labels_BM2[slots[:, None], seen_TM, 0]
        is_seen_TM = expected <= rows.positions_T[:, None]
        self.num_faults_1 += ((found_TM != expected) & is_seen_TM).sum()

    def label_prompt(self, tokens_T: torch.Tensor, slot: int) -> None:
        """Note position and token of a prompt's rows."""
        if self._labels_BM2 is not None:
            count = tokens_T.shape[0]
            self._labels_BM2[slot, :count, 0] = torch.arange(count, device=tokens_T.device)
            self._labels_BM2[slot, :count, 1] = tokens_T

    def labels(self, slot: int) -> list[tuple[int, int]]:
        """Position and token of a slab's rows, with ``check``."""
        assert self._labels_BM2 is not None, "made without check"
        return [(pair[0], pair[1]) for pair in self._labels_BM2[slot].tolist()]


def seen_slab_rows(rows: DeviceRows, positions_M: torch.Tensor) -> torch.Tensor:
    """Slab row that each row of a step sees at each position, (T, M) int64; junk beyond its own."""
    behind_TM = positions_M - rows.prefixes_T[:, None]
    longest = rows.path_TP.shape[1] - 1
    steps_TM = rows.path_TP.long().gather(1, behind_TM.clamp(0, longest).long())
    tree_TM = rows.prefixes_T[:, None] + steps_TM
    return torch.where(behind_TM >= 0, tree_TM, positions_M).long()


def seen_rows(rows: DeviceRows) -> SeenRows:
    """What the attention of a step reads."""
    return SeenRows(rows.slots_T, rows.positions_T, rows.prefixes_T, rows.path_TP)


class SlotTable:
    """Which request has which slab; kept by the leader of a rank group."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slots

    def __getitem__(self, request_id: int) -> int:
        return self._slots[request_id]

    def take(self, request_id: int) -> int:
        """Give a request a slab.

        Raises:
            CapacityError: If none is free.
        """
        if not self._free:
            raise CapacityError(f"all {len(self._slots)} slabs are in use")
        slot = self._slots[request_id] = self._free.pop()
        return slot

    def free(self, request_id: int) -> None:
        """Take a request's slab back, if it has one."""
        if request_id in self._slots:
            self._free.append(self._slots.pop(request_id))
