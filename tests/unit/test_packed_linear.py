from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from codesign.kernels import packed_linear
from codesign.kernels.int4 import Int4Weight, quantize_int4
from codesign.kernels.packed_linear import (
    PackedMap,
    PackedSwiglu,
    add_map,
    linear_map,
    swiglu_map,
)
from codesign.kernels.packed_reference import Norm
from codesign.kernels.reference import int4_linear, rms_norm, swiglu


def weight(rows: int, columns: int) -> Int4Weight:
    return quantize_int4(torch.randn(rows, columns), group=128)


@pytest.fixture
def norm() -> Norm:
    return Norm(torch.randn(256).to(torch.bfloat16), 1e-5)


def test_a_map_with_its_norm_is_the_norm_and_then_the_map(norm: Norm):
    matrix, bias = weight(48, 256), torch.randn(48).to(torch.bfloat16)
    x = torch.randn(5, 256).to(torch.bfloat16)
    normed = rms_norm(x, norm.weight_K, norm.eps)
    assert torch.equal(linear_map(matrix, bias, norm=norm)(x), int4_linear(normed, matrix, bias))
    dense = torch.randn(48, 256).to(torch.bfloat16)
    assert torch.equal(linear_map(dense, bias, norm=norm)(x), F.linear(normed, dense, bias))
    assert torch.equal(linear_map(dense)(x), F.linear(x, dense))


def test_a_swiglu_takes_gates_above_ups(norm: Norm):
    matrix, x = weight(64, 256), torch.randn(3, 256).to(torch.bfloat16)
    normed = rms_norm(x, norm.weight_K, norm.eps)
    assert torch.equal(swiglu_map(matrix, norm=norm)(x), swiglu(int4_linear(normed, matrix)))


def test_what_the_kernels_cannot_run_is_not_packed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_linear, "can_pack", lambda _: True)
    assert isinstance(linear_map(weight(48, 256)), PackedMap)
    assert isinstance(swiglu_map(weight(64, 256)), PackedSwiglu)
    assert not isinstance(swiglu_map(weight(24, 256)), PackedSwiglu), "half a tile of gates"
    assert not isinstance(linear_map(torch.randn(48, 256)), PackedMap)


def test_the_packed_rows_of_a_swiglu_are_gates_and_ups_in_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_linear, "can_pack", lambda _: True)
    matrix, x = weight(64, 256), torch.randn(300, 256).to(torch.bfloat16)  # rows of a prompt
    found = swiglu_map(matrix)(x).float()
    expected = swiglu(int4_linear(x, matrix)).float()
    assert (found - expected).norm() < 1e-2 * expected.norm()


def test_a_map_is_added_to_the_residual_in_its_launch_where_it_is_packed(
    monkeypatch: pytest.MonkeyPatch,
):
    matrix, residual = weight(48, 256), torch.randn(300, 48).to(torch.bfloat16)
    x = torch.randn(300, 256).to(torch.bfloat16)
    plain = linear_map(matrix)
    assert torch.equal(add_map(plain, x, residual), residual + plain(x))
    assert not isinstance(plain, PackedMap)
    monkeypatch.setattr(packed_linear, "can_pack", lambda _: True)
    packed = linear_map(matrix)
    assert isinstance(packed, PackedMap)
    found, expected = add_map(packed, x, residual).float(), (residual + plain(x)).float()
    assert (found - expected).norm() < 1e-2 * expected.norm()
