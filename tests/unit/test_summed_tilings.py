"""Which tiling a map has whose sum over ranks follows; no GPU launches anything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from codesign.kernels import gemm_all_reduce, tiling
from codesign.kernels.tiling import Tiling, choose

CUT = (512, 16)
FEW, MANY = Tiling(4, 2, 4), Tiling(4, 1, 4)


@pytest.fixture
def calls(monkeypatch):
    """What was launched, of the table with a tiling for the sum."""
    found = []
    monkeypatch.setattr(tiling, "SUMMED", {CUT: (FEW, MANY)})
    monkeypatch.setattr(gemm_all_reduce, "num_sms", lambda _: 132)
    monkeypatch.setattr(
        gemm_all_reduce, "linear", lambda x, weight, **how: found.append(how["tiling"]) or x
    )
    monkeypatch.setattr(gemm_all_reduce, "all_reduce_add", lambda x, residual, **how: x)
    kernel = SimpleNamespace(launch=lambda *args, **how: found.append("fused"))
    monkeypatch.setattr(
        gemm_all_reduce, "_kernel", lambda count, by, *_: found.append(by) or kernel
    )
    gemm_all_reduce._tiling.cache_clear()
    gemm_all_reduce._plan.cache_clear()
    yield found
    gemm_all_reduce._tiling.cache_clear()
    gemm_all_reduce._plan.cache_clear()


def run(rows: int, most: int = 32) -> None:
    data = SimpleNamespace(shape=(*CUT, 1088))
    weight = SimpleNamespace(data=data, num_rows=8192)
    exchange = SimpleNamespace(
        max_elements=most * 8192, world=4, on_device=gemm_all_reduce.DeviceExchange()
    )
    x = torch.zeros(rows, 2048, dtype=torch.bfloat16)
    gemm_all_reduce.linear_all_reduce(x, weight, None, exchange=exchange)


def test_every_number_of_rows_is_cut_alike_in_one_launch_or_two(calls):
    assert choose(tiles=512, groups=16) not in (FEW, MANY)
    for rows in (1, 8):
        run(rows)
    assert calls == [FEW, "fused", "fused"]
    calls.clear()
    run(16)
    run(100)  # more than a launch takes
    run(8, most=4)  # than the exchange holds
    assert calls == [MANY, "fused", MANY, FEW]
