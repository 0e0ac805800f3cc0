"""A row's likeliest tokens and the logarithm of its sum of exponentials, in two small kernels.

What a draft needs of its logits. PyTorch's top-k of a whole vocabulary reads them several times,
its log-sum-exp as well.

Letters in shapes: T rows, V tokens, K choices.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_CHOICES = 32  # each costs the kernels a pass over registers


def row_choices(logits_TV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's largest logits, their columns and the row's log-sum-exp.

    Args:
        logits_TV: float32, rows contiguous; -inf where a column stands for no token.
        count: K, at most V. Of equal logits the kernels take the lower column first.

    Returns:
        Values (T, K) in descending order, columns (T, K) int64, log-sum-exp (T,).
    """
    if logits_TV.is_cuda and count <= MOST_CHOICES:
        from codesign.kernels import row_choices_triton

        return row_choices_triton.row_choices(logits_TV, count)
    values_TK, columns_TK = logits_TV.topk(count, dim=-1)
    return values_TK, columns_TK, torch.logsumexp(logits_TV, dim=-1)
