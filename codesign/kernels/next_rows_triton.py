# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""The Triton kernel of ``next_rows``: one block."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.step_rows import StepRows


def next_rows(sampled_T: Tensor, going_ST: Tensor, turn_1: Tensor, rows: StepRows) -> None:
    """``next_rows.next_rows`` on a GPU."""
    num_rows = sampled_T.shape[0]
    _next_rows[(1,)](
        sampled_T,
        going_ST,
        turn_1,
        rows.tokens_T,
        rows.positions_T,
        rows.slots_T,
        rows.kv_rows_T,
        rows.prefixes_T,
        rows.path_TQ,
        rows.path_TQ.shape[1],
        rows.scratch_slot,
        num_rows,
        BLOCK=1 << (num_rows - 1).bit_length(),
        num_warps=1,
    )


@triton.jit
def _next_rows(
    sampled,
    going,
    turn,
    tokens,
    positions,
    slots,
    kv_rows,
    prefixes,
    path,
    longest,
    scratch_slot,
    num_rows,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.arange(0, BLOCK)
    is_row = row < num_rows
    # From the host's memory, which it writes between two steps: nothing cached will do.
    going += tl.load(turn) * num_rows
    goes = tl.load(going + row, mask=is_row, other=0, volatile=True) > 0
    token = tl.load(sampled + row, mask=is_row)
    position = tl.load(positions + row, mask=is_row) + 1
    slot = tl.load(slots + row, mask=is_row)
    kv_row = tl.load(kv_rows + row, mask=is_row) + 1
    prefix = tl.load(prefixes + row, mask=is_row) + 1
    first = tl.load(path + row * longest, mask=is_row)
    tl.store(tokens + row, tl.where(goes, token, 0), mask=is_row)
    tl.store(positions + row, tl.where(goes, position, 0), mask=is_row)
    tl.store(slots + row, tl.where(goes, slot, scratch_slot), mask=is_row)
    tl.store(kv_rows + row, tl.where(goes, kv_row, row), mask=is_row)
    tl.store(prefixes + row, tl.where(goes, prefix, 0), mask=is_row)
    tl.store(path + row * longest, tl.where(goes, first, row), mask=is_row)
