"""Linear maps for few rows over packed weights: bias, residual, SwiGLU and RMSNorm fused.

A decoder layer at batch sizes of speculative decoding is bound by the reading of weights; the
kernel in cuda/gemm_core.cuh streams them at the memory's pace. ``packed_reference`` defines what
is correct. More rows than a launch takes are run by ``many_rows``, and those of prompts by
``prompt_linear``, which rounds weights to bfloat16.

Letters in shapes: M rows, K inputs, N outputs, I channels of a SwiGLU.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from codesign.kernels import many_rows, prompt_linear
from codesign.kernels.cuda_module import CudaKernel, load_kernel
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import PackedLinear
from codesign.kernels.tiling import MAX_ROWS, Layout, Tiling, choose, layout, row_tiles

# Threads of a block of more warps have too few registers for more rows: 340 to 564 bytes each go to
# local memory at 14 to 16 warps. (72B: 40.0 ms for 32 rows, twice 16.4 for 16.)
_SPILLING_ROWS, _ROOMY_WARPS = 16, 8


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
    if prompt_linear.takes(x_MK.shape[0], prompt=prompt):
        return prompt_linear.run(x_MK, prompt_linear.Map(weight, norm, bias_N, residual_MN), out)
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
    if prompt_linear.takes(x_MK.shape[0], prompt=prompt):
        return prompt_linear.run(x_MK, prompt_linear.Map(weight, norm, swiglu=True), out)
    _run(_Call(x_MK, weight, norm, out, None, None, 1), tiling, pdl=pdl)
    return out


def logits(x_MK: Tensor, weight: PackedLinear, *, tiling: Tiling | None = None) -> Tensor:
    """Return ``x @ weight.T``, (M, N) float32; arguments as in ``linear``."""
    out = torch.empty(x_MK.shape[0], weight.num_rows, dtype=torch.float32, device=x_MK.device)
    _run(_Call(x_MK, weight, None, out, None, None, 2), tiling, pdl=True)
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
    wanted = torch.float32 if call.activation == 2 else torch.bfloat16
    assert x.dtype == torch.bfloat16, f"rows are {x.dtype}"
    assert out.dtype == wanted, f"out is {out.dtype}"
    assert x.is_contiguous(), "rows are not contiguous"
    assert out.is_contiguous(), "out is not contiguous"
    assert x.shape[1] == weight.num_columns, f"{x.shape[1]} columns for {weight.num_columns}"
    assert out.shape[1] % 2 == 0, f"{out.shape[1]} outputs: the kernel writes pairs"
    tiles, groups = weight.num_tiles, weight.num_groups
    sms = num_sms(x.device.index or 0)
    if x.shape[0] <= most_rows(tiles, groups, tiling, sms):
        _launch(call, tiling, pdl=pdl)
        return
    many_rows.run(
        x,
        weight,
        out,
        norm=call.norm,
        bias_N=call.bias_N,
        residual_MN=call.residual_MN,
        activation=call.activation,
        tiling=tiling or choose(tiles=tiles, groups=groups, num_sms=sms),
        sms=sms,
        pdl=pdl,
    )


def _launch(call: _Call, tiling: Tiling | None, *, pdl: bool) -> None:
    """One launch over at most ``MAX_ROWS`` rows."""
    x, weight, norm = call.x_MK, call.weight, call.norm
    rows, columns = x.shape
    tiles, groups = weight.num_tiles, weight.num_groups
    count, sms = row_tiles(rows), num_sms(x.device.index or 0)
    plan = _plan(tiles, groups, count, tiling, sms, call.activation)
    norm_K, eps = (None, 0.0) if norm is None else (norm.weight_K, norm.eps)
    args = [weight.data, x, norm_K, call.out, call.bias_N, call.residual_MN]
    args += [rows, columns, call.out.shape[1], groups, *plan.sizes, eps]
    plan.kernel.launch(
        plan.grid,
        plan.threads,
        args,
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
        pdl=pdl,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, but for its tensors and rows."""

    kernel: CudaKernel
    grid: tuple[int]
    threads: int
    sizes: tuple[int, ...]  # of the ring and of the partial sums; units of a cluster
    shared_bytes: int
    cluster: int

    @classmethod
    def of(
        cls, kernel: CudaKernel, tiling: Tiling, plan: Layout, *, tiles: int, count: int
    ) -> Plan:
        """The launch of a kernel over ``tiles`` tiles of a weight and ``count`` of rows."""
        return cls(
            kernel,
            (plan.clusters * tiling.cluster,),
            tiling.threads(count),
            (plan.stages, plan.part_tiles, *divmod(tiles // plan.unit, plan.clusters)),
            plan.shared_bytes,
            tiling.cluster,
        )


# What follows costs the host more than a launch does, and depends on few sizes.
@cache
def _plan(
    tiles: int,
    groups: int,
    count: int,
    tiling: Tiling | None,
    sms: int,
    activation: int,
) -> Plan:
    tiling, plan = chosen_layout(tiles, groups, count, tiling, sms)
    assert plan.stages >= 2, f"{tiling} leaves no room for a ring"
    kernel = _kernel(count, tiling, activation, plan)
    return Plan.of(kernel, tiling, plan, tiles=tiles, count=count)


@cache
def most_rows(tiles: int, groups: int, tiling: Tiling | None, sms: int) -> int:
    """Rows of a launch: the sums of fewer leave room for a ring, and for x in registers.

    Args:
        tiles: Of the weight.
        groups: Of its columns.
        tiling: How the work is cut; None chooses.
        sms: Multiprocessors.
    """
    most = MAX_ROWS
    while most > 8:
        cut, plan = chosen_layout(tiles, groups, row_tiles(most), tiling, sms)
        if plan.stages >= 2 and (most <= _SPILLING_ROWS or cut.warps <= _ROOMY_WARPS):
            break
        most //= 2
    return most


def chosen_layout(
    tiles: int,
    groups: int,
    count: int,
    tiling: Tiling | None,
    sms: int,
    *,
    keep: bool = False,
) -> tuple[Tiling, Layout]:
    """Return the given tiling or the chosen one, and its shared memory; ``keep`` as in layout."""
    tiling = tiling or choose(tiles=tiles, groups=groups, num_row_tiles=count, num_sms=sms)
    return tiling, layout(
        tiling,
        tiles=tiles,
        groups=groups,
        num_row_tiles=count,
        num_sms=sms,
        keep=keep,
    )


@cache
def num_sms(device: int) -> int:
    """Return a device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _kernel(count: int, tiling: Tiling, activation: int, plan: Layout) -> CudaKernel:
    own = {"ACTIVATION": activation, "DELAYS": int(tiling.delays)}
    return load_kernel("gemm.cu", "gemm", tiling.macros(count, plan) | own)
