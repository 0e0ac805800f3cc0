"""The rows of the next step of plain decoding: those of the last one, one token on.

So a step can follow another on the device, before a host has read which tokens were sampled.

Letters in shapes: T rows.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NextRows(NamedTuple):
    """Columns of a step's message, int32, that its next one changes.

    Attributes:
        tokens_T: The row's token.
        positions_T: Its position.
        kv_rows_T: Slab row that its key and value go to.
        prefixes_T: Slab rows before it.
    """

    tokens_T: Tensor
    positions_T: Tensor
    kv_rows_T: Tensor
    prefixes_T: Tensor


def next_rows(sampled_T: Tensor, count_1: Tensor, rows: NextRows) -> None:
    """Turn a step's rows, one of each request, into those of the step that follows, in place.

    Args:
        sampled_T: int32, the token that was sampled after each row.
        count_1: int32, how many of the rows are no padding; padding stays as it is.
        rows: Of the last step.
    """
    if sampled_T.is_cuda:
        from codesign.kernels import next_rows_triton

        next_rows_triton.next_rows(sampled_T, count_1, rows)
        return
    is_row_T = torch.arange(len(sampled_T)) < count_1
    rows.tokens_T.copy_(torch.where(is_row_T, sampled_T, rows.tokens_T))
    for column_T in (rows.positions_T, rows.kv_rows_T, rows.prefixes_T):
        column_T += is_row_T.int()
