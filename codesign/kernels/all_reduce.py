"""The sum over a tensor-parallel group of the partial results of a row-parallel linear map.

On a GPU one kernel sends, receives, sums and adds the residual: ``cuda/all_reduce.cu``.
Every rank adds the same bfloat16 values in the same order, so that all end with the same bits and
their residual streams cannot drift apart. Imports torch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from codesign.kernels import reference
from codesign.kernels.cuda_module import load_kernel
from codesign.kernels.symmetric import PACKET, Exchange

_THREADS = 64


def all_reduce_add(
    partial_TD: Tensor,
    residual_TD: Tensor | None,
    *,
    exchange: Exchange,
    out_TD: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return ``residual + sum over ranks of partial``, (T, D); the same bits on every rank.

    Args:
        partial_TD: This rank's part, bfloat16, contiguous, D a multiple of 8.
        residual_TD: Added to the sum, the same on every rank; None adds nothing.
        exchange: The group's. What is larger than it was made for takes a slower way.
        out_TD: Where the result goes; may be ``residual_TD``. None: a new tensor.
        pdl: Allow the launch before the kernel in front has ended (CUDA only).
    """
    if out_TD is None:
        out_TD = torch.empty_like(partial_TD)
    if not partial_TD.is_cuda:
        return out_TD.copy_(reference.sum_of_ranks(_gathered(partial_TD, exchange), residual_TD))
    if partial_TD.numel() > exchange.max_elements:
        return _gather_and_add(partial_TD, residual_TD, exchange, out_TD)
    assert partial_TD.dtype == torch.bfloat16, f"{partial_TD.dtype} cannot be exchanged"
    assert partial_TD.numel() % PACKET == 0, f"{partial_TD.numel()} elements are no whole packets"
    tensors = [partial_TD, out_TD, *([residual_TD] if residual_TD is not None else [])]
    assert all(t.is_contiguous() and t.shape == partial_TD.shape for t in tensors), "layout"
    packets = partial_TD.numel() // PACKET
    kernel = load_kernel(
        "all_reduce.cu", "all_reduce_add", {"WORLD": exchange.world, "THREADS": _THREADS}
    )
    kernel.launch(
        (-(-packets // _THREADS),),
        _THREADS,
        [partial_TD, residual_TD, out_TD, exchange.on_device, packets],
        pdl=pdl,
    )
    return out_TD


def _gathered(partial_TD: Tensor, exchange: Exchange) -> list[Tensor]:
    """Return every rank's partial result, in rank order."""
    if exchange.world == 1:
        return [partial_TD]
    assert exchange.group is not None, "ranks of one process exchange through their kernels"
    parts = [torch.empty_like(partial_TD) for _ in range(exchange.world)]
    dist.all_gather(parts, partial_TD.contiguous(), group=exchange.group)
    return parts


def _gather_and_add(
    partial_TD: Tensor, residual_TD: Tensor | None, exchange: Exchange, out_TD: Tensor
) -> Tensor:
    """The same of more rows, such as a prompt's: over NCCL, and one kernel that adds."""
    from codesign.kernels import join_parts_triton

    parts_WTD = partial_TD[None]
    if exchange.world > 1:
        assert exchange.group is not None, "ranks of one process exchange through their kernels"
        parts_WTD = partial_TD.new_empty(exchange.world, *partial_TD.shape)
        dist.all_gather_into_tensor(parts_WTD, partial_TD.contiguous(), group=exchange.group)
    join_parts_triton.join(parts_WTD, out_TD, bias_N=None, residual_MN=residual_TD, swiglu=False)
    return out_TD
