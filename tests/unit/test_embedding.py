from __future__ import annotations

import pytest
import torch

from codesign.kernels.embedding import embed_rows
from codesign.kernels.reference import rotary_frequencies, rotary_tables
from codesign.models.shape import Rope


def test_a_forward_begins_with_rows_of_the_embedding_and_angles():
    embedding, rope = torch.randn(50, 24), Rope(10_000.0)
    tokens = torch.tensor([3, 49, 3], dtype=torch.int32)
    positions = torch.tensor([0, 7, 2000], dtype=torch.int32)
    x, cos, sin = embed_rows(tokens, positions, embedding, rotary_frequencies(rope, 16))
    assert torch.equal(x, embedding[[3, 49, 3]])
    expected = rotary_tables(positions, rotary_frequencies(rope, 16))
    assert torch.equal(cos, expected[0][:, 0, 8:])
    assert torch.equal(sin, expected[1][:, 0, 8:])


@pytest.mark.parametrize("hidden", [64, 1024, 1500])
def test_the_kernel_begins_it_alike(interpreted, hidden: int):
    (kernel,) = interpreted("embedding_triton")
    embedding = torch.randn(20, hidden)
    tokens = torch.tensor([0, 19, 5], dtype=torch.int32)
    positions = torch.tensor([1, 0, 40_000], dtype=torch.int32)
    frequency = rotary_frequencies(Rope(500_000.0), 48)
    found = kernel.embed_rows(tokens, positions, embedding, frequency)
    for one, other in zip(found, embed_rows(tokens, positions, embedding, frequency), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
