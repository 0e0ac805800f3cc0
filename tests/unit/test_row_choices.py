from __future__ import annotations

import pytest
import torch
from torch import Tensor

from codesign.kernels.row_choices import choice_words, row_choices


@pytest.fixture
def kernels(interpreted):
    """The Triton kernels in the interpreter."""
    return interpreted("row_choices_triton")[0]


def logits(rows: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(rows, tokens, generator=generator) * 3


def test_choices_come_largest_first_with_the_logarithm_of_the_sum():
    x = torch.tensor([[0.0, 2.0, -torch.inf, 1.0]])
    values, columns, total = row_choices(x, 3)
    assert columns.tolist() == [[1, 3, 0]]
    assert values.tolist() == [[2.0, 1.0, 0.0]]
    expected = torch.log(torch.tensor(1.0) + torch.exp(torch.tensor(2.0)) + torch.e)
    assert torch.allclose(total, expected)


@pytest.mark.parametrize(("tokens", "count"), [(5, 5), (2048, 8), (2049, 3), (7000, 1), (1, 1)])
def test_the_kernels_choose_as_the_reference(kernels, tokens: int, count: int):
    x = logits(3, tokens)
    expected, found = row_choices(x, count), kernels.row_choices(x, count)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.allclose(found[2], expected[2], rtol=1e-6)


def test_columns_of_no_token_come_last_and_a_block_of_them_adds_nothing(kernels):
    x = logits(2, 5000)
    x[:, 2048:] = -torch.inf
    x[1, 3:] = -torch.inf
    values, columns, total = kernels.row_choices(x, 4)
    assert torch.allclose(total, torch.logsumexp(x, dim=-1))
    assert torch.equal(values, x.topk(4).values)
    assert columns[1].tolist()[3] == 3, "the first of the columns of no token"


def test_of_equal_logits_the_lower_column_comes_first(kernels):
    x = torch.zeros(1, 4100)
    x[0, [7, 4099]] = 1.0
    assert kernels.row_choices(x, 4)[1].tolist() == [[7, 4099, 0, 1]]


def test_rows_may_lie_apart(kernels):
    whole = logits(4, 3000)
    part = whole[:, :2500]
    assert torch.equal(kernels.row_choices(part, 2)[1], part.topk(2).indices)


@pytest.mark.parametrize("mapped", [False, True])
def test_an_answer_holds_tokens_and_then_the_bits_of_log_probabilities(kernels, mapped: bool):
    x = logits(3, 5000)
    token_map = torch.randperm(5000) if mapped else None
    expected = choice_words(x, 3, token_map=token_map)
    found = kernels.choice_words(x, 3, token_map)
    assert found.dtype == expected.dtype == torch.int32
    assert torch.equal(found[:9], expected[:9])
    assert torch.allclose(found[9:].view(torch.float32), expected[9:].view(torch.float32))
    best = torch.log_softmax(x, -1).max(-1)
    assert torch.allclose(expected[9::3].view(torch.float32), best.values)
    tokens = best.indices if token_map is None else token_map[best.indices]
    assert expected[:9:3].tolist() == tokens.tolist()
