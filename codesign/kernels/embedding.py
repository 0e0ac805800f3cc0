"""The beginning of a forward: rows of the embedding, and the angles of every position.

Plain PyTorch takes seven launches, each longer than its work; on a GPU it is one.

Letters in shapes: T rows, V tokens, D hidden size, F = half of a head.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embed_rows(
    tokens_T: Tensor, positions_T: Tensor, embedding_VD: Tensor, frequency_F: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens' rows (T, D), and cosine and sine of the positions' angles, (T, F) float32.

    Args:
        tokens_T: int32 or int64.
        positions_T: The same.
        embedding_VD: Contiguous.
        frequency_F: float32, radians a position.
    """
    if embedding_VD.is_cuda:
        from codesign.kernels import embedding_triton

        return embedding_triton.embed_rows(tokens_T, positions_T, embedding_VD, frequency_F)
    angle_TF = positions_T[:, None].to(torch.float32) * frequency_F
    return embedding_VD[tokens_T.long()], angle_TF.cos(), angle_TF.sin()
