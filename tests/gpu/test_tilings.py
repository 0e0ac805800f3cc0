"""Every tiling of the shipped table on a Hopper GPU, at the map that it is for.

python -m pytest tests/gpu/test_tilings.py
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from codesign.kernels import gemm, packed_reference
from codesign.kernels.int4 import quantize_int4
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import GROUP, TILE, pack_int4
from codesign.kernels.tiling import MEASURED, row_tiles

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
ROWS = (1, 7, 8, 9, 16, 17, 32, 33)
REPEATS = 20


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile side by side what the tests launch: one after the other they would wait minutes."""
    wanted = {
        (*cut, row_tiles(rows)) for cut in MEASURED for rows in ROWS if rows <= _most_rows(cut)
    }
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), initializer=_meet_the_gpu) as pool:
        for done in [pool.submit(gemm._plan, *each, None, gemm.num_sms(0), 0) for each in wanted]:
            done.result()


def _meet_the_gpu() -> None:
    torch.zeros(1, device="cuda")


def _most_rows(cut: tuple[int, int]) -> int:
    return gemm.most_rows(*cut, None, gemm.num_sms(0))


@pytest.mark.parametrize("cut", MEASURED, ids=str)
def test_a_map_agrees_with_float64_and_a_row_keeps_its_bits(cut: tuple[int, int]):
    features, columns = cut[0] * TILE, cut[1] * GROUP
    torch.manual_seed(features + columns)
    weight = pack_int4(quantize_int4(torch.randn(features, columns, device="cuda"), group=GROUP))
    assert (weight.num_tiles, weight.num_groups) == cut
    x = torch.randn(max(ROWS), columns, device="cuda").to(torch.bfloat16)
    residual = torch.randn(max(ROWS), features, device="cuda").to(torch.bfloat16)
    norm = Norm(torch.randn(columns, device="cuda").to(torch.bfloat16), 1e-5)
    expected = packed_reference.linear(x, weight, norm=norm, residual_MN=residual)
    first = None
    for rows in ROWS:
        out = torch.full_like(residual[:rows], torch.nan)
        options = {"norm": norm, "residual_MN": residual[:rows], "out": out}
        gemm.linear(x[:rows], weight, **options)
        found = out.clone()
        assert float((found.double() - expected[:rows]).norm() / expected[:rows].norm()) < 5e-3
        first = found[:1] if first is None else first
        assert torch.equal(found[:1], first), rows
        for repeat in range(REPEATS):
            out.fill_(torch.nan)
            gemm.linear(x[:rows], weight, pdl=bool(repeat % 2), **options)
            assert torch.equal(out, found), (rows, repeat)
