# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""The Triton kernel of ``embedding``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns of a program


def embed_rows(
    tokens_T: Tensor, positions_T: Tensor, embedding_VD: Tensor, frequency_F: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``embedding.embed_rows`` on a GPU."""
    rows, hidden, half = tokens_T.shape[0], embedding_VD.shape[1], frequency_F.shape[0]
    x_TD = embedding_VD.new_empty(rows, hidden)
    cos_TF = torch.empty(rows, half, dtype=torch.float32, device=embedding_VD.device)
    sin_TF = torch.empty_like(cos_TF)
    _embed_rows[(rows, -(-hidden // BLOCK))](
        tokens_T,
        positions_T,
        embedding_VD,
        frequency_F,
        x_TD,
        cos_TF,
        sin_TF,
        hidden,
        half,
        BLOCK=BLOCK,
        PADDED=1 << (half - 1).bit_length(),
        num_warps=4,
    )
    return x_TD, cos_TF, sin_TF


@triton.jit
def _embed_rows(
    tokens,
    positions,
    embedding,
    frequencies,
    out,
    cos,
    sin,
    hidden,
    half,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """A block of columns of one row; the first block, the row's angles, too."""
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    token = tl.load(tokens + row).to(tl.int64)
    values = tl.load(embedding + token * hidden + columns, mask=inside)
    tl.store(out + row.to(tl.int64) * hidden + columns, values, mask=inside)
    if block == 0:
        at = tl.arange(0, PADDED)
        is_angle = at < half
        frequency = tl.load(frequencies + at, mask=is_angle, other=0.0)
        angle = tl.load(positions + row).to(tl.float32) * frequency
        tl.store(cos + row * half + at, tl.cos(angle), mask=is_angle)
        tl.store(sin + row * half + at, tl.sin(angle), mask=is_angle)
