"""Int4 weights in groups of columns: one plain form for every file format and every kernel.

``weight[n, k] = scales[n, k // group] * (q[n, k] - zeros[n, k // group])`` with q and the zero
point in 0..15. A block that must contribute nothing has scale 0: with q equal to the zero point
instead, kernels that subtract the zero after the product would leave rounding noise.

Letters in shapes: N outputs, K inputs, U = K / group groups of a row, W = K / 8 words of a row.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PER_WORD = 8
LARGEST = 15
# Scales are not negative, and the last three bits of their float16 are nought: from 2**-14 on those
# that bfloat16 holds as well, below it multiples of 2**-21. So a kernel may keep twelve bits. Ours
# are normal numbers.
SMALLEST_SCALE = 2.0**-14
LARGEST_SCALE = 65280.0
# Fractions of a group's range that are tried; clipping the largest values often costs less than
# the coarser steps that they would ask for.
_CLIPPED = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A quantised (N, K) matrix.

    Attributes:
        packed: (N, W) int32; bits 4j to 4j + 3 of word i hold q of column 8i + j.
        scales: (N, U) float16, of twelve bits (``round_scales``).
        zeros: (N, U) uint8.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor

    def __post_init__(self) -> None:
        assert self.packed.dtype == torch.int32, f"packed is {self.packed.dtype}"
        assert self.scales.dtype == torch.float16, f"scales are {self.scales.dtype}"
        assert self.zeros.dtype == torch.uint8, f"zeros are {self.zeros.dtype}"
        assert self.scales.shape == self.zeros.shape, "one zero a scale"
        assert self.packed.shape[0] == self.scales.shape[0], "rows differ"
        assert self.columns % max(1, self.scales.shape[1]) == 0, "groups of different widths"

    @property
    def rows(self) -> int:
        """N."""
        return self.packed.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.packed.shape[1] * PER_WORD

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.columns // self.scales.shape[1]

    def to(self, device: torch.device | str) -> Int4Weight:
        """Return the matrix on a device."""
        return Int4Weight(self.packed.to(device), self.scales.to(device), self.zeros.to(device))

    def pad(self, rows: int, columns: int, *, group: int) -> Int4Weight:
        """Return the matrix with zero blocks behind its own up to ``(rows, columns)``.

        ``group`` is the matrix's own; one without columns cannot tell.
        """
        more_rows, more = rows - self.rows, columns - self.columns
        assert more % group == 0, f"{more} more columns are no whole groups of {group}"
        if more_rows == more == 0:
            return self
        groups = (0, more // group, 0, more_rows)
        return Int4Weight(
            F.pad(self.packed, (0, more // PER_WORD, 0, more_rows)),
            F.pad(self.scales, groups),
            F.pad(self.zeros, groups),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the (N, K) values, rounded once to ``dtype``."""
        q_NUg = unpack_nibbles(self.packed).view(self.rows, -1, self.group)
        steps_NUg = q_NUg.to(torch.float32) - self.zeros[..., None].to(torch.float32)
        values_NUg = steps_NUg * self.scales[..., None].to(torch.float32)
        return values_NUg.view(self.rows, self.columns).to(dtype)


