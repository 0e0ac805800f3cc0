"""A head's int8 copy leaves open every token that may be a row's sample, and so loses none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codesign.kernels.head_codes import (
    HeadCodes,
    RowCodes,
    coarse_and_bounds,
    coarse_logits,
    sample_rows,
    takes,
)
from codesign.kernels.keyed_sampling import best_tokens, row_keys
from codesign.kernels.row_samplings import AnySampling, RowSamplings, is_greedy
from codesign.policy.walk import Sampling, request_key

SAMPLINGS = [Sampling(), Sampling(0.7), Sampling(4.0)]
FIRST = 300  # token of the head's first row


def made(rows: int, tokens: int, hidden: int, *, spread: float = 0.0) -> tuple[Tensor, Tensor]:
    """Hidden rows and a head, some columns and rows larger than others."""
    generator = torch.Generator().manual_seed(tokens + hidden)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x_TD = normal(rows, hidden) * torch.exp(spread * normal(hidden))
    head_VD = normal(tokens, hidden) * torch.exp(spread * normal(tokens, 1))
    return x_TD.bfloat16(), head_VD.bfloat16()


def keys(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    words = np.array([request_key(2, row) for row in range(rows)], np.uint64).view(np.int32)
    low, high = torch.from_numpy(words.reshape(-1, 2).T.copy())
    return low, high, torch.arange(rows, dtype=torch.int32) + 70_000


def all_open(codes: HeadCodes) -> HeadCodes:
    """The same head with a copy that nobody trusts."""
    return replace(codes, lengths_2V=codes.lengths_2V * 1e9)


@pytest.fixture(params=["greedy", "warm", "hot", "by row"])
def sampling(request, each_its_own):
    """How any number of rows sample: ``sampling(rows)``."""
    if request.param == "by row":
        return lambda rows: each_its_own([SAMPLINGS[(2 - i) % 3] for i in range(rows)])
    return lambda _: SAMPLINGS[["greedy", "warm", "hot"].index(request.param)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from([16, 576, 2048]), st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from([1e-20, 1.0, 1e8]),
)  # fmt: skip
def test_no_logit_is_further_away_than_its_bound(seed, hidden, spread, size):
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(4, hidden, generator=generator)
    x_TD = (x_TD * torch.exp(spread * torch.randn(hidden, generator=generator)) * size).bfloat16()
    head_VD = torch.randn(60, hidden, generator=generator)
    head_VD *= torch.exp(spread * torch.randn(60, hidden, generator=generator))
    head_VD = head_VD.bfloat16()
    head_VD[7], x_TD[2] = 0.0, 0.0
    coarse_TV, bounds_TV = coarse_and_bounds(HeadCodes.of(head_VD), RowCodes.of(x_TD))
    exact_TV = x_TD.double() @ head_VD.double().t()
    assert ((coarse_TV - exact_TV).abs() <= bounds_TV).all()


def test_the_bound_is_what_rounding_to_int8_costs():
    x_TD, head_VD = made(4, 2000, 1024)
    coarse_TV, bounds_TV = coarse_and_bounds(HeadCodes.of(head_VD), RowCodes.of(x_TD))
    exact_TV = x_TD.double() @ head_VD.double().t()
    assert float(bounds_TV.mean() / exact_TV.std()) == pytest.approx(0.0066 * 1024**0.5, rel=0.1)
    assert float((coarse_TV - exact_TV).std() / exact_TV.std()) == pytest.approx(0.0066, rel=0.1)


def test_samples_are_those_of_the_whole_head(sampling):
    x_TD, head_VD = made(8, 3000, 320, spread=0.5)
    codes = HeadCodes.of(head_VD)
    noise = keys(8)
    logits_TV = (x_TD.float() @ head_VD.float().t())[:, :2900]
    wanted = best_tokens(logits_TV, row_keys(*noise), sampling(8), first_token=FIRST)
    found = sample_rows(codes, x_TD, *noise, sampling(8), num_tokens=2900, first_token=FIRST)
    assert found[1].tolist() == wanted[1].tolist()
    assert found[0].tolist() == pytest.approx(wanted[0].tolist(), abs=1e-4)


def test_few_tokens_are_open():
    x_TD, head_VD = made(8, 3000, 320)
    coarse_TV, bounds_TV = coarse_and_bounds(HeadCodes.of(head_VD), RowCodes.of(x_TD))
    lowest_T1 = (coarse_TV - bounds_TV).amax(dim=1, keepdim=True)
    assert int((coarse_TV + bounds_TV >= lowest_T1).sum()) < 8 * 10


def test_a_head_on_a_cpu_or_of_other_numbers_has_no_copy():
    assert not takes(torch.zeros(32, 64, dtype=torch.bfloat16))
    assert not takes(None)


@pytest.fixture
def kernels(interpreted):
    """The Triton kernels in the interpreter."""
    return interpreted("keyed_noise_triton", "keyed_sampling_triton", "head_codes_triton")[2]


def sampled(kernels, codes: HeadCodes, x_TD: Tensor, sampling: AnySampling, num_tokens: int):
    scores_T, tokens_T = kernels.sample_rows(
        codes, x_TD, *keys(len(x_TD)), sampling, num_tokens=num_tokens,
        first_token=FIRST,
    )  # fmt: skip
    return scores_T.tolist(), tokens_T.tolist()


@pytest.mark.parametrize(("rows", "tokens", "hidden"), [(1, 130, 16), (3, 2300, 576), (9, 600, 64)])
def test_the_kernels_round_and_multiply_as_the_reference(kernels, rows, tokens, hidden):
    x_TD, head_VD = made(rows, tokens, hidden, spread=1.0)
    x_TD[0, 1:] = 0.0  # one plane of codes at its end
    codes, row_codes = HeadCodes.of(head_VD), RowCodes.of(x_TD)
    coarse_TV, rows_T3 = kernels.coarse_logits(codes, x_TD)
    wanted_TV = coarse_logits(codes, x_TD)
    assert coarse_TV.shape == wanted_TV.shape
    # A code on an edge may go either way.
    limit_TV = 2 * row_codes.rows_T3[:, :1] * codes.scales_UV.amax(0) * 127
    assert ((coarse_TV - wanted_TV).abs() <= limit_TV).all()
    assert torch.allclose(rows_T3[:rows, :2], row_codes.rows_T3[:, :2], rtol=1e-6)
    assert torch.allclose(rows_T3[:rows, 2], row_codes.rows_T3[:, 2], rtol=0.05)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # int64 wraps on purpose
def test_the_kernels_sample_as_the_reference(kernels, sampling):
    x_TD, head_VD = made(3, 2300, 64, spread=0.5)
    head_VD[[40, 2200]] = 3 * head_VD[2100]  # a tie goes to the first
    x_TD[2] = head_VD[2100]
    sampling = sampling(3)
    codes = HeadCodes.of(head_VD)
    scores, tokens = sampled(kernels, codes, x_TD, sampling, 2250)
    wanted = sample_rows(codes, x_TD, *keys(3), sampling, num_tokens=2250, first_token=FIRST)
    assert tokens == wanted[1].tolist()
    assert scores == pytest.approx(wanted[0].tolist(), abs=1e-4)
    if is_greedy(sampling) or isinstance(sampling, RowSamplings):  # the last row is greedy
        assert tokens[2] == FIRST + 40


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_what_the_kernels_leave_out_changes_no_bit(kernels, sampling):
    x_TD, head_VD = made(2, 300, 48, spread=0.5)  # two blocks, all open
    codes = HeadCodes.of(head_VD)
    found = sampled(kernels, codes, x_TD, sampling(2), 290)
    assert found == sampled(kernels, all_open(codes), x_TD, sampling(2), 290)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # what the test is about
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_rows_without_numbers_give_tokens_that_there_are(kernels, broken: float):
    x_TD, head_VD = made(2, 300, 64)
    x_TD[0, 3] = broken
    found = sampled(kernels, HeadCodes.of(head_VD), x_TD, Sampling(), 300)[1]
    assert FIRST <= found[0] < FIRST + 300
    assert found[1] == FIRST + int((x_TD[1].float() @ head_VD.float().t()).argmax())


def test_a_part_of_the_head_without_tokens_never_wins(kernels):
    x_TD, head_VD = made(2, 200, 64)
    codes = HeadCodes.of(head_VD)
    scores, tokens = sampled(kernels, codes, x_TD, Sampling(), 0)
    assert scores == [-torch.inf, -torch.inf]
    assert tokens == [FIRST, FIRST]
    wanted = sample_rows(codes, x_TD, *keys(2), Sampling(), num_tokens=0, first_token=FIRST)
    assert (wanted[0].tolist(), wanted[1].tolist()) == (scores, tokens)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-300])
def test_no_temperature_is_too_small(kernels, temperature: float):
    x_TD, head_VD = made(2, 300, 64)
    head_VD = -head_VD.abs()
    x_TD = x_TD.abs()
    tokens = sampled(kernels, HeadCodes.of(head_VD), x_TD, Sampling(temperature), 300)[1]
    assert tokens == [FIRST + int(i) for i in (x_TD.float() @ head_VD.float().t()).argmax(1)]


COMPILED = """
from codesign.kernels import head_codes_triton as kernels
TYPES = {
    "codes": "*i8", "planes": "*i8", "x": "*bf16", "head": "*bf16", "lower_ends": "*fp32",
    "scores": "*fp64", "columns": "*i32", "temperatures": "i64",
    **dict.fromkeys(("key_low", "key_high", "positions"), "*i32"),
    **dict.fromkeys(("scales", "hidden_rows", "coarse", "lengths", "upper_ends"), "*fp32"),
    "token_lengths": "*fp32",
}
def made_of(kernel, constants, warps):
    aligned = ("*", "hidden", "num_tokens", "stride")
    return compiled(kernel, TYPES, constants, aligned, num_warps=warps)
for rows in (8, 64):
    fixed = {"ROWS": rows, "BLOCK": kernels.MULTIPLIED, "COLUMNS": 256, "STAGES": 3}
    made = made_of(kernels._multiply_codes, fixed, kernels.num_warps(rows))
    assert "wgmma.mma_async.sync.aligned.m64n%dk32.s32.s8.s8" % (2 * rows) in made.asm["ptx"]
    assert made.metadata.shared >= 3 * 256 * kernels.MULTIPLIED  # copies of three stages in flight
    keep(made)
made_of(kernels._round_rows, {"PADDED": 8192}, 8)
for samples, by_row in ((False, False), (True, False), (True, True)):
    TYPES["temperatures"] = "*fp64" if by_row else "i64"
    ways = {"SAMPLES": samples, "BY_ROW": by_row}
    made_of(kernels._score_ends, ways | {"BLOCK": kernels.SCORED}, 8)
    fixed = {"BLOCK": kernels.OPENED, "PADDED": 64, "COLUMNS": 8192}
    made_of(kernels._score_open, ways | fixed, 4)
"""


def test_the_kernels_compile_for_hopper_with_values_in_registers(assert_keeps_values_in_registers):
    assert_keeps_values_in_registers(COMPILED)
