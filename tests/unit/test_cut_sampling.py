"""Rows cut by top-k and top-p: without sorting, the tokens that codesign/policy/walk.py gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from codesign.kernels.keyed_sampling import best_tokens, row_keys
from codesign.policy.walk import Sampling, request_key, sample_token

TOKENS = 4500  # three blocks of columns, of the last launch two
WAYS = [
    Sampling(1.0, top_p=0.8),
    Sampling(0.9, top_k=50, top_p=0.6),
    Sampling(),
    Sampling(1.3, top_k=20),
    Sampling(1.0, top_k=1),
    Sampling(0.7),
    Sampling(1.0, top_p=1e-9),
    Sampling(2.0, top_k=TOKENS, top_p=0.05),
    Sampling(1.0, top_k=TOKENS + 9),
    Sampling(0.3, top_k=TOKENS // 2, top_p=0.99),
    Sampling(0.0, top_k=3, top_p=0.5),  # cuts change nothing
]


def normal(rows: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(rows, tokens, generator=torch.Generator().manual_seed(rows + tokens))


def ties(rows: int) -> Tensor:
    """Few different logits, zeros of both signs among them."""
    logits = torch.round(2 * normal(rows)) / 2
    logits[:, ::7] *= -1
    return logits


def with_padding(rows: int) -> Tensor:
    logits = 3 * normal(rows)
    logits[:, TOKENS - 300 :] = -torch.inf
    logits[:, 2 : TOKENS - 310 : 2] = -torch.inf
    return logits


LOGITS = {
    "random": lambda rows: 3 * normal(rows),
    "peaked": lambda rows: normal(rows).double().pow(5).float(),
    "below zero": lambda rows: -50 - normal(rows).abs(),
    "ties": ties,
    "flat": lambda rows: torch.full((rows, TOKENS), -0.25),
    "nearly flat": lambda rows: 0.01 * normal(rows),
    "with padding": with_padding,
}


def keys(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of requests that are called as their row, behind positions 70,000 and on."""
    words = np.array([request_key(0, row) for row in range(rows)], np.uint64).view(np.int32)
    low, high = torch.from_numpy(words.reshape(-1, 2).T.copy())
    return low, high, torch.arange(rows, dtype=torch.int32) + 70_000


def walked(logits_TV: Tensor, samplings: list[Sampling]) -> list[int]:
    """What ``walk.sample_token`` gives."""
    rows = enumerate(zip(logits_TV.numpy(), samplings, strict=True))
    return [
        sample_token(logits, own, request_id=i, position=70_001 + i)
        for i, (logits, own) in rows
    ]  # fmt: skip


@pytest.mark.parametrize("logits", LOGITS)
def test_the_reference_samples_as_the_walk(logits, each_its_own):
    logits_TV = LOGITS[logits](44)
    ways = WAYS * 4
    found = best_tokens(logits_TV, row_keys(*keys(44)), each_its_own(ways))[1]
    assert found.tolist() == walked(logits_TV, ways)


# int64 wraps on purpose; and what settled rows left in memory is read, though it decides nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:All-NaN")


@pytest.fixture
def kernels(interpreted):
    """The Triton kernels in the interpreter."""
    names = "keyed_noise_triton", "keyed_sampling_triton", "top_k_triton", "cut_sampling_triton"
    return interpreted(*names)[3]


@pytest.mark.parametrize("logits", LOGITS)
def test_the_kernels_sample_as_reference_and_walk(logits, kernels, each_its_own):
    rows = len(WAYS)
    logits_TV, samplings = LOGITS[logits](rows), each_its_own(WAYS)
    scores_T, tokens_T = kernels.sample_rows(logits_TV, *keys(rows), samplings)
    wanted = best_tokens(logits_TV, row_keys(*keys(rows)), samplings)
    assert tokens_T.tolist() == walked(logits_TV, WAYS) == wanted[1].tolist()
    assert scores_T.tolist() == pytest.approx(wanted[0].tolist(), rel=1e-12)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.7, top_k=30), Sampling(0.7, top_p=0.4), Sampling(1.0, top_k=9, top_p=0.9)],
    ids=str,
)
def test_all_rows_may_sample_alike(sampling, kernels, each_its_own):
    logits_TV = normal(3, 2100)
    found = kernels.sample_rows(logits_TV, *keys(3), sampling)
    assert found[1].tolist() == walked(logits_TV, [sampling] * 3)
    by_row = kernels.sample_rows(logits_TV, *keys(3), each_its_own([sampling] * 3))
    assert [part.tolist() for part in by_row] == [part.tolist() for part in found]


@pytest.mark.parametrize(("rows", "tokens"), [(20, 300), (16, TOKENS)])
def test_a_row_among_others_has_the_bits_that_it_has_alone(rows, tokens, kernels, each_its_own):
    ways = [WAYS[i % len(WAYS)] for i in range(rows)]
    logits_TV = 2 * normal(rows, tokens)
    whole = torch.zeros(rows, tokens + 20)  # rows need not lie side by side
    whole[:, :tokens] = logits_TV
    scores_T, tokens_T = kernels.sample_rows(whole[:, :tokens], *keys(rows), each_its_own(ways))
    assert tokens_T.tolist() == walked(logits_TV, ways)
    for i in range(int(tokens == TOKENS), len(WAYS), 2):
        own = [column[i : i + 1].clone() for column in keys(rows)]
        alone = kernels.sample_rows(logits_TV[i : i + 1], *own, each_its_own(ways[i : i + 1]))
        assert [part.tolist() for part in alone] == [[scores_T[i].item()], [tokens_T[i].item()]]


