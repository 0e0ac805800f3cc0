"""Attention of prompts: what a row sees, in one piece and in several, and which operation runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from codesign.kernels import prompt_attention as module
from codesign.kernels.prompt_attention import prompt_attention


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def expected(q_THE: Tensor, keys_GSE: Tensor, values_GSE: Tensor) -> Tensor:
    rows, heads, size = q_THE.shape
    before = keys_GSE.shape[1] - rows
    found = torch.empty(rows, heads, size)
    for row in range(rows):
        for head in range(heads):
            group = head * keys_GSE.shape[0] // heads
            seen = slice(before + row + 1)
            weights = (keys_GSE[group, seen] @ q_THE[row, head] / size**0.5).softmax(0)
            found[row, head] = weights @ values_GSE[group, seen]
    return found.flatten(1)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("heads", [2, 6])
def test_a_row_sees_those_up_to_itself(before: int, heads: int):
    q = random(7, heads, 16, seed=0)
    keys, values = random(2, before + 7, 16, seed=1), random(2, before + 7, 16, seed=2)
    found = prompt_attention(q, keys[None], values[None])
    torch.testing.assert_close(found, expected(q, keys, values))


def test_on_a_gpu_the_flash_kernel_gets_the_same_rows(monkeypatch: pytest.MonkeyPatch):
    taken = []

    def flash(q_1HTE, keys_1GSE, values_1GSE, dropout, causal, *, scale):
        taken.append((q_1HTE.shape, keys_1GSE.shape, dropout, causal, scale))
        rows = q_1HTE[0].transpose(0, 1)
        out = expected(rows, keys_1GSE[0], values_1GSE[0])
        return out.view(rows.shape).transpose(0, 1)[None], "and more"

    op = SimpleNamespace(default=flash)
    ops = SimpleNamespace(aten=SimpleNamespace(_scaled_dot_product_flash_attention=op))
    q, keys, values = random(3, 4, 16, seed=0), random(2, 5, 16, seed=1), random(2, 5, 16, seed=2)
    plain = prompt_attention(q, keys[None], values[None])
    monkeypatch.setattr(module, "_runs_flash", lambda _: True)
    monkeypatch.setattr(module.torch, "ops", ops)
    torch.testing.assert_close(prompt_attention(q, keys[None], values[None]), plain)
    assert taken == [((1, 4, 3, 16), (1, 2, 5, 16), 0.0, True, 0.25)]


def test_other_types_and_devices_keep_to_pytorchs_choice():
    assert not module._runs_flash(torch.zeros(1, 1, 64, dtype=torch.bfloat16))
    assert not module._runs_flash(torch.zeros(1, 1, 64, device="meta"))
