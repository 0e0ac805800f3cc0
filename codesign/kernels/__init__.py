"""The ops of a decoder: which implementation runs where.

``reference`` defines what is correct and runs everywhere. A faster form of an op is offered here
under the device it was measured on. Imports torch.

    packed_linear    a layer's maps as callables, of these:
    gemm             few rows over packed weights, in CUDA (tiling)
    many_rows        more rows, with the bits that they have among few, in CUDA
    gemm_all_reduce  a map of few rows and the sum over its group, in one launch
    prompt_linear    the rows of prompts: prompt_linear_triton, unpack_triton, join_parts_triton
    skinny_linear    few rows on a CPU
    all_reduce       the sum over a group; symmetric, peer_memory: memory that ranks share
    fused_attention  attention of tree rows in one launch, in CUDA (attention_shares)
    row_attention    the same in several: row_attention_triton, slab_rows_triton
    prompt_attention attention of a prompt's rows (prompt_attention_triton)
    embedding        the beginning of a forward (embedding_triton)
    keyed_sampling   the target's end of one (keyed_sampling_triton, keyed_noise_triton);
                     row_samplings: how rows sample
    cut_sampling     the same with a top-k or top-p (cut_sampling_triton, top_k_triton)
    head_codes       the same from a head in int8, and a draft's logits (head_codes_triton)
    row_choices      the draft's end of one (row_choices_triton)
    leaf_choices     the next rows of a draft tree (leaf_choices_triton)
    next_rows        the next rows of plain decoding (next_rows_triton)
    step_rows        what these two change
    host_answer      an answer where the host polls for it (host_answer_triton)
    int4, packing    forms of weights
    cuda_module      loads and launches the sources in cuda/; nvrtc compiles them
    triton_launch    launches Triton kernels
    reference        plain PyTorch of all ops; packed_reference: of those over packed weights
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from codesign.kernels.int4 import Int4Weight
from codesign.kernels.reference import (
    PlainInt4Linear,
    PlainLinear,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    rotate,
    swiglu,
    tree_attention,
)
from codesign.kernels.skinny_linear import SkinnyLinear, pad_rows, padded_rows

__all__ = [
    "LinearMap",
    "pack_linear",
    "pad_rows",
    "padded_rows",
    "rms_norm",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
    "swiglu",
    "tree_attention",
]


LinearMap = Callable[[Tensor], Tensor]  # (T, K) -> (T, N)


def pack_linear(
    weight_NK: Tensor | Int4Weight,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> LinearMap:
    """Return a callable (T, K) -> (T, N) that is fast for few rows on the weight's device.

    Args:
        weight_NK: Floating point, or int4.
        bias_N: Added to every row.
        dtype: Of the rows; a CPU has no int4 product, so int4 weights are brought to it there.
    """
    if isinstance(weight_NK, Int4Weight):
        if weight_NK.packed.device.type != "cpu":
            return PlainInt4Linear(weight_NK, bias_N)
        weight_NK = weight_NK.dequantize(dtype)
    if weight_NK.device.type == "cpu":
        return SkinnyLinear(weight_NK, bias_N)
    return PlainLinear(weight_NK, bias_N)
