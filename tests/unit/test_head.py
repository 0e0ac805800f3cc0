from __future__ import annotations

import pytest
import torch

from codesign.kernels.head import head_words
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import pack_bf16

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
DEVICE = "cuda" if HOPPER else "cpu"


@pytest.mark.parametrize(("rows", "num_real"), [(1, 100), (8, 97), (19, 5)])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_head_answers_with_the_likeliest_tokens_of_normed_rows(
    rows: int, num_real: int, mapped: bool
):
    torch.manual_seed(rows)
    weight = torch.randn(100, 256).bfloat16()
    x = torch.randn(rows, 256).bfloat16()
    scale = torch.rand(256).bfloat16()
    token_map = torch.randperm(num_real) if mapped else None
    words = head_words(
        x.to(DEVICE),
        pack_bf16(weight).to(DEVICE),
        4,
        norm=Norm(scale.to(DEVICE), 1e-5),
        num_real=num_real,
        token_map=None if token_map is None else token_map.to(DEVICE),
    ).cpu()
    scaled = (x.float() * scale.float()).bfloat16().double()  # as the kernel rounds them
    factor = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    logits = (scaled @ weight.double().T) * factor
    best = torch.log_softmax(logits[:, :num_real], -1).topk(4)
    tokens = best.indices if token_map is None else token_map[best.indices]
    found, bits = words.view(2, rows, 4)
    assert torch.equal(found, tokens.int())
    assert torch.allclose(bits.view(torch.float32).double(), best.values, atol=1e-3)
