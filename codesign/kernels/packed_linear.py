"""A layer's linear maps as callables: packed kernels on Hopper GPUs, PyTorch operations elsewhere.

Packing happens here, once. The RMSNorm in front of a map and the SwiGLU behind gate and up belong
to the callable, because the kernels fuse them. Only int4 weights are packed: bfloat16 ones run
through cuBLAS, which reads them at the memory's pace already.

Letters in shapes: T rows, K inputs, N outputs, I channels of a SwiGLU.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from codesign.kernels import LinearMap, gemm
from codesign.kernels.cuda_module import kernels_run
from codesign.kernels.int4 import Int4Weight
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import GROUP, PackedLinear, gate_up_order, pack_int4
from codesign.kernels.reference import PlainInt4Linear, PlainLinear, rms_norm, swiglu


@dataclass(frozen=True, slots=True)
class PackedMap:
    """``norm(x) @ weight.T + bias`` over a packed weight; see ``for_prompts``."""

    weight: PackedLinear
    bias_N: Tensor | None
    norm: Norm | None
    prompt: bool = False

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """Return the map, and ``residual_TN`` added, (T, N)."""
        return gemm.linear(
            x_TK,
            self.weight,
            norm=self.norm,
            bias_N=self.bias_N,
            residual_MN=residual_TN,
            prompt=self.prompt,
        )


@dataclass(frozen=True, slots=True)
class PackedSwiglu:
    """``silu(gate) * up`` of ``norm(x)`` over a packed weight; see ``for_prompts``."""

    weight: PackedLinear
    norm: Norm | None
    prompt: bool = False

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Return (T, I)."""
        return gemm.gate_up(x_TK, self.weight, norm=self.norm, prompt=self.prompt)


def add_map(linear: LinearMap, x_TK: Tensor, residual_TN: Tensor) -> Tensor:
    """Return ``residual + linear(x)``, (T, N), in one launch where the map is packed."""
    if isinstance(linear, PackedMap):
        return linear(x_TK, residual_TN)
    return residual_TN + linear(x_TK)


def for_prompts(linear: LinearMap) -> LinearMap:
    """Return the map as prompts run it: a row need not have the bits that it has in decoding."""
    if isinstance(linear, PackedMap | PackedSwiglu):
        return replace(linear, prompt=True)
    return linear


def linear_map(
    matrix: Tensor | Int4Weight, bias_N: Tensor | None = None, *, norm: Norm | None = None
) -> LinearMap:
    """Return ``norm(x) @ matrix.T + bias`` as a callable (T, K) -> (T, N).

    Args:
        matrix: (N, K), floating point or int4; an int4 one may be dropped afterwards.
        bias_N: Added to every row.
        norm: RMSNorm of the rows in front of the map.
    """
    if isinstance(matrix, Int4Weight) and can_pack(matrix):
        return PackedMap(pack_int4(matrix), bias_N, norm)
    return _behind(norm, _plain(matrix, bias_N))


def logits_map(matrix: Tensor | Int4Weight) -> LinearMap:
    """Return ``matrix``, a head (N, K), as a callable (T, K) -> (T, N) in float32."""
    if isinstance(matrix, Int4Weight):
        if not can_pack(matrix):
            return _widened(PlainInt4Linear(matrix))
        packed = pack_int4(matrix)
        return lambda x_TK: gemm.logits(x_TK, packed)
    if matrix.is_cuda and matrix.dtype != torch.float32:
        return lambda x_TK: torch.mm(x_TK, matrix.t(), out_dtype=torch.float32)
    return _widened(PlainLinear(matrix))


def _widened(plain: LinearMap) -> LinearMap:
    return lambda x_TK: plain(x_TK).float()


def swiglu_map(matrix: Tensor | Int4Weight, *, norm: Norm | None = None) -> LinearMap:
    """Return ``silu(gate) * up`` of ``norm(x)`` as a callable (T, K) -> (T, I).

    Args:
        matrix: (2 I, K), gate rows above up rows.
        norm: As in ``linear_map``.
    """
    if isinstance(matrix, Int4Weight) and can_pack(matrix) and matrix.rows % 16 == 0:
        order = gate_up_order(matrix.rows // 2).to(matrix.packed.device)
        return PackedSwiglu(pack_int4(matrix, order=order), norm)
    plain = _behind(norm, _plain(matrix, None))
    return lambda x_TK: swiglu(plain(x_TK))


def can_pack(weight: Int4Weight) -> bool:
    """Whether the kernels run this weight where it lies."""
    device = weight.packed.device
    if device.type != "cuda" or weight.group != GROUP or weight.rows % 2:
        return False
    return kernels_run(device.index or 0)


def _plain(matrix: Tensor | Int4Weight, bias_N: Tensor | None) -> LinearMap:
    if isinstance(matrix, Int4Weight):
        return PlainInt4Linear(matrix, bias_N)
    return PlainLinear(matrix, bias_N)


def _behind(norm: Norm | None, plain: LinearMap) -> LinearMap:
    if norm is None:
        return plain
    return lambda x_TK: plain(rms_norm(x_TK, norm.weight_K, norm.eps))
