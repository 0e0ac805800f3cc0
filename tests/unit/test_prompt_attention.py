"""Attention of prompts: what a row sees, in one piece and in several, and which operation runs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from codesign.kernels import prompt_attention as module
from codesign.kernels.prompt_attention import prompt_attention, slab_attention, takes_slabs


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


SLOTS, TOKENS, PAGE = 3, 400, 16


class Slab:
    """Keys and values of a slab, whole or in pages that lie anywhere; what is not its own is NaN.

    Args:
        rows: Of it that are there.
        paged: Whether it lies in pages.
    """

    def __init__(self, rows: int, *, paged: bool, size: int = 16) -> None:
        self.slot, num_pages = 1, TOKENS // PAGE
        self.parts = [random(rows, 2, size, seed=seed) for seed in (1, 2)]
        self.tables = None
        shape = (SLOTS * num_pages, 2, PAGE, size) if paged else (SLOTS, 2, TOKENS, size)
        self.slabs = [torch.full(shape, torch.nan) for _ in self.parts]
        slots, places = torch.full((rows,), self.slot), torch.arange(rows)
        if paged:
            self.tables = torch.zeros(SLOTS, num_pages, dtype=torch.int32)
            held = -(-rows // PAGE)  # it has no more pages than it needs
            order = torch.randperm(SLOTS * num_pages, generator=torch.Generator().manual_seed(3))
            self.tables[self.slot, :held] = order[:held]
            slots, places = order[places // PAGE], places % PAGE
        for slab, part in zip(self.slabs, self.parts, strict=True):
            slab[slots, :, places] = part

    def words(self, *values: int) -> list[Tensor]:
        return [torch.tensor([value], dtype=torch.int32) for value in (self.slot, *values)]

    def expected(self, q_THE: Tensor) -> Tensor:
        return prompt_attention(q_THE, *(part.transpose(0, 1)[None] for part in self.parts))


@pytest.fixture
def kernel(interpreted):
    """The Triton kernel in the interpreter."""
    return interpreted("prompt_attention_triton")[0].attend


PIECES = [(0, 1, 16), (0, 16, 16), (0, 70, 128), (5, 1, 16), (131, 30, 32), (200, 64, 64)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("start", "count", "bucket"), PIECES)
def test_a_padded_piece_reads_its_slab_by_what_device_memory_says(
    kernel, start: int, count: int, bucket: int, paged: bool
):
    slab, q = Slab(start + count, paged=paged), random(bucket, 6, 16, seed=0)
    words, expected = slab.words(start, count), slab.expected(q[:count])
    for attend in (slab_attention, kernel):
        found = attend(q, *slab.slabs, *words, slab.tables)
        torch.testing.assert_close(found[:count], expected, rtol=1e-4, atol=1e-5)
        assert found.isfinite().all()


@pytest.fixture
def products_in_one_order(monkeypatch):
    """Products as tensor cores make them: a row has the same bits wherever it stands in a block.

    NumPy's have not on every CPU: OpenBLAS may add up the last rows of a block in another order.
    """

    def matmul(a, b, dtype=None):
        return (a[:, :, None] * b[None]).sum(1, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("products_in_one_order")
def test_a_row_has_the_same_bits_however_its_prompt_is_cut_padded_and_stored(kernel):
    q = random(128, 4, 16, seed=0)
    whole, paged = Slab(100, paged=False), Slab(100, paged=True)
    once = kernel(q, *whole.slabs, *whole.words(0, 100), None)[:100]
    for start, end, bucket in ((0, 100, 128), (0, 33, 64), (33, 99, 128), (99, 100, 16)):
        padded = random(bucket, 4, 16, seed=end)
        padded[: end - start] = q[start:end]
        found = kernel(padded, *paged.slabs, *paged.words(start, end - start), paged.tables)
        assert torch.equal(found[: end - start], once[start:end])


COMPILED = """
from codesign.kernels.prompt_attention_triton import KEYS, ROWS, _attend
constants = {"PAGE": 64, "E": 128, "ROWS": ROWS, "KEYS": KEYS}
types = {"scale": "fp32"} | dict.fromkeys(("q", "keys", "values", "out"), "*bf16")
types |= dict.fromkeys(("slots", "starts", "counts", "tables"), "*i32")
aligned = ("q", "keys", "values", "out", "q_stride", "slab_stride", "head_stride")
made = compiled(_attend, types, constants, aligned, num_warps=4, num_stages=2)
assert "wgmma.mma_async" in made.asm["ptx"]
assert 2 * made.metadata.shared <= 227 << 10
keep(made)
"""


def test_the_kernel_compiles_for_hopper_with_values_in_registers(assert_keeps_values_in_registers):
    assert_keeps_values_in_registers(COMPILED)


def test_only_a_gpu_has_a_kernel_for_slabs():
    on_cpu = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    assert not takes_slabs(head_dim=64, **on_cpu)