def stack_rows(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Return matrices of equal width as one, rows below rows."""
    return Int4Weight(
        torch.cat([weight.packed for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat([weight.zeros for weight in weights]),
    )


def rounded_weight(packed: Tensor, scales: Tensor, zeros: Tensor) -> Int4Weight:
    """Return a matrix of any scales, as files have them, with those that kernels take.

    A negative scale is made positive, exactly: 15 - q less 15 - zero is zero less q.

    Args:
        packed: (N, W) int32.
        scales: (N, U) of any floating type.
        zeros: (N, U) uint8.

    Raises:
        ValueError: See ``round_scales``.
    """
    is_negative = scales < 0
    rounded = round_scales(scales.abs())
    if bool(is_negative.any()):
        words = packed.shape[1] // max(1, scales.shape[1])
        packed = torch.where(is_negative.repeat_interleave(words, 1), ~packed, packed)
        zeros = torch.where(is_negative, LARGEST - zeros, zeros)
    return Int4Weight(packed.contiguous(), rounded, zeros.contiguous())


def round_scales(scales: Tensor) -> Tensor:
    """Return scales, which are not negative, as the nearest float16 of twelve bits.

    That is off by 0.4 % at most, six hundredths of a step of int4 for the largest weights; below
    2**-14, where float16 has fewer bits, by 2**-22 at most.

    Raises:
        ValueError: If one is not finite or beyond 65280.
    """
    wide = scales.to(torch.float32)
    coarse = (wide * 2.0**21).round() * 2.0**-21  # what is below 2**-14 in float16 without 3 bits
    rounded = torch.where(wide < SMALLEST_SCALE, coarse, wide.to(torch.bfloat16).to(torch.float32))
    if not bool((rounded <= LARGEST_SCALE).all()):
        raise ValueError("a scale is not finite or beyond 65280, which int4 weights cannot have")
    return rounded.to(torch.float16).contiguous()


def pack_nibbles(q_NK: Tensor) -> Tensor:
    """Return (N, W) int32 words of (N, K) values 0..15, the lowest column in the lowest bits."""
    words_NW8 = q_NK.to(torch.int64).unflatten(-1, (-1, PER_WORD))
    shifts_8 = torch.arange(0, 32, 4, device=q_NK.device)
    # The sum is below 2**32; taken off 2**32 where the sign bit of an int32 is set.
    unsigned_NW = (words_NW8 << shifts_8).sum(-1)
    return torch.where(unsigned_NW >= 2**31, unsigned_NW - 2**32, unsigned_NW).to(torch.int32)


def unpack_nibbles(packed_NW: Tensor) -> Tensor:
    """Return the (N, K) uint8 values 0..15 of (N, W) int32 words."""
    bytes_NW4 = packed_NW.contiguous().view(torch.uint8)
    pairs = torch.stack((bytes_NW4 & LARGEST, bytes_NW4 >> 4), dim=-1)
    return pairs.flatten(-2)


def quantize_int4(weight_NK: Tensor, *, group: int) -> Int4Weight:
    """Round a matrix to int4, each group with the range that leaves the smallest squared error.

    Args:
        weight_NK: Floating point; K a multiple of ``group``.
        group: Columns that share a scale; that of zeros alone is 0.
    """
    rows, columns = weight_NK.shape
    w_NUg = weight_NK.to(torch.float32).view(rows, -1, group)
    low_NU1 = w_NUg.amin(-1, keepdim=True).clamp(max=0.0)
    high_NU1 = w_NUg.amax(-1, keepdim=True).clamp(min=0.0)
    scale, zero, q = _round_groups(w_NUg, low_NU1, high_NU1)
    least_NU1 = _error(scale, zero, q, w_NUg)
    for part in _CLIPPED:
        found = _round_groups(w_NUg, low_NU1 * part, high_NU1 * part)
        error_NU1 = _error(*found, w_NUg)
        better = error_NU1 < least_NU1
        least_NU1 = torch.where(better, error_NU1, least_NU1)
        scale = torch.where(better, found[0], scale)
        zero = torch.where(better, found[1], zero)
        q = torch.where(better, found[2], q)
    scale = torch.where(high_NU1 > low_NU1, scale, 0.0)
    return Int4Weight(
        pack_nibbles(q.to(torch.uint8).view(rows, columns)),
        scale[..., 0].to(torch.float16),
        zero[..., 0].to(torch.uint8),
    )


def _round_groups(
    w_NUg: Tensor, low_NU1: Tensor, high_NU1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, zero point and q for given ranges, all as float32."""
    scale = ((high_NU1 - low_NU1) / LARGEST).clamp(min=SMALLEST_SCALE)
    scale = scale.to(torch.bfloat16).to(torch.float32)
    zero = torch.round(-low_NU1 / scale).clamp(0, LARGEST)
    return scale, zero, (torch.round(w_NUg / scale) + zero).clamp(0, LARGEST)


def _error(scale: Tensor, zero: Tensor, q: Tensor, w_NUg: Tensor) -> Tensor:
    """Return each group's squared error, (N, U, 1)."""
    return ((q - zero) * scale - w_NUg).square().sum(-1, keepdim=True)
