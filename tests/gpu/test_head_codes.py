"""Samples from a head's int8 copy on a GPU: the bits that a whole head gives.

python -m pytest tests/gpu/test_head_codes.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from codesign.kernels import keyed_sampling
from codesign.kernels.head_codes import HeadCodes, coarse_logits, sample_rows, takes
from codesign.kernels.row_choices import row_choices
from codesign.policy.walk import Sampling

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a GPU")]
# Tokens, columns: the 8B's, a 70B's over four GPUs, SmolLM2's, ragged.
SHAPES = [(128_256, 4096), (32_064, 8192), (49_152, 576), (1003, 1040)]
SAMPLINGS = [Sampling(), Sampling(0.7, seed=3), Sampling(2.0, seed=4)]


def case(rows: int, tokens: int, hidden: int, stands_out: float) -> tuple[Tensor, Tensor]:
    """Hidden rows with some large columns, and a head; a token of each row may stand out."""
    torch.manual_seed(rows + tokens)
    head_VD = torch.randn(tokens, hidden, device="cuda").bfloat16()
    x_TD = torch.randn(rows, hidden, device="cuda")
    x_TD[:, ::97] *= 20
    likely_T = torch.randint(0, tokens, (rows,), device="cuda")
    x_TD += stands_out * hidden**-0.5 * head_VD[likely_T] * x_TD.norm(dim=1, keepdim=True)
    return x_TD.bfloat16(), head_VD


def keys(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What noise depends on."""
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (2, rows), device="cuda").int()
    return words[0], words[1], torch.arange(rows, device="cuda").int() + 600


@pytest.fixture(params=[*range(len(SAMPLINGS)), "by row"])
def sampling(request, each_its_own):
    """How any number of rows sample: ``sampling(rows)``."""
    if request.param == "by row":
        return lambda rows: each_its_own([SAMPLINGS[i % 3] for i in range(rows)], "cuda")
    return lambda _: SAMPLINGS[request.param]


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_samples_have_the_bits_that_they_have_with_every_token_open(tokens, hidden, sampling):
    for rows, stands_out in ((1, 0.0), (8, 0.0), (8, 0.1), (11, 0.0), (64, 0.1)):
        x_TD, head_VD = case(rows, tokens, hidden, stands_out)
        codes, noise = HeadCodes.of(head_VD), keys(rows)
        assert takes(head_VD)
        some = min(rows, 4)  # every token of as many rows
        few = [column[:some].contiguous() for column in noise]
        options = {"num_tokens": tokens - 3, "first_token": 5}
        found = sample_rows(codes, x_TD, *noise, sampling(rows), **options)
        every = replace(codes, lengths_2V=codes.lengths_2V * 1e9)
        wanted = sample_rows(every, x_TD[:some], *few, sampling(some), **options)
        assert torch.equal(found[1][:some], wanted[1])
        assert torch.equal(found[0][:some], wanted[0])
        logits_TV = torch.mm(x_TD, head_VD.t(), out_dtype=torch.float32)[:, : tokens - 3]
        plain = keyed_sampling.sample_rows(logits_TV, *noise, sampling(rows), first_token=5)
        assert torch.allclose(found[0].double(), plain[0].double(), rtol=1e-4, atol=1e-3)
        assert float((found[1] != plain[1]).sum()) <= 1, "more than a tie"


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_coarse_logits_are_near_and_choose_alike(tokens, hidden):
    x_TD, head_VD = case(8, tokens, hidden, 0.1)
    logits_TV = torch.mm(x_TD, head_VD.t(), out_dtype=torch.float32)
    coarse_TV = coarse_logits(HeadCodes.of(head_VD), x_TD)
    assert float((coarse_TV - logits_TV).std() / logits_TV.std()) < 0.01
    assert torch.equal(row_choices(coarse_TV, 1)[1], row_choices(logits_TV, 1)[1])


def test_a_row_s_temperature_changes_no_other_row(each_its_own):
    x_TD, head_VD = case(64, 32_064, 1024, 0.1)
    codes, noise = HeadCodes.of(head_VD), keys(64)
    by_row = each_its_own([SAMPLINGS[i % 3] for i in range(64)], "cuda")
    found = sample_rows(codes, x_TD, *noise, by_row)
    for i, sampling in enumerate(SAMPLINGS):
        alike = sample_rows(codes, x_TD, *noise, sampling)
        for part, whole in zip(found, alike, strict=True):
            assert torch.equal(part[i::3], whole[i::3].to(part.dtype))


def test_a_row_without_numbers_hurts_no_other():
    x_TD, head_VD = case(8, 32_064, 1024, 0.1)
    codes, noise = HeadCodes.of(head_VD), keys(8)
    wanted = sample_rows(codes, x_TD, *noise, Sampling())[1]
    x_TD[3, 5] = torch.nan
    found = sample_rows(codes, x_TD, *noise, Sampling())[1]
    assert 0 <= int(found[3]) < 32_064
    found[3] = wanted[3]
    assert torch.equal(found, wanted)
