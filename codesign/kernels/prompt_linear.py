"""Linear maps over packed weights for the rows of prompts: norm, bias, residual and SwiGLU fused.

Three ways, by the number of rows. Few go through the kernels of decoding (``gemm``). Up to
``DENSE_ROWS``, int4 weights are brought to bfloat16 within a tensor-core product
(``prompt_linear_triton``): it reads them packed, once for every 128 rows. More are unpacked to
bfloat16 and multiplied by cuBLAS: 0.6 ps a weight more for the memory, but its pace for the rest.

Decoding must never come here, whatever its rows: the bits of a row would depend on its neighbours.
Of the second way they depend on the weight alone; cuBLAS may add up differently for other numbers.

Letters in shapes: M rows, K inputs, N outputs, I channels of a SwiGLU.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from codesign.kernels import packed_reference
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import TILE, PackedLinear
from codesign.kernels.reference import rms_norm

# Above FEW_ROWS a prompt, and above DECODED_ROWS anything, does not take the kernels of decoding;
# above DENSE_ROWS cuBLAS. The maps of a 70B: on an H100 64 rows are faster decoded (380 us a layer
# for 432), 96 not (674 for 570); on an H200 256 rows are as fast fused as unpacked (1334 and 1370),
# 512 slower (2379 and 1863).
FEW_ROWS, DECODED_ROWS, DENSE_ROWS = 64, 128, 256
# Lengths of prompts that compile every kernel.
LENGTHS = (17, 33, FEW_ROWS + 1, DENSE_ROWS + 1)
_PROGRAMS = 264  # of eight tiles: two a multiprocessor
_FEWEST_GROUPS, _MOST_SPLITS = 4, 8
_SCRATCH = 1 << 27  # bfloat16 weights that are unpacked at a time: 256 MiB
_scratch: dict[torch.device, Tensor] = {}


def takes(num_rows: int, *, prompt: bool) -> bool:
    """Whether rows are run here, and not by the kernel of decoding."""
    return num_rows > (FEW_ROWS if prompt else DECODED_ROWS)


@dataclass(frozen=True, slots=True)
class Map:
    """A linear map and what is fused with it.

    Attributes:
        weight: Packed; of a SwiGLU in ``gate_up_order``.
        norm: RMSNorm of x, or None.
        bias_N: bfloat16, or None; of a SwiGLU None.
        residual_MN: bfloat16, or None; may be the result's memory; of a SwiGLU None.
        swiglu: Whether the result is ``silu(gate) * up``, (M, I).
    """

    weight: PackedLinear
    norm: Norm | None = None
    bias_N: Tensor | None = None
    residual_MN: Tensor | None = None
    swiglu: bool = False


def run(x_MK: Tensor, of: Map, out: Tensor) -> Tensor:
    """Write ``of`` x to ``out``, contiguous bfloat16, and return it."""
    if not x_MK.is_cuda:
        return out.copy_(_plain(x_MK, of))
    if x_MK.shape[0] <= DENSE_ROWS:
        return run_fused(x_MK, of, out)
    return run_dense(x_MK, of, out)


def run_fused(x_MK: Tensor, of: Map, out: Tensor) -> Tensor:
    """``run`` by one product over packed weights."""
    from codesign.kernels import prompt_linear_triton

    norm_K, eps = (None, 0.0) if of.norm is None else (of.norm.weight_K, of.norm.eps)
    tiles, groups = of.weight.num_tiles, of.weight.num_groups
    prompt_linear_triton.product(
        prompt_linear_triton.arrange(x_MK, norm_K, eps),
        of.weight,
        out,
        bias_N=of.bias_N,
        residual_MN=of.residual_MN,
        swiglu=of.swiglu,
        cut=prompt_linear_triton.CUT,
        splits=splits(tiles, groups),
    )
    return out


def run_dense(x_MK: Tensor, of: Map, out: Tensor) -> Tensor:
    """``run`` through unpacked weights, as many at a time as the scratch memory holds."""
    from codesign.kernels import join_parts_triton, unpack_triton

    if of.norm is not None:
        x_MK = rms_norm(x_MK, of.norm.weight_K, of.norm.eps)
    adds = of.residual_MN is not None or of.bias_N is not None
    if of.residual_MN is not None:
        out.copy_(of.residual_MN)  # nothing where they are the same
        if of.bias_N is not None:
            out += of.bias_N
    elif of.bias_N is not None:
        out.copy_(of.bias_N.expand_as(out))
    for start, end in pieces(of.weight):
        dense_nK = _scratch_for(-(-(end - start) // TILE) * TILE, x_MK)
        unpack_triton.unpack(of.weight, start // TILE, dense_nK)
        dense_Kn = dense_nK[: end - start].t()
        if of.swiglu:
            both = x_MK @ dense_Kn
            part = out[:, start // 2 : end // 2]
            join_parts_triton.join(both[None], part, bias_N=None, residual_MN=None, swiglu=True)
        elif adds:
            out[:, start:end].addmm_(x_MK, dense_Kn)
        else:
            torch.mm(x_MK, dense_Kn, out=out[:, start:end])
    return out


@cache
def splits(tiles: int, groups: int) -> int:
    """Return how many parts of the columns are added up by themselves: of the weight alone."""
    most = max(1, min(_PROGRAMS // -(-tiles // 8), groups // _FEWEST_GROUPS, _MOST_SPLITS))
    share = -(-groups // most)
    return -(-groups // share)


def pieces(weight: PackedLinear) -> list[tuple[int, int]]:
    """Rows of a weight, from and to, that are unpacked at a time: whole tiles, about as many."""
    tiles = weight.num_tiles
    most = max(1, _SCRATCH // (TILE * weight.num_columns))
    count = -(-tiles // most)
    starts = [TILE * (tiles * i // count) for i in range(count)]
    return list(zip(starts, [*starts[1:], weight.num_rows], strict=True))


def _scratch_for(rows: int, x_MK: Tensor) -> Tensor:
    """Memory for unpacked weights, (n, K): a device runs one map after the other, of all models.

    Graphs hold its address, so it is made once, as large as any map needs it.
    """
    if x_MK.device not in _scratch:
        _scratch[x_MK.device] = x_MK.new_empty(_SCRATCH)
    return _scratch[x_MK.device][: rows * x_MK.shape[1]].view(rows, -1)


def _plain(x_MK: Tensor, of: Map) -> Tensor:
    if of.swiglu:
        return packed_reference.gate_up_bf16(x_MK, of.weight, norm=of.norm)
    return packed_reference.linear_bf16(
        x_MK, of.weight, norm=of.norm, bias_N=of.bias_N, residual_MN=of.residual_MN
    )
