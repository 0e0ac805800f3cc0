"""Int4 products of other projects, where they are installed: Humming, GemLite and Marlin.

Each loads the same ``Int4Weight`` as our kernels' packing does, zero points included, and is
compared with float64 before it is timed. ``bench_kernels --peers`` times them. Humming takes the
tiling that its own table has for the number of rows, GemLite times its configurations itself,
Marlin takes the first of its list that fits, with those zero points and without any.

Marlin is vLLM's, in the form that SGLang compiles at first use (its 0.5.10.post1:
``jit_kernel/csrc/gemm/marlin/gptq_marlin.cuh``, ``gptq_marlin_gemm<bf16_t>`` exported by TVM FFI).
``CODESIGN_MARLIN`` names the compiled library, so that SGLang need not be installed.

What they lay out is stated by ``humming_tensors``, ``gemlite_tensors`` and ``marlin_tensors``, in
plain PyTorch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from codesign.kernels.int4 import SMALLEST_SCALE, Int4Weight, pack_nibbles, unpack_nibbles

LARGEST_ERROR = 2e-2  # they round weights to 16 bits, and some add up parts in bfloat16
MARLIN = "CODESIGN_MARLIN"  # the environment's name of its compiled library
# Marlin's numbers of types without exponent and sign: 4 bits, and what is taken off.
UINT4, UINT4_LESS_8 = 1 << 50 | 4 << 8, 1 << 50 | 8 << 17 | 4 << 8
MIDDLE = 8  # zero point of symmetric weights
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel of another project.

    Attributes:
        name: In results.
        dtype: Of its rows and result.
        load: Lays a weight out for a number of rows; returns the product.
        is_symmetric: Its weights have no zero points of their own.
    """

    name: str
    dtype: torch.dtype
    load: Callable[[Int4Weight, int, torch.dtype], Product]
    is_symmetric: bool = False


def humming(weight: Int4Weight, rows: int, dtype: torch.dtype) -> Product:
    """Return Humming's product for exactly so many rows."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]
    from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

    layer = HummingLayer(
        shape_n=weight.rows,
        shape_k=weight.columns,
        weight_config={"dtype": "uint4", "group_size": weight.group, "has_zero_point": True},
        torch_dtype=dtype,
    ).to(weight.packed.device)
    layer.load_from_tensors(humming_tensors(weight, dtype))
    layer.transform()
    # Without it kernels for 92 numbers of rows would be compiled.
    tiling = json.dumps(get_heuristics_config(layer.humming_config, shape_m=rows))
    return lambda x_MK: layer(x_MK, tuning_config=tiling)


def humming_tensors(weight: Int4Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what Humming loads: our words, scales, and zero points packed along the rows."""
    zeros_UN = weight.zeros.t().contiguous()
    return {
        "weight": weight.packed,
        "weight_scale": weight.scales.to(dtype),
        "zero_point": pack_nibbles(zeros_UN).t().contiguous(),
    }


def gemlite(weight: Int4Weight, rows: int, dtype: torch.dtype) -> Product:
    """Return GemLite's product; its first call tries its configurations."""
    from gemlite import DType, GemLiteLinear  # type: ignore[import-not-found]

    kind = DType.FP16 if dtype == torch.float16 else DType.BF16
    layer = GemLiteLinear(
        4,
        group_size=weight.group,
        in_features=weight.columns,
        out_features=weight.rows,
        input_dtype=kind,
        output_dtype=kind,
    )
    layer.pack(*gemlite_tensors(weight, dtype))
    return layer.forward


