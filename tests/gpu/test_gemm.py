"""Every tiling of the packed GEMM on a Hopper GPU, over and over: races show as wrong tiles.

And prompts by every way.

python -m pytest tests/gpu/test_gemm.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from codesign.kernels import gemm, packed_reference, prompt_linear
from codesign.kernels.int4 import quantize_int4
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import PackedLinear, gate_up_order, pack_int4
from codesign.kernels.tiling import Tiling, choose, layout, row_tiles

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
REPEATS = 200
# Columns and features: whole and ragged tiles, chunks and groups.
SHAPES = [(2048, 8192), (8192, 2560), (7168, 1024), (1024, 1000), (640, 48), (128, 16)]
TILINGS = [
    Tiling(16, 1),
    Tiling(16, 2, 4, paced=1),
    Tiling(16, 4, 2),
    Tiling(14, 2, 2, paced=0),
    Tiling(5, 2),
    Tiling(8, 1, 1, 2, paced=2),
    Tiling(8, 2, 4, 2, 1),
    Tiling(7, 2, 2, 2),
    Tiling(14, 4, 2),
    Tiling(3, 1),
]


def case(columns: int, features: int) -> tuple[PackedLinear, Tensor, Norm]:
    """A random weight, 16 rows and a norm."""
    torch.manual_seed(columns + features)
    dense = torch.randn(features, columns, device="cuda")
    weight = pack_int4(quantize_int4(dense, group=128))
    x = torch.randn(16, columns, device="cuda").to(torch.bfloat16)
    return weight, x, Norm(torch.randn(columns, device="cuda").to(torch.bfloat16), 1e-5)


def legal(tiling: Tiling, weight: PackedLinear, rows: int) -> bool:
    """Whether every block has columns, and its ring room."""
    tiles, groups = weight.num_tiles, weight.num_groups
    plan = layout(
        tiling,
        tiles=tiles,
        groups=groups,
        num_row_tiles=row_tiles(rows),
        num_sms=gemm.num_sms(0),
    )
    return -(-groups // tiling.warps) >= tiling.cluster and plan.stages >= 2


def tilings(weight: PackedLinear, rows: int) -> Iterator[Tiling]:
    """Those of the list that run this weight, and the chosen one."""
    tiles, groups = weight.num_tiles, weight.num_groups
    yield choose(tiles=tiles, groups=groups, num_row_tiles=row_tiles(rows))
    yield from (tiling for tiling in TILINGS if legal(tiling, weight, rows))


def error(found: Tensor, expected: Tensor) -> float:
    """Relative; not a number if an element was not written."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_every_tiling_and_number_of_rows_agrees_with_float64(columns: int, features: int):
    weight, x, norm = case(columns, features)
    bias = torch.randn(features, device="cuda").to(torch.bfloat16)
    residual = torch.randn(16, features, device="cuda").to(torch.bfloat16)
    fused = {"norm": norm, "bias_N": bias}
    expected = packed_reference.linear(x, weight, residual_MN=residual, **fused)
    for rows in range(1, 17):
        for tiling in tilings(weight, rows):
            out = torch.full_like(residual[:rows], torch.nan)
            options = {"residual_MN": residual[:rows], "out": out, "tiling": tiling, **fused}
            gemm.linear(x[:rows], weight, pdl=bool(rows % 2), **options)
            assert error(out, expected[:rows]) < 5e-3, (tiling, rows)


@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_logits_are_the_product_before_it_is_rounded(columns: int, features: int):
    weight, x, _ = case(columns, features)
    x = x.repeat(3, 1)
    expected = packed_reference.linear(x, weight)
    for rows in (1, 8, 13, 48):
        for tiling in tilings(weight, min(rows, 16)):
            found = gemm.logits(x[:rows], weight, tiling=tiling)
            assert found.dtype == torch.float32
            assert error(found, expected[:rows]) < 5e-5, (tiling, rows)


@pytest.mark.parametrize(("columns", "features"), SHAPES[:3])
@pytest.mark.parametrize("delays", [False, True])
def test_a_thousand_launches_give_the_same_bits(columns: int, features: int, delays: bool):
    weight, x, _ = case(columns, features)
    for listed in tilings(weight, 8):
        tiling = replace(listed, delays=delays)
        first = gemm.linear(x[:8], weight, tiling=tiling)
        out, wrong = torch.empty_like(first), torch.zeros((), device="cuda", dtype=torch.int64)
        for repeat in range(REPEATS):
            out.fill_(torch.nan)
            gemm.linear(x[:8], weight, out=out, tiling=tiling, pdl=bool(repeat % 2))
            wrong += (out.view(torch.int16) != first.view(torch.int16)).sum()
        assert wrong == 0, tiling
        assert error(first, packed_reference.linear(x[:8], weight)) < 5e-3, tiling


