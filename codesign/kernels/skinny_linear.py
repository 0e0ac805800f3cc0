"""Linear maps for few rows on a CPU, where the time is that of reading the weights.

The BLAS that PyTorch ships runs ``F.linear`` at a third of the memory bandwidth for one to eight
float32 rows. The same product written from the other side, weight (N, K) times rows (K, T), runs
close to the bandwidth, on three conditions that this module sees to: at least two rows (one row
takes a slow matrix-vector path), a row count from a short list (odd ones fall back to remainder
loops), and a block of rows that fits the first-level cache (wide inputs are cut into pieces of K).

Reference: ``reference.linear``. Imports torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# 8 rows of 576 float32 are 18 KiB, of 768 already 24: with the lines of the weights too much for
# a first-level cache of 32 KiB.
MAX_PIECE = 576


def padded_rows(num_rows: int) -> int:
    """Return the row count, at least ``num_rows``, that runs fastest on a CPU."""
    if num_rows > 8:
        return -(-num_rows // 16) * 16
    return {1: 2, 3: 4, 7: 8}.get(num_rows, num_rows)


class SkinnyLinear:
    """A linear map as a callable (T, K) -> (T, N), its weight stored in pieces of K.

    Any T gives the right result; those that ``padded_rows`` returns are fast. The result is
    a transposed view: its columns are contiguous, not its rows.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        num_pieces = -(-weight_NK.shape[1] // MAX_PIECE)
        self._pieces = tuple(piece.contiguous() for piece in weight_NK.chunk(num_pieces, dim=1))
        self._bias_N1 = None if bias_N is None else bias_N[:, None]

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``, (T, N)."""
        x_TK = x_TK.contiguous()  # rows laid out in columns would take the slow path again
        first, *rest = self._pieces
        end = first.shape[1]
        out_NT = torch.mm(first, x_TK[:, :end].t())
        for piece in rest:
            start, end = end, end + piece.shape[1]
            out_NT.addmm_(piece, x_TK[:, start:end].t())
        if self._bias_N1 is not None:
            out_NT += self._bias_N1
        return out_NT.t()


def pad_rows(x_T: Tensor, num_rows: int) -> Tensor:
    """Return ``x`` with its last row repeated up to ``num_rows`` rows."""
    missing = num_rows - x_T.shape[0]
    if missing == 0:
        return x_T
    if x_T.dim() == 1:
        return F.pad(x_T, (0, missing), value=int(x_T[-1]))
    return torch.cat((x_T, x_T[-1:].expand(missing, *x_T.shape[1:])))
