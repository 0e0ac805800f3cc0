"""The rows of the next step of plain decoding: rows of requests go on, padding stays."""

from __future__ import annotations

import pytest
import torch

from codesign.kernels import next_rows as ops


@pytest.fixture(params=["reference", "kernel"])
def next_rows(request):
    """The op and its Triton kernel in the interpreter."""
    if request.param == "reference":
        return ops.next_rows
    return request.getfixturevalue("interpreted")("next_rows_triton")[0].next_rows


@pytest.mark.parametrize(("num_rows", "count"), [(8, 8), (8, 1), (8, 0), (32, 24), (128, 100)])
def test_each_row_of_a_request_is_one_token_on(next_rows, num_rows, count):
    generator = torch.Generator().manual_seed(num_rows + count)
    columns = torch.randint(0, 1000, (4, num_rows), generator=generator, dtype=torch.int32)
    sampled = torch.randint(0, 50_000, (num_rows,), generator=generator, dtype=torch.int32)
    before = columns.clone()
    number = torch.tensor([count], dtype=torch.int32)
    next_rows(sampled, number, ops.NextRows(*columns))
    assert columns[0, :count].tolist() == sampled[:count].tolist()
    assert torch.equal(columns[1:, :count], before[1:, :count] + 1)
    assert torch.equal(columns[:, count:], before[:, count:]), "padding has changed"
    assert number.tolist() == [count]
