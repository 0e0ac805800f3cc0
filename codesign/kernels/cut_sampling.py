"""What top-k and top-p leave of rows: ``walk.shape_logits`` for many rows, each with its own cuts.

The order of a row's tokens is by score without noise, the largest first and the lower token first
of equals. Top-k keeps tokens as large as the k-th; top-p drops those behind a share of what top-k
kept. This sorts; the kernels do not (cut_sampling_triton.py).

Letters in shapes: T rows, V tokens.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codesign.kernels.row_samplings import RowSamplings

MOST_TOKENS = 1 << 18  # that the kernels take: their masses add up to 62 bits


def is_dropped(scaled_TV: Tensor, samplings: RowSamplings) -> Tensor:
    """Tokens outside top-k and top-p, (T, V) bool.

    Args:
        scaled_TV: Logits divided by the temperature, float64, of all tokens.
        samplings: Of the rows.
    """
    vocab = scaled_TV.shape[1]
    top_k_T1, top_p_T1 = samplings.top_k_T[:, None], samplings.top_p_T[:, None]
    ordered_TV, order_TV = scaled_TV.sort(dim=-1, descending=True, stable=True)
    last_T1 = torch.where(top_k_T1 > 0, top_k_T1, vocab).clamp(max=vocab).long() - 1
    ordered_TV = ordered_TV.masked_fill(ordered_TV < ordered_TV.gather(1, last_T1), -torch.inf)
    probs_TV = torch.exp(ordered_TV - ordered_TV[:, :1])
    before_TV = probs_TV.cumsum(-1) - probs_TV
    is_beyond_TV = before_TV >= top_p_T1 * probs_TV.sum(-1, keepdim=True)
    is_dropped_TV = (is_beyond_TV & (top_p_T1 < 1.0)) | ordered_TV.isneginf()
    return torch.zeros_like(is_dropped_TV).scatter(1, order_TV, is_dropped_TV)
