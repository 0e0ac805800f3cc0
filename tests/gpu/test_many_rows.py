"""Linear maps for many rows on a Hopper GPU: every row has the bits that it has among few.

python -m pytest tests/gpu/test_many_rows.py
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from codesign.kernels import gemm, many_rows, packed_reference
from codesign.kernels.int4 import quantize_int4
from codesign.kernels.many_rows import Cut
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import PackedLinear, gate_up_order, pack_int4
from codesign.kernels.tiling import Tiling, choose

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
REPEATS = 100
ROWS = (17, 24, 32, 33, 64, 65, 100, 128)
# Columns and features: the 70B's, ragged tiles, chunks and groups, one group.
SHAPES = [(8192, 2560), (7168, 1024), (28672, 256), (1024, 1000), (640, 48), (128, 16)]
# How columns are cut: one share or several, of one chunk or several, of one block or several.
TILINGS = [Tiling(16, 1), Tiling(4, 2), Tiling(16, 2, 4), Tiling(14, 2, 2), Tiling(5, 2, 2)]


def case(columns: int, features: int) -> tuple[PackedLinear, Tensor, Norm]:
    """A random weight, 128 rows of different sizes and a norm."""
    torch.manual_seed(columns + features)
    dense = torch.randn(features, columns, device="cuda")
    weight = pack_int4(quantize_int4(dense, group=128))
    sizes = 10.0 ** torch.linspace(-3, 3, 128, device="cuda")[:, None]
    x = (torch.randn(128, columns, device="cuda") * sizes).to(torch.bfloat16)
    return weight, x, Norm(torch.randn(columns, device="cuda").to(torch.bfloat16), 1e-5)


def by_eights(x: Tensor, weight: PackedLinear, tiling: Tiling | None, **fused: Tensor) -> Tensor:
    """The map in launches of eight rows."""
    residual = fused.pop("residual_MN", None)
    found = []
    for start in range(0, len(x), 8):
        rows = slice(start, start + 8)
        more = {} if residual is None else {"residual_MN": residual[rows].contiguous()}
        found.append(gemm.linear(x[rows].contiguous(), weight, tiling=tiling, **fused, **more))
    return torch.cat(found)


def legal(tiling: Tiling, weight: PackedLinear) -> bool:
    """Whether every share has columns."""
    return -(-weight.num_groups // tiling.warps) >= tiling.cluster


@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_rows_have_the_bits_that_they_have_among_few(columns: int, features: int):
    weight, x, norm = case(columns, features)
    bias = torch.randn(features, device="cuda").to(torch.bfloat16)
    residual = torch.randn(128, features, device="cuda").to(torch.bfloat16)
    for tiling in [None, *(t for t in TILINGS if legal(t, weight))]:
        fused = {"norm": norm, "bias_N": bias, "residual_MN": residual}
        few, plain = by_eights(x, weight, tiling, **fused), by_eights(x, weight, tiling)
        for rows in ROWS:
            part = fused | {"residual_MN": residual[:rows].clone(), "tiling": tiling}
            found = gemm.linear(x[:rows], weight, **part)
            assert torch.equal(found, few[:rows]), (tiling, rows)
            found = gemm.linear(x[:rows], weight, tiling=tiling)
            assert torch.equal(found, plain[:rows]), (tiling, rows)


@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_no_bit_of_the_sums_or_of_the_norms_factor_is_another_before_they_are_rounded(
    columns: int, features: int
):
    weight, x, norm = case(columns, features)
    for tiling in [None, *(t for t in TILINGS if legal(t, weight))]:
        for own in (None, norm):
            few = torch.cat([wide(part.contiguous(), weight, own, tiling) for part in x.split(8)])
            for rows in ROWS:
                assert torch.equal(wide(x[:rows], weight, own, tiling), few[:rows]), (tiling, rows)


def wide(x: Tensor, weight: PackedLinear, norm: Norm | None, tiling: Tiling | None) -> Tensor:
    """The map in float32."""
    out = torch.full((len(x), weight.num_rows), torch.nan, device="cuda")
    gemm._run(gemm._Call(x, weight, norm, out, None, None, 2), tiling, pdl=True)
    return out


def test_they_agree_with_float64():
    weight, x, norm = case(7168, 1024)
    expected = packed_reference.linear(x, weight, norm=norm)
    found = gemm.linear(x, weight, norm=norm).double()
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 5e-3


def test_gates_and_ups_end_as_swiglu():
    torch.manual_seed(5)
    whole = quantize_int4(torch.randn(7168, 4096, device="cuda"), group=128)
    weight = pack_int4(whole, order=gate_up_order(3584).cuda())
    x = torch.randn(128, 4096, device="cuda").to(torch.bfloat16)
    norm = Norm(torch.randn(4096, device="cuda").to(torch.bfloat16), 1e-5)
    few = torch.cat([gemm.gate_up(part.contiguous(), weight, norm=norm) for part in x.split(8)])
    for rows in ROWS:
        assert torch.equal(gemm.gate_up(x[:rows], weight, norm=norm), few[:rows]), rows


def test_no_number_comes_of_none_and_other_rows_keep_their_bits():
    weight, x, _ = case(1024, 1000)
    rows = x[:40].float()
    rows[0], rows[1, 5], rows[2, 7] = 0.0, torch.nan, torch.inf
    rows[3] *= 1e-28
    rows[4] *= 1e30
    rows[5, :512] = 0.0
    x = rows.to(torch.bfloat16)
    found = gemm.linear(x, weight)
    assert not found[0].any()
    assert not found[1:3].isfinite().any()
    assert torch.equal(found[3:], by_eights(x[3:], weight, None))


@pytest.mark.parametrize(("columns", "features"), [(8192, 2560), (28672, 256), (1024, 1000)])
@pytest.mark.parametrize("delays", [False, True])
def test_every_launch_shape_gives_the_same_bits_a_hundred_times(
    columns: int, features: int, delays: bool
):
    weight, x, norm = case(columns, features)
    few = by_eights(x, weight, None, norm=norm)
    out, wrong = torch.empty_like(few), torch.zeros((), device="cuda", dtype=torch.int64)
    tiles, groups = weight.num_tiles, weight.num_groups
    tiling = replace(choose(tiles=tiles, groups=groups), delays=delays)
    shapes = [
        Cut(rows, teams, blocks, 2)
        for rows, teams, blocks in product((32, 64), (1, 2), (1, 2))
        if tiling.cluster % teams == 0
    ]
    for cut, rows in product(shapes, (33, 64, 128)):
        for repeat in range(REPEATS // len(shapes) + 1):
            part = out[:rows].fill_(torch.nan)
            many_rows.run(
                x[:rows], weight, part, norm=norm, bias_N=None, residual_MN=None, activation=0,
                tiling=tiling, sms=gemm.num_sms(0), pdl=bool(repeat % 2), cut=cut,
            )  # fmt: skip
            wrong += (part.view(torch.int16) != few[:rows].view(torch.int16)).sum()
    assert wrong == 0


def test_a_chain_of_maps_in_a_graph_has_the_bits_of_one_after_another():
    """Each kernel starts while the one in front still runs, over memory that is used again."""
    weight, x, norm = case(2048, 2048)
    steps = [x[:64]]
    for _ in range(12):
        steps.append(by_eights(steps[-1], weight, None, norm=norm))
    gemm.linear(x[:64], weight, norm=norm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = x[:64]
        for _ in range(12):
            found = gemm.linear(found, weight, norm=norm)
    for _ in range(REPEATS):
        graph.replay()
        assert torch.equal(found, steps[-1])
