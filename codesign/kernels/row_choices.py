"""A row's likeliest tokens and the logarithm of its sum of exponentials, in two small kernels.

What a draft needs of its logits. PyTorch's top-k of a whole vocabulary reads them several times,
its log-sum-exp as well.

Letters in shapes: T rows, V tokens, K choices, B parts of a row.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_CHOICES = 32  # each costs the kernels a pass over registers


@dataclass(frozen=True, slots=True)
class Lists:
    """The best of parts of every row, B parts: values and columns in descending order.

    Attributes:
        values_TBK: float32; -inf where a part has fewer.
        columns_TBK: int32.
        sums_TB2: Largest value of a part, and the sum of exponentials below it.
    """

    values_TBK: Tensor
    columns_TBK: Tensor
    sums_TB2: Tensor

    @classmethod
    def empty(cls, rows: int, parts: int, count: int, device: torch.device) -> Lists:
        """Room for ``count`` choices of each part, rounded up to a power of two."""
        kept = 1 << (count - 1).bit_length()
        values = torch.empty(rows, parts, kept, dtype=torch.float32, device=device)
        sums = torch.empty(rows, parts, 2, dtype=torch.float32, device=device)
        return cls(values, torch.empty_like(values, dtype=torch.int32), sums)


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


def choice_words(
    logits_TV: Tensor, count: int, *, token_map: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Return a draft's answer, (2 T K,) int32: tokens, then the bits of their log probabilities.

    Args:
        logits_TV: As in ``row_choices``.
        count: K.
        token_map: (V,) int64, token that a column stands for; None if it is the column.
        into: Where the answer goes; None for a new tensor.
    """
    if logits_TV.is_cuda and count <= MOST_CHOICES:
        from codesign.kernels import row_choices_triton

        return row_choices_triton.choice_words(logits_TV, count, token_map, into)
    values_TK, columns_TK, total_T = row_choices(logits_TV, count)
    return words_of(values_TK, columns_TK, total_T, token_map, into=into)


def words_of(
    values_TK: Tensor,
    columns_TK: Tensor,
    total_T: Tensor,
    token_map: Tensor | None = None,
    *,
    into: Tensor | None = None,
) -> Tensor:
    """Return ``row_choices``' result as ``choice_words`` gives it."""
    tokens_TK = columns_TK if token_map is None else token_map[columns_TK]
    bits_TK = (values_TK - total_T[:, None]).contiguous().view(torch.int32)
    return torch.cat((tokens_TK.to(torch.int32).flatten(), bits_TK.flatten()), out=into)
