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
_SHARED_ELEMENTS = 4 << 20  # from which fewer bytes outweigh a second collective


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
        return _add_many(partial_TD, residual_TD, exchange, out_TD)
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


def _add_many(
    partial_TD: Tensor, residual_TD: Tensor | None, exchange: Exchange, out_TD: Tensor
) -> Tensor:
    """``all_reduce_add`` of more rows, such as a prompt's: over NCCL, and one kernel that adds."""
    group = exchange.group
    if exchange.world == 1:
        return _add_parts(partial_TD[None], residual_TD, out_TD)
    assert group is not None, "ranks of one process exchange through their kernels"
    is_large = exchange.world > 2 and partial_TD.numel() >= _SHARED_ELEMENTS
    if is_large and dist.get_backend(group) != dist.Backend.GLOO:  # which shares out no GPU's rows
        return add_by_rows(partial_TD, residual_TD, group, out_TD)
    return add_gathered(partial_TD, residual_TD, group, out_TD)


def add_gathered(
    partial_TD: Tensor, residual_TD: Tensor | None, group: dist.ProcessGroup, out_TD: Tensor
) -> Tensor:
    """``all_reduce_add`` in which every rank gathers all parts and adds them.

    Args:
        partial_TD: As in ``all_reduce_add``, and so the residual and the result.
        residual_TD: May be ``out_TD``.
        group: The ranks.
        out_TD: Contiguous.
    """
    parts_WTD = partial_TD.new_empty(group.size(), *partial_TD.shape)
    dist.all_gather_into_tensor(parts_WTD.flatten(0, 1), partial_TD.contiguous(), group=group)
    return _add_parts(parts_WTD, residual_TD, out_TD)


def add_by_rows(
    partial_TD: Tensor, residual_TD: Tensor | None, group: dist.ProcessGroup, out_TD: Tensor
) -> Tensor:
    """``add_gathered`` in which each rank adds some of the rows for all; the same bits.

    A rank of W receives 2 (W - 1) / W times the rows, not W - 1 times.
    """
    world, rank, rows = group.size(), group.rank(), partial_TD.shape[0]
    share = -(-rows // world)
    counts = [min(share, max(rows - share * each, 0)) for each in range(world)]
    first, count = share * rank, counts[rank]
    parts_WnD = partial_TD.new_empty(world, count, partial_TD.shape[1])
    dist.all_to_all_single(
        parts_WnD.flatten(0, 1), partial_TD.contiguous(), [count] * world, counts, group=group
    )
    is_even = rows == share * world
    all_ND = out_TD if is_even else out_TD.new_empty(share * world, out_TD.shape[1])
    if count:
        own_nD = None if residual_TD is None else residual_TD[first : first + count]
        _add_parts(parts_WnD, own_nD, all_ND[first : first + count])
    dist.all_gather_into_tensor(all_ND, all_ND[first : first + share], group=group)
    return out_TD if is_even else out_TD.copy_(all_ND[:rows])


def _add_parts(parts_WTD: Tensor, residual_TD: Tensor | None, out_TD: Tensor) -> Tensor:
    """The sum of parts in their order, and the residual; which may be the result's memory."""
    if not parts_WTD.is_cuda:
        return out_TD.copy_(reference.sum_of_ranks(parts_WTD.unbind(), residual_TD))
    from codesign.kernels import join_parts_triton

    join_parts_triton.join(parts_WTD, out_TD, bias_N=None, residual_MN=residual_TD, swiglu=False)
    return out_TD