def test_it_does_not_matter_which_launch_settles_a_row(kernels, monkeypatch):
    logits_TV, sampling = 0.3 * normal(5), Sampling(1.0, top_p=0.002)  # most candidates drop out
    found = []
    for rounds in (1, 6):
        monkeypatch.setattr(kernels, "ROUNDS", rounds)
        found.append([x.tolist() for x in kernels.sample_rows(logits_TV, *keys(5), sampling)])
    assert found[0] == found[1]
    assert found[0][1] == walked(logits_TV, [sampling] * 5)


def test_a_token_behind_just_the_share_is_dropped(kernels):
    """Of sixteen equal ones the first has a sixteenth, and the second comes behind that."""
    logits_TV, sampling = torch.zeros(12, 16), Sampling(1.0, top_p=1 / 16)
    tokens = kernels.sample_rows(logits_TV, *keys(12), sampling)[1].tolist()
    assert tokens == walked(logits_TV, [sampling] * 12) == [0] * 12
    assert best_tokens(logits_TV, row_keys(*keys(12)), sampling)[1].tolist() == tokens


def test_many_unlikely_tokens_have_a_mass(kernels):
    """Two thousand of a ten-thousandth each beside one: 0.9 of all mass has four in ten of them."""
    logits_TV, sampling = torch.full((24, 2001), float(np.log(1e-4))), Sampling(1.0, top_p=0.9)
    logits_TV[:, 7] = 0.0
    tokens = kernels.sample_rows(logits_TV, *keys(24), sampling)[1].tolist()
    assert tokens == walked(logits_TV, [sampling] * 24)
    assert len(set(tokens)) > 1


@pytest.mark.parametrize(
    ("ways", "unused"),
    [
        ([Sampling(1.0, top_p=0.5), Sampling()], ["count_digits"]),
        ([Sampling(1.0, top_k=5), Sampling(0.5)], ["_look_ahead", "_settle"]),
        ([Sampling(0.0, top_k=3), Sampling(1.0, top_p=0.5)], ["count_digits"]),
    ],
)
def test_what_no_row_needs_is_not_launched(ways, unused, kernels, each_its_own, monkeypatch):
    for name in unused:
        monkeypatch.setattr(kernels, name, None)
    logits_TV = normal(2, 2100)
    found = kernels.sample_rows(logits_TV, *keys(2), each_its_own(ways))[1]
    assert found.tolist() == walked(logits_TV, ways)


@pytest.mark.filterwarnings("ignore:invalid value")  # what the test is about
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_numbers_give_tokens_that_there_are(broken, kernels):
    sampling, columns = Sampling(1.0, top_k=40, top_p=0.5), 300 if broken == torch.inf else 2100
    logits_TV = normal(3, columns)  # infinite ones are looked at one by one
    logits_TV[0] = broken
    logits_TV[1, 5:9] = broken
    tokens = kernels.sample_rows(logits_TV, *keys(3), sampling)[1].tolist()
    assert all(0 <= token < columns for token in tokens)
    assert tokens[2] == walked(normal(3, columns), [sampling] * 3)[2]


COMPILED = """
from codesign.kernels import cut_sampling_triton as kernels, top_k_triton
TYPES = {
    **dict.fromkeys(("logits", "floors", "highest"), "*fp32"),
    **dict.fromkeys(("scores", "best_scores"), "*fp64"), "masses": "*i64",
    **dict.fromkeys(("key_low", "key_high", "positions", "bins", "states"), "*i32"),
    **dict.fromkeys(("columns", "best_tokens"), "*i32"),
}
def check(kernel, constants, warps=8):
    keep(compiled(kernel, TYPES, constants, ("*", "stride"), num_warps=warps))
for by_row in (False, True):
    ways = dict.fromkeys(("temperatures", "top_ks", "top_ps"), "*fp64" if by_row else "i64")
    TYPES |= ways
    fixed = {"BY_ROW": by_row, "BLOCK": kernels.BLOCK}
    PART
"""
ROUNDS = """for i in range(kernels.ROUNDS, 0, -1):  # the first needs most
        check(kernels._look_ahead, fixed | {"ROUND": i, "PARTS": 4, "PADDED": 64})"""
OTHERS = """for digit in range(4):
        check(top_k_triton._count_digit, fixed | {"DIGIT": digit})
    for has_top_k in (False, True):
        check(kernels._first_candidates, fixed | {"HAS_TOP_K": has_top_k})
    fixed |= {"ROUND": kernels.ROUNDS + 1, "BLOCK": kernels.SETTLED, "PADDED": 64}
    check(kernels._settle, fixed, 16)"""


@pytest.mark.parametrize("part", [ROUNDS, OTHERS], ids=["rounds", "others"])
def test_the_kernels_compile_for_hopper_with_values_in_registers(
    part, assert_keeps_values_in_registers
):
    assert_keeps_values_in_registers(COMPILED.replace("PART", part))
