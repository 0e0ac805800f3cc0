"""Logits of a head, dense or in int4, where they run."""

from __future__ import annotations

import pytest
import torch

from codesign.engine.rank_weights import EndWeights
from codesign.kernels.int4 import Int4Weight
from codesign.kernels.packed_linear import logits_map

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HOPPER else ("cpu", torch.float32)


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("group", [None, 128])
def test_logits_are_float32_products_of_the_head_as_it_is_rounded(rows: int, group: int | None):
    torch.manual_seed(rows)
    weight = torch.randn(304, 256, device=DEVICE).to(DTYPE)
    ends = EndWeights(
        embedding=weight, norm=weight[0], head=weight, head_start=0, num_real=304, num_tokens=304,
        token_map=None, head_group=group,
    )  # fmt: skip
    head = ends.decoding_head()
    assert isinstance(head, Int4Weight) == (group is not None)
    dense = head.dequantize() if isinstance(head, Int4Weight) else head
    x = torch.randn(rows, 256, device=DEVICE).to(DTYPE)
    found = logits_map(head)(x)
    expected = x.double() @ dense.double().T
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 5e-5
