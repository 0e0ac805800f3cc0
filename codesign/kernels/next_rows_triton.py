# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""The Triton kernel of ``next_rows``: one block."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.next_rows import NextRows


def next_rows(sampled_T: Tensor, count_1: Tensor, rows: NextRows) -> None:
    """``next_rows.next_rows`` on a GPU."""
    num_rows = sampled_T.shape[0]
    _next_rows[(1,)](
        sampled_T, count_1, *rows, num_rows, BLOCK=1 << (num_rows - 1).bit_length(), num_warps=1
    )


@triton.jit
def _next_rows(
    sampled, count, tokens, positions, kv_rows, prefixes, num_rows, BLOCK: tl.constexpr
) -> None:
    row = tl.arange(0, BLOCK)
    is_row = (row < num_rows) & (row < tl.load(count))
    tl.store(tokens + row, tl.load(sampled + row, mask=is_row), mask=is_row)
    tl.store(positions + row, tl.load(positions + row, mask=is_row) + 1, mask=is_row)
    tl.store(kv_rows + row, tl.load(kv_rows + row, mask=is_row) + 1, mask=is_row)
    tl.store(prefixes + row, tl.load(prefixes + row, mask=is_row) + 1, mask=is_row)
