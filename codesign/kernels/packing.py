"""Weights in the order in which the tensor cores read them, packed once when a model is loaded.

A *tile* is 16 output rows, a *group* 128 columns; a *record* holds one tile of one group and is
read from memory as one piece. Within a group, lane ``4 g + t`` of a warp (g in 0..7, t in 0..3)
holds rows g and g + 8 and, in word ``4 c + 2 j + h`` (c, j and h in 0..1), the four columns from
``64 c + 32 j + 8 t + 4 h`` on. So four lanes read 64 contiguous bytes of a row of x at a time, and
an output row and the one eight below it end in one thread: ``gate_up_order`` puts a gate and its up
there.

int4 record, 1056 bytes: words (c, g, t, j, h), nibble ``half + 2 pair + 4 odd`` of a word is the
code of row ``g + 8 half``, column ``64 c + 32 j + 8 t + 4 h + 2 pair + odd``: the low halves of its
bytes are codes of row g, the high ones those of row g + 8. Then for each g a word for rows g and,
in its upper half, g + 8: the zero point in four bits, and above it the twelve bits of the scale
that say something (int4.py: no sign, and of the ten bits of a float16's fraction the first seven).

Letters in shapes: N outputs, K inputs, T tiles, S groups, R bytes of a record, P of a tile.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from codesign.errors import InputError
from codesign.kernels.int4 import LARGEST, Int4Weight, unpack_nibbles
from codesign.kernels.tiling import RECORD_BYTES, tile_bytes

TILE, GROUP = 16, 128
_CODE_BYTES = 1024
_SCALE_BITS = 0x7FF8  # of a float16: neither its sign nor the last three
_COLUMNS = (2, 2, 4, 2, 2, 2)  # of a group: c, j, t, h, pair, odd
# Rows that are packed at a time: the intermediate takes about ten bytes a weight.
_PIECE = 4096


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weight of a linear map, (N, K), ready for the kernels.

    Attributes:
        data: (T, P) uint8: S records of R bytes and, up to a line of the caches, zeros.
        num_rows: N; rows of the last tile beyond it are zero.
        num_columns: K.
    """

    data: Tensor
    num_rows: int
    num_columns: int

    def __post_init__(self) -> None:
        size = (self.num_tiles, tile_bytes(self.num_groups))
        assert self.data.shape == size, f"{self.data.shape} is not {size}"

    @property
    def num_tiles(self) -> int:
        """T."""
        return -(-self.num_rows // TILE)

    @property
    def num_groups(self) -> int:
        """S."""
        return self.num_columns // GROUP

    @property
    def records(self) -> Tensor:
        """(T, S, R) of ``data``."""
        whole = self.data[:, : self.num_groups * RECORD_BYTES]
        return whole.unflatten(1, (self.num_groups, RECORD_BYTES))

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return self.data.numel()

    def to(self, device: torch.device | str) -> PackedLinear:
        """Return the weight on a device."""
        return PackedLinear(self.data.to(device), self.num_rows, self.num_columns)


def pack_int4(weight: Int4Weight, *, order: Tensor | None = None) -> PackedLinear:
    """Return a weight with groups of 128 columns in packed form.

    Args:
        weight: As read from a checkpoint.
        order: (N,) int64; row i of the packed weight is row ``order[i]``. None keeps the order.

    Raises:
        InputError: If the groups are of another width.
    """
    if weight.group != GROUP:
        raise InputError(
            f"the int4 kernels need groups of {GROUP} columns, found {weight.group}; "
            f"quantise the model with groups of {GROUP}"
        )
    rows, columns = weight.rows, weight.columns
    if order is None:
        order = torch.arange(rows, device=weight.packed.device)
    pieces = []
    for piece in order.split(_PIECE):
        part = Int4Weight(weight.packed[piece], weight.scales[piece], weight.zeros[piece])
        part = part.pad(-(-part.rows // TILE) * TILE, columns, group=GROUP)
        records = torch.cat((_code_words(part), _scale_words(part)), dim=-1).flatten(1)
        pieces.append(F.pad(records, (0, tile_bytes(part.scales.shape[1]) - records.shape[1])))
    return PackedLinear(torch.cat(pieces), rows, columns)


def gate_up_order(num_channels: int) -> Tensor:
    """Return the order of rows [gates, ups] that puts a gate and its up into one thread.

    Args:
        num_channels: Gates; a multiple of 8.
    """
    if num_channels % 8:
        raise InputError(f"the kernels need a multiple of 8 channels, found {num_channels}")
    gates = torch.arange(num_channels).view(-1, 1, 8)
    return torch.cat((gates, gates + num_channels), dim=1).flatten()


def unpack(weight: PackedLinear, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the (N, K) values, rows in packed order, rounded once to ``dtype``."""
    tiles, groups = weight.num_tiles, weight.num_groups
    codes = weight.records[..., :_CODE_BYTES]
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1)
    split = nibbles.view(tiles, groups, 2, 8, 4, 2, 2, 2, 2, 2)  # T S c g t j h odd pair half
    codes = split.permute(0, 9, 3, 1, 2, 5, 4, 6, 8, 7).to(torch.float32)
    ends = weight.records[..., _CODE_BYTES:].contiguous().view(torch.int16)
    ends = ends.view(tiles, groups, 8, 2).permute(0, 3, 2, 1)  # T half g S
    scale = (ends >> 1 & _SCALE_BITS).view(torch.float16).to(torch.float32)
    zero = (ends & LARGEST).to(torch.float32)
    spread = (..., *[None] * len(_COLUMNS))
    values = ((codes - zero[spread]) * scale[spread]).to(dtype)
    dense = values.reshape(tiles * TILE, groups * GROUP)
    return dense[: weight.num_rows, : weight.num_columns]


def _code_words(weight: Int4Weight) -> Tensor:
    """(T, S, 1024) uint8: the codes of whole tiles."""
    q = unpack_nibbles(weight.packed)
    split = q.view(-1, 2, 8, weight.columns // GROUP, *_COLUMNS)  # T half g S, then columns
    # nibble of a word: half + 2 pair + 4 odd; two nibbles a byte, the lower one first
    words = split.permute(0, 3, 4, 2, 6, 5, 7, 9, 8, 1)  # T S c g t j h odd pair half
    nibbles = words.reshape(split.shape[0], split.shape[3], -1)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _scale_words(weight: Int4Weight) -> Tensor:
    """(T, S, 32) uint8: for each g scale and zero point of rows g and g + 8."""
    bits = weight.scales.contiguous().view(torch.int16)
    assert not bool((bits & ~_SCALE_BITS).any()), "scales of more than twelve bits"
    halves = bits << 1 | weight.zeros.to(torch.int16)
    split = halves.view(-1, 2, 8, halves.shape[-1])  # T half g S
    words = split.permute(0, 3, 2, 1).contiguous()  # T S g half
    return words.view(torch.uint8).reshape(*words.shape[:2], -1)
