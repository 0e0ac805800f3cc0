"""The rows of the next step of plain decoding: those of the last one, one token on.

So a step can follow another on the device, before a host has read which tokens were sampled. The
host says which rows go on, in its own memory; the others become padding.

Letters in shapes: T rows, S slots of the host's memory.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codesign.kernels.step_rows import StepRows


def next_rows(sampled_T: Tensor, going_ST: Tensor, turn_1: Tensor, rows: StepRows) -> None:
    """Turn a step's rows, one of each request, into those of the step that follows, in place.

    Args:
        sampled_T: int32, the token that was sampled after each row.
        going_ST: int32, 1 of each row that goes on and 0 of the others, where the host writes it;
            pinned if the rows are on a GPU. What attends the rows may want padding to come last.
        turn_1: int32, which of these counts now.
        rows: Of the last step.
    """
    if sampled_T.is_cuda:
        from codesign.kernels import next_rows_triton

        next_rows_triton.next_rows(sampled_T, going_ST, turn_1, rows)
        return
    goes_T, row_T = going_ST[int(turn_1)] > 0, torch.arange(len(sampled_T))
    ahead_T = goes_T.int()
    padding = (
        (rows.tokens_T, sampled_T, 0),
        (rows.positions_T, rows.positions_T + ahead_T, 0),
        (rows.slots_T, rows.slots_T, rows.scratch_slot),
        (rows.kv_rows_T, rows.kv_rows_T + ahead_T, row_T),
        (rows.prefixes_T, rows.prefixes_T + ahead_T, 0),
        (rows.path_TQ[:, 0], rows.path_TQ[:, 0], row_T),
    )
    for column_T, going_T, other in padding:
        column_T.copy_(torch.where(goes_T, going_T, other))
