"""A row-parallel linear map and the sum over its tensor-parallel group, in one launch.

The GEMM is ``gemm.linear``'s, tile by tile the same bits; its epilogue is ``all_reduce_add``, so
the result is theirs, one after the other. Imports torch.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from codesign.kernels.all_reduce import all_reduce_add
from codesign.kernels.cuda_module import CudaKernel, load_kernel
from codesign.kernels.gemm import Plan, chosen_layout, linear, most_rows, num_sms
from codesign.kernels.packing import TILE, PackedLinear
from codesign.kernels.prompt_linear import takes
from codesign.kernels.symmetric import DeviceExchange, Exchange
from codesign.kernels.tiling import Layout, Tiling, row_tiles


class _Epilogue(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("features", ctypes.c_int32),
        ("exchange", DeviceExchange),
    )


def linear_all_reduce(
    x_MK: Tensor,
    weight: PackedLinear,
    residual_MN: Tensor | None,
    *,
    exchange: Exchange,
    out_MN: Tensor | None = None,
    prompt: bool = False,
) -> Tensor:
    """Return ``residual + sum over ranks of x @ weight.T``, (M, N) bfloat16, the same everywhere.

    Args:
        x_MK: This rank's columns, contiguous bfloat16.
        weight: This rank's columns of the map, packed.
        residual_MN: Added to the sum, the same on every rank; None adds nothing.
        exchange: The group's, made for M (rounded up to 8, 16 or 32) times N elements.
        out_MN: Where the result goes; may be ``residual_MN``. None: a new tensor.
        prompt: As for ``linear``.
    """
    rows, features = x_MK.shape[0], weight.num_rows
    count, tiles, groups = row_tiles(rows), weight.num_tiles, weight.num_groups
    fits = x_MK.is_cuda and not takes(rows, prompt=prompt)
    fits = fits and 8 * count * tiles * TILE <= exchange.max_elements
    plan = None
    if fits:
        sms = num_sms(x_MK.device.index or 0)
        if rows <= most_rows(tiles, groups, None, sms):
            plan = _plan(tiles, groups, count, sms, exchange.world)
    if plan is None:  # or its sums leave no room for a ring
        partial_MN = linear(x_MK, weight, prompt=prompt)
        return all_reduce_add(partial_MN, residual_MN, exchange=exchange, out_TD=out_MN, pdl=True)
    if out_MN is None:
        out_MN = x_MK.new_empty(rows, features)
    assert x_MK.dtype == out_MN.dtype == torch.bfloat16, f"rows are {x_MK.dtype}"
    assert x_MK.is_contiguous(), "rows are not contiguous"
    assert out_MN.is_contiguous(), "out is not contiguous"
    residual = None if residual_MN is None else residual_MN.data_ptr()
    assert exchange.on_device is not None, "the exchange is not on a GPU"
    epilogue = _Epilogue(out_MN.data_ptr(), residual, rows, features, exchange.on_device)
    plan.kernel.launch(
        plan.grid,
        plan.threads,
        [weight.data, x_MK, epilogue, x_MK.shape[1], groups, *plan.sizes],
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
        pdl=True,
    )
    return out_MN


@cache
def _plan(tiles: int, groups: int, count: int, sms: int, world: int) -> Plan | None:
    """The launch with the chosen tiling; None where there is no room for it."""
    tiling, plan = chosen_layout(tiles, groups, count, None, sms, keep=True)
    if plan.stages < 2:
        return None
    kernel = _kernel(count, tiling, world, plan)
    return Plan.of(kernel, tiling, plan, tiles=tiles, count=count)


def _kernel(count: int, tiling: Tiling, world: int, plan: Layout) -> CudaKernel:
    defines = tiling.macros(count, plan) | {"WORLD": world, "DELAYS": int(tiling.delays)}
    return load_kernel("gemm_all_reduce.cu", "gemm_all_reduce", defines)
