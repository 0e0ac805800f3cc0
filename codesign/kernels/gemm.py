"""Linear maps for few rows over packed weights: bias, residual, SwiGLU and RMSNorm fused.

A decoder layer at batch sizes of speculative decoding is bound by the reading of weights; the
kernel in cuda/gemm_core.cuh streams them at the memory's pace. ``packed_reference`` defines what
is correct. More rows than the kernel takes are run piece by piece, and those of prompts by
``many_rows``, which rounds weights to bfloat16.

Letters in shapes: M rows, K inputs, N outputs, I channels of a SwiGLU.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from codesign.kernels import many_rows
from codesign.kernels.cuda_module import CudaKernel, load_kernel
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import RECORD_BYTES, PackedLinear
from codesign.kernels.tiling import MAX_ROWS, Layout, Tiling, choose, layout, row_tiles


def linear(
    x_MK: Tensor,
    weight: PackedLinear,
    *,
    norm: Norm | None = None,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
    pdl: bool = True,
    prompt: bool = False,
) -> Tensor:
    """Return ``norm(x) @ weight.T + bias + residual``, (M, N) bfloat16.

    Args:
        x_MK: Contiguous bfloat16.
        weight: Packed.
        norm: RMSNorm of x, applied on the way; None for none.
        bias_N: bfloat16.
        residual_MN: bfloat16; may be ``out`` itself.
        out: Where to write, contiguous; None allocates.
        tiling: How to cut the work; None chooses.
        pdl: Let the kernel load weights while the one in front of it still runs.
        prompt: A row need not have the bits that it has in decoding.
    """
    if out is None:
        out = x_MK.new_empty(x_MK.shape[0], weight.num_rows)
    if many_rows.takes(x_MK.shape[0], prompt=prompt):
        return many_rows.run(x_MK, many_rows.Map(weight, norm, bias_N, residual_MN), out)
    _run(_Call(x_MK, weight, norm, out, bias_N, residual_MN, 0), tiling, pdl=pdl)
    return out


def gate_up(
    x_MK: Tensor,
    weight: PackedLinear,
    *,
    norm: Norm | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
    pdl: bool = True,
    prompt: bool = False,
) -> Tensor:
    """Return ``silu(gate) * up`` of ``norm(x)``, (M, I) bfloat16.

    Args:
        x_MK: Contiguous bfloat16.
        weight: Gates and ups, packed in ``gate_up_order``.
        norm: As in ``linear``, and so the rest.
    """
    channels = weight.num_rows // 2
    if out is None:
        out = x_MK.new_empty(x_MK.shape[0], channels)
    if many_rows.takes(x_MK.shape[0], prompt=prompt):
        return many_rows.run(x_MK, many_rows.Map(weight, norm, swiglu=True), out)
    _run(_Call(x_MK, weight, norm, out, None, None, 1), tiling, pdl=pdl)
    return out


@dataclass(frozen=True, slots=True)
class _Call:
    x_MK: Tensor
    weight: PackedLinear
    norm: Norm | None
    out: Tensor
    bias_N: Tensor | None
    residual_MN: Tensor | None
    activation: int


def _run(call: _Call, tiling: Tiling | None, *, pdl: bool) -> None:
    x, weight, out = call.x_MK, call.weight, call.out
    assert x.dtype == out.dtype == torch.bfloat16, f"rows are {x.dtype}, out is {out.dtype}"
    assert x.is_contiguous(), "rows are not contiguous"
    assert out.is_contiguous(), "out is not contiguous"
    assert x.shape[1] == weight.num_columns, f"{x.shape[1]} columns for {weight.num_columns}"
    assert out.shape[1] % 2 == 0, f"{out.shape[1]} outputs: the kernel writes pairs"
    most = MAX_ROWS
    while most > 8 and _layout(weight, most, tiling, x.device)[1].stages < 2:
        most //= 2  # the sums of fewer rows leave room for a ring
    for start in range(0, x.shape[0], most):
        rows = slice(start, min(start + most, x.shape[0]))
        _launch(call, rows, tiling, pdl=pdl)


def _layout(
    weight: PackedLinear, num_rows: int, tiling: Tiling | None, device: torch.device
) -> tuple[Tiling, Layout]:
    """The given tiling or the chosen one, and its shared memory."""
    tiles, groups = weight.data.shape[:2]
    count, sms = row_tiles(num_rows), num_sms(device.index or 0)
    tiling = tiling or _choose(tiles, groups, weight.bits, count, sms)
    return tiling, layout(
        tiling,
        tiles=tiles,
        groups=groups,
        record_bytes=RECORD_BYTES[weight.bits],
        num_row_tiles=count,
        num_sms=sms,
    )


def _launch(call: _Call, rows: slice, tiling: Tiling | None, *, pdl: bool) -> None:
    """One launch over at most ``MAX_ROWS`` rows."""
    x, out, weight, norm = call.x_MK[rows], call.out[rows], call.weight, call.norm
    residual = None if call.residual_MN is None else call.residual_MN[rows]
    tiles, groups = weight.data.shape[:2]
    count = row_tiles(x.shape[0])
    tiling, plan = _layout(weight, x.shape[0], tiling, x.device)
    assert plan.stages >= 2, f"{tiling} leaves no room for a ring"
    args = [weight.data, x, None if norm is None else norm.weight_K, out, call.bias_N, residual]
    args += [
        x.shape[0],
        x.shape[1],
        out.shape[1],
        groups,
        plan.stages,
        plan.part_tiles,
        *divmod(tiles, plan.clusters),
    ]
    args += [0.0 if norm is None else norm.eps]
    _kernel(weight.bits, count, tiling, call.activation).launch(
        (plan.clusters * tiling.cluster,),
        tiling.threads(count),
        args,
        shared_bytes=plan.shared_bytes,
        cluster=tiling.cluster,
        pdl=pdl,
    )


@cache
def _choose(tiles: int, groups: int, bits: int, count: int, sms: int) -> Tiling:
    return choose(tiles=tiles, groups=groups, bits=bits, num_row_tiles=count, num_sms=sms)


@cache
def num_sms(device: int) -> int:
    """Return a device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(bits: int, count: int, tiling: Tiling, activation: int) -> CudaKernel:
    defines = {
        "BITS": bits,
        "NT": count,
        "WARPS": tiling.warps,
        "TILES": tiling.tiles,
        "BLOCKS": tiling.blocks,
        "ACTIVATION": activation,
        "DELAYS": int(tiling.delays),
    }
    return load_kernel("gemm.cu", "gemm", defines)
