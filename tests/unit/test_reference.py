from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from codesign.kernels import (  # noqa: E402
    pad_rows,
    padded_rows,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    rotate,
    swiglu,
    tree_attention,
)
from codesign.kernels.reference import PlainLinear  # noqa: E402
from codesign.kernels.skinny_linear import SkinnyLinear  # noqa: E402
from codesign.models.shape import Llama3Scaling, Rope  # noqa: E402


def random(*size: int, seed: int = 0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_divides_by_the_root_mean_square():
    x, weight = random(3, 8), random(8, seed=1)
    want = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 0.1), want)


def test_swiglu_takes_the_gate_from_the_first_half():
    gate, up = random(3, 5), random(3, 5, seed=1)
    want = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(swiglu(torch.cat((gate, up), -1)), want)


def test_a_rotated_product_depends_on_the_distance_alone():
    frequency = rotary_frequencies(Rope(100.0), 8)
    q, k = random(1, 1, 8), random(1, 1, 8, seed=1)

    def product(i: int, j: int) -> float:
        q_at = rotate(q, *rotary_tables(torch.tensor([i]), frequency))
        return float((q_at * rotate(k, *rotary_tables(torch.tensor([j]), frequency))).sum())

    assert product(7, 3) == pytest.approx(product(14, 10), abs=1e-5)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-3)


def test_rotation_pairs_the_halves_of_a_head():
    frequency = rotary_frequencies(Rope(100.0), 4)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned = rotate(x, *rotary_tables(torch.tensor([5]), frequency))[0, 0]
    for pair, angle in ((0, 5.0), (1, 0.5)):
        a, b = float(x[0, 0, pair]), float(x[0, 0, pair + 2])
        assert float(turned[pair]) == pytest.approx(a * math.cos(angle) - b * math.sin(angle))
        assert float(turned[pair + 2]) == pytest.approx(b * math.cos(angle) + a * math.sin(angle))


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones():
    rope = Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain, scaled = rotary_frequencies(Rope(500000.0), 128), rotary_frequencies(rope, 128)
    ratio = plain / scaled
    assert float(ratio[0]) == 1.0
    assert float(ratio[-1]) == pytest.approx(8.0)
    between = ratio[(8192 / (2 * math.pi / plain) > 1) & (8192 / (2 * math.pi / plain) < 4)]
    assert len(between) > 2
    assert bool(((between > 1) & (between < 8)).all())


@pytest.mark.parametrize("causal", [False, True])
def test_tree_attention_equals_a_loop_over_rows_and_heads(causal: bool):
    rows, heads, kv_heads, size = 5, 6, 2, 4
    slab = rows if causal else 9
    q, k = random(rows, heads, size), random(kv_heads, slab, size, seed=1)
    v = random(kv_heads, slab, size, seed=2)
    if causal:
        visible = torch.ones(rows, rows, dtype=torch.bool).tril()
    else:
        visible = random(rows, slab, seed=3) > 0
        visible[:, 0] = True
    bias = None if causal else torch.zeros(rows, slab).masked_fill(~visible, -math.inf)
    got = tree_attention(q, k, v, bias, causal=causal)
    for row in range(rows):
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = k[group, visible[row]] @ q[row, head] / math.sqrt(size)
            want = scores.softmax(-1) @ v[group, visible[row]]
            torch.testing.assert_close(got[row, head], want)


@pytest.mark.parametrize("inputs", [5, 576, 577, 1536])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 17])
def test_a_skinny_linear_equals_the_plain_one(rows: int, inputs: int):
    weight, bias, x = random(7, inputs), random(7, seed=1), random(rows, inputs, seed=2)
    for b in (None, bias):
        want = PlainLinear(weight, b)(x)
        got = SkinnyLinear(weight, b)(x)
        assert float((got - want).abs().max()) < 1e-5 * math.sqrt(inputs)


def test_a_skinny_linear_takes_rows_laid_out_in_columns():
    weight, x = random(7, 10), random(10, 4, seed=1).t()
    torch.testing.assert_close(SkinnyLinear(weight)(x), x @ weight.t())


def test_padding_adds_rows_but_never_many():
    sizes = [padded_rows(n) for n in range(1, 200)]
    assert all(n <= size < n + 16 for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert sizes[0] == 2  # one row alone takes the slow matrix-vector path


def test_padding_repeats_the_last_row():
    x = random(2, 3)
    assert torch.equal(pad_rows(x, 4), torch.stack((x[0], x[1], x[1], x[1])))
    assert torch.equal(pad_rows(torch.tensor([5, 6]), 3), torch.tensor([5, 6, 6]))
    assert pad_rows(x, 2) is x