def gemlite_tensors(weight: Int4Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return what GemLite packs: a byte a code, scales, zero points."""
    return unpack_nibbles(weight.packed), weight.scales.to(dtype), weight.zeros.to(dtype)


def marlin(weight: Int4Weight, rows: int, dtype: torch.dtype) -> Product:
    """Return Marlin's product, called as SGLang calls it; the middle needs no zero points."""
    multiply = marlin_library().gptq_marlin_gemm
    device = weight.packed.device
    packed, scales, zeros = marlin_tensors(weight, dtype)
    none, no_columns = (torch.empty(0, dtype=t, device=device) for t in (dtype, torch.int32))
    kind = UINT4
    if bool((weight.zeros == MIDDLE).all()):
        kind, zeros = UINT4_LESS_8, no_columns
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    locks = torch.zeros(blocks, dtype=torch.int32, device=device)
    sums = blocks * -(-rows // 16) * 16 * 256

    def call(x_MK: Tensor) -> Tensor:
        out_MN = x_MK.new_empty(len(x_MK), weight.rows)
        operands = (x_MK, packed, scales, none, zeros, no_columns, no_columns, out_MN)
        parts = torch.empty(sums, dtype=torch.float32, device=device)
        # All columns are here, no atomic additions, sums of blocks in float32, whole zero points.
        multiply(*operands, parts, none, locks, kind, True, False, True, False)
        return out_MN

    return call


@cache
def marlin_library() -> Any:
    """Return the module that ``CODESIGN_MARLIN`` names."""
    if MARLIN not in os.environ:
        raise ModuleNotFoundError(name=f"{MARLIN} names no library")
    from tvm_ffi import load_module  # type: ignore[import-not-found]

    return load_module(os.environ[MARLIN])


def marlin_tensors(weight: Int4Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return what Marlin loads: words of (K / 16, 2 N), scales (U, N), zeros (U, N / 8).

    16 inputs by 64 outputs lie together. A thread of the tensor cores has a word for each 16
    outputs: of two outputs eight apart, inputs two by two, the even ones in the low half.
    """
    rows, columns = weight.rows, weight.columns
    tiles = unpack_nibbles(weight.packed).t().reshape(columns // 16, 2, 4, 2, rows // 64, 4, 2, 8)
    words = tiles.permute(0, 4, 7, 2, 5, 3, 6, 1).reshape(columns // 16, -1)
    scales = weight.scales.to(dtype).t().unflatten(1, (-1, 8, 8)).transpose(2, 3)
    zeros = weight.zeros.t().unflatten(1, (-1, 4, 2, 8)).permute(0, 1, 4, 3, 2)
    return pack_nibbles(words), scales.flatten(1).contiguous(), pack_nibbles(zeros.flatten(1))


PEERS = (
    Peer("Humming bf16", torch.bfloat16, humming),
    Peer("GemLite fp16", torch.float16, gemlite),
    Peer("GemLite bf16", torch.bfloat16, gemlite),
    Peer("Marlin bf16", torch.bfloat16, marlin),
    Peer("Marlin bf16, symmetric", torch.bfloat16, marlin, is_symmetric=True),
)


def random_int4(
    rows: int, columns: int, *, group: int, device: str, is_symmetric: bool = False
) -> Int4Weight:
    """Return random codes and zero points, and scales that float16 and bfloat16 both hold."""
    words = torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8), device=device)
    size = (rows, columns // group)
    scales = torch.rand(size, device=device) * 0.02 + SMALLEST_SCALE
    zeros = torch.randint(0, 16, size, device=device, dtype=torch.uint8)
    if is_symmetric:
        zeros.fill_(MIDDLE)
    return Int4Weight(words.to(torch.int32), scales.to(torch.bfloat16).half(), zeros)


def relative_error(product: Product, weight: Int4Weight, x_MK: Tensor) -> float:
    """Return how far a product is from float64's.

    Raises:
        ValueError: If it is so far that it computes something else.
    """
    expected_MN = x_MK.double() @ weight.dequantize(torch.float64).t()
    found_MN = product(x_MK)
    error = float((found_MN.double() - expected_MN).norm() / expected_MN.norm())
    if not error < LARGEST_ERROR:
        raise ValueError(f"another product: relative error {error:.3g}")
    return error