@pytest.mark.parametrize(("columns", "features"), SHAPES[:3])
def test_a_row_has_the_same_bits_alone_and_among_others(columns: int, features: int):
    weight, x, norm = case(columns, features)
    alone = gemm.linear(x[:1], weight, norm=norm)
    x = x.repeat(3, 1)
    for rows in (3, 8, 9, 16, 17, 32, 40):
        assert torch.equal(gemm.linear(x[:rows], weight, norm=norm)[:1], alone), rows


@pytest.mark.parametrize(("columns", "features"), SHAPES[:3])
def test_rows_of_any_size_keep_their_precision_and_no_number_comes_of_none(
    columns: int, features: int
):
    weight, x, _ = case(columns, features)
    rows = x[:8].float()
    rows[0], rows[1, 5], rows[2, 7] = 0.0, torch.nan, torch.inf
    rows[3] *= 1e-28
    rows[4, ::64] *= 3e3
    rows[5] *= 1e30
    rows[6, : columns // 2] = 0.0
    x = rows.to(torch.bfloat16)
    out, expected = gemm.linear(x, weight), packed_reference.linear(x, weight)
    assert not out[0].any()
    assert not out[1:3].isfinite().any()
    for row in range(3, 8):
        assert error(out[row], expected[row]) < 5e-3, row


def test_swiglu_takes_interleaved_rows():
    torch.manual_seed(5)
    whole = quantize_int4(torch.randn(2048, 1024, device="cuda"), group=128)
    weight = pack_int4(whole, order=gate_up_order(1024).cuda())
    x = torch.randn(40, 1024, device="cuda").to(torch.bfloat16)
    for rows in (1, 8, 16, 40):
        expected = packed_reference.gate_up(x[:rows], weight)
        assert error(gemm.gate_up(x[:rows], weight), expected) < 5e-3


@pytest.mark.parametrize(("columns", "features"), [*SHAPES[:3], (128, 16), (1152, 200)])
@pytest.mark.parametrize("way", ["run_fused", "run_dense"])
def test_prompts_agree_with_float64(columns: int, features: int, way: str):
    weight, _, norm = case(columns, features)
    bias = torch.randn(features, device="cuda").to(torch.bfloat16)
    for rows in (17, 32, 33, 100, 256, 300):
        x = torch.randn(rows, columns, device="cuda").to(torch.bfloat16)
        residual = torch.randn(rows, features, device="cuda").to(torch.bfloat16)
        expected = packed_reference.linear(x, weight, norm=norm, bias_N=bias, residual_MN=residual)
        out = torch.full_like(residual, torch.nan)
        run = getattr(prompt_linear, way)
        run(x, prompt_linear.Map(weight, norm, bias, residual), out)
        assert error(out, expected) < 5e-3, rows
        run(x, prompt_linear.Map(weight, norm, bias, residual), residual)
        assert torch.equal(residual, out), "the residual's own memory"
        run(x, prompt_linear.Map(weight), out)
        assert error(out, packed_reference.linear(x, weight)) < 5e-3, rows


@pytest.mark.parametrize(("columns", "features"), SHAPES[:3])
def test_a_row_of_a_prompt_has_the_same_bits_whatever_is_beside_it(columns: int, features: int):
    weight, x, norm = case(columns, features)
    x = torch.cat([x] * 16)
    few = gemm.linear(x[:65].contiguous(), weight, norm=norm, prompt=True)
    for rows in (66, 100, 128, 129, 256):
        found = gemm.linear(x[:rows].contiguous(), weight, norm=norm, prompt=True)
        assert torch.equal(found[:65], few), rows
        assert torch.equal(found[16], found[0]), rows


@pytest.mark.parametrize("rows", [17, 100, 300])
def test_gates_and_ups_of_a_prompt_end_as_swiglu(rows: int):
    torch.manual_seed(5)
    whole = quantize_int4(torch.randn(2048, 1024, device="cuda"), group=128)
    weight = pack_int4(whole, order=gate_up_order(1024).cuda())
    x = torch.randn(rows, 1024, device="cuda").to(torch.bfloat16)
    out = gemm.gate_up(x, weight, prompt=True)
    assert error(out, packed_reference.gate_up(x, weight)) < 5e-3
