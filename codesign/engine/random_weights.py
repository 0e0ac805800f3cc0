"""Random weights as a pure function of seed, tensor name and place.

A rank makes only its own part, and gets the values that any other split, or a CPU, would get:
every value comes from an integer hash of its place in the whole tensor. Imports torch.

Letters in shapes: n rows, W words and U groups of a part.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from codesign.kernels.int4 import PER_WORD, Int4Weight
from codesign.models.sharding import Cut

# Standard deviation of q - zero: q uniform in 0..15, zero uniform in 6..9.
_SPREAD = 4.74
# Places hashed at once: on a GPU half a gigabyte of int64, on a CPU what its caches hold (8 times
# as fast as half a gigabyte).
_CHUNK, _CPU_CHUNK = 1 << 26, 1 << 17


class RandomWeights:
    """Random weights of one model.

    Args:
        seed: Of all of them.
        device: Where they are made; the values do not depend on it.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        self.device = torch.device(device)
        self._chunk = _CPU_CHUNK if self.device.type == "cpu" else _CHUNK

    def int4(
        self, name: str, rows: Cut, columns: Cut, *, whole_columns: int, group: int, gain: float
    ) -> Int4Weight:
        """Return part of an int4 matrix that multiplies the scale of its input by ``gain``.

        Args:
            name: Of the tensor; the same name gives the same matrix.
            rows: Part of the outputs.
            columns: Part of the inputs, whole groups.
            whole_columns: Inputs of the whole matrix.
            group: Inputs that share a scale.
            gain: Scale of the outputs over that of the inputs.
        """
        words = Cut(columns.start // PER_WORD, columns.stop // PER_WORD, 0)
        groups = Cut(columns.start // group, columns.stop // group, 0)
        width, num_groups = whole_columns // PER_WORD, whole_columns // group
        packed = torch.empty(rows.num_real, words.num_real, dtype=torch.int32, device=self.device)
        step = max(1, self._chunk // max(1, words.num_real))
        for start in range(0, rows.num_real, step):
            part = Cut(rows.start + start, min(rows.start + start + step, rows.stop), 0)
            bits = self._bits(f"{name}/q", part, words, width)
            packed[start : start + part.num_real] = bits - 2**31
        scale = gain / (_SPREAD * whole_columns**0.5)
        unit = self._unit(f"{name}/scale", rows, groups, num_groups)
        return Int4Weight(
            packed,
            # through bfloat16, so that a kernel may keep scales in either type
            (scale * (0.75 + 0.5 * unit)).to(torch.bfloat16).to(torch.float16),
            (6 + (self._bits(f"{name}/zero", rows, groups, num_groups) & 3)).to(torch.uint8),
        )

    def matrix(self, name: str, rows: Cut, columns: Cut, *, whole_columns: int) -> Tensor:
        """Return part of a bfloat16 matrix that keeps the scale of its input.

        Args:
            name: Of the tensor; the same name gives the same matrix.
            rows: Part of the outputs.
            columns: Part of the inputs.
            whole_columns: Inputs of the whole matrix.
        """
        size = rows.num_real, columns.num_real
        out = torch.empty(size, dtype=torch.bfloat16, device=self.device)
        step = max(1, self._chunk // max(1, columns.num_real))
        for start in range(0, rows.num_real, step):
            part = Cut(rows.start + start, min(rows.start + start + step, rows.stop), 0)
            unit = self._unit(name, part, columns, whole_columns)
            out[start : start + part.num_real] = (unit - 0.5) * (12 / whole_columns) ** 0.5
        return out

    def vector(self, name: str, entries: Cut, *, low: float, high: float) -> Tensor:
        """Return part of a float32 vector of values in [low, high), exact in bfloat16."""
        unit = self._unit(name, Cut(0, 1, 1), entries, entries.stop)[0]
        return (low + (high - low) * unit).to(torch.bfloat16).to(torch.float32)

    def _unit(self, name: str, rows: Cut, columns: Cut, width: int) -> Tensor:
        """Return float32 values in [0, 1); 24 bits, so that no rounding is involved."""
        return (self._bits(name, rows, columns, width) >> 8).to(torch.float32) * 2.0**-24

    def _bits(self, name: str, rows: Cut, columns: Cut, width: int) -> Tensor:
        """Return (rows, columns) int64 values in [0, 2**32), one for each place."""
        down = torch.arange(rows.start, rows.stop, device=self.device)[:, None]
        across = torch.arange(columns.start, columns.stop, device=self.device)
        key = zlib.crc32(f"{self._seed}/{name}".encode())
        return _mixed(_mixed(down * width + across) ^ key)


def _mixed(x: Tensor) -> Tensor:
    """Return a one-to-one scramble of 32-bit values held in int64.

    Multiply and fold, twice. Both factors are below 2**31: no product leaves int64.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x46CA68B5)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
