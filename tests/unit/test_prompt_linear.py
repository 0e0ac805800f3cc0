"""Prompts over packed weights; the Triton kernels in the interpreter, in float32, and compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from codesign.kernels import prompt_linear
from codesign.kernels.int4 import quantize_int4
from codesign.kernels.packed_reference import Norm
from codesign.kernels.packing import gate_up_order, pack_int4, unpack
from codesign.kernels.prompt_linear import Map
from codesign.kernels.reference import rms_norm, sum_of_ranks
from codesign.policy.step_time import BUCKETS

pytestmark = pytest.mark.filterwarnings("ignore")
# Rows, features and columns: a ragged tile; half of one; groups that are added up in four parts,
# not all as long; more tiles than a program takes; whole tiles.
SHAPES = [(37, 72, 384), (17, 24, 128), (18, 48, 2304), (3, 272, 256), (66, 64, 256)]


@pytest.fixture
def kernels(interpreted):
    """The Triton kernels in the interpreter."""
    return interpreted("join_parts_triton", "prompt_linear_triton", "unpack_triton")


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def case(rows: int, features: int, columns: int, *, order: Tensor | None = None):
    """Rows, a packed weight, and its values in float64; zero points from 0 to 15."""
    lean = torch.linspace(-3, 3, features)[:, None]
    weight = quantize_int4(random(features, columns) + lean, group=128)
    assert int(weight.zeros.min()) == 0
    assert int(weight.zeros.max()) == 15
    packed = pack_int4(weight, order=order)
    return random(rows, columns, seed=1), packed, unpack(packed, torch.float64)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(("rows", "features", "columns"), SHAPES)
@pytest.mark.parametrize("way", ["run_fused", "run_dense"])
def test_rows_of_a_prompt_agree_with_float64(kernels, rows, features, columns, way: str):
    x, packed, values = case(rows, features, columns)
    norm, bias = Norm(random(columns, seed=2), 1e-5), random(features, seed=3)
    residual = random(rows, features, seed=4)
    run = getattr(prompt_linear, way)
    out = torch.full((rows, features), torch.nan)
    assert_close(run(x, Map(packed), out), x.double() @ values.T)
    normed = rms_norm(x.double(), norm.weight_K.double(), norm.eps)
    found = run(x, Map(packed, norm, bias, residual), out)
    expected = normed @ values.T + bias + residual
    assert_close(found, expected)
    out.copy_(residual)
    assert_close(run(x, Map(packed, norm, bias, out), out), expected)


@pytest.mark.parametrize(("rows", "features", "columns"), [(37, 96, 256), (18, 48, 2048)])
@pytest.mark.parametrize("way", ["run_fused", "run_dense"])
def test_gates_and_ups_of_a_prompt_end_as_swiglu(kernels, rows, features, columns, way: str):
    x, packed, values = case(rows, features, columns, order=gate_up_order(features // 2))
    gate, up = (x.double() @ values.T).unflatten(-1, (-1, 2, 8)).unbind(-2)
    out = torch.full((rows, features // 2), torch.nan)
    found = getattr(prompt_linear, way)(x / 10, Map(packed, swiglu=True), out)
    expected = (torch.nn.functional.silu(gate / 10) * up / 10).flatten(1)
    assert_close(found, expected)


@pytest.mark.parametrize("way", ["run_fused", "run_dense"])
def test_zero_blocks_of_a_shard_add_exactly_nothing(kernels, way: str):
    weight = quantize_int4(random(40, 256), group=128)
    x, out = random(18, 512, seed=1), torch.full((18, 48), torch.nan)
    found = getattr(prompt_linear, way)(x, Map(pack_int4(weight.pad(48, 512, group=128))), out)
    assert_close(found[:, :40], x[:, :256].double() @ weight.dequantize(torch.float64).T)
    assert not found[:, 40:].any()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_every_cut_of_the_work_gives_the_result(kernels, rows: int, channels: int, splits: int):
    _, triton_kernels, _ = kernels
    x, packed, values = case(20, 72, 384)
    out = torch.full((20, 72), torch.nan)
    triton_kernels.product(
        triton_kernels.arrange(x, None, 0.0),
        packed,
        out,
        bias_N=None,
        residual_MN=None,
        swiglu=False,
        cut=triton_kernels.Cut(rows, channels),
        splits=splits,
    )
    assert_close(out, x.double() @ values.T)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_parts_of_ranks_add_up_to_the_bits_of_their_definition(kernels, ranks: int):
    joining, _, _ = kernels
    parts, residual = random(ranks, 5, 1032), random(5, 1032, seed=1)
    for added in (None, residual):
        out = torch.full((5, 1032), torch.nan)
        joining.join(parts, out, bias_N=None, residual_MN=added, swiglu=False)
        assert torch.equal(out, sum_of_ranks(list(parts), added))


def test_weights_are_unpacked_in_pieces_into_memory_that_stays(kernels, monkeypatch):
    x, packed, values = case(5, 200, 640)
    assert torch.equal(unpack(packed).double(), values)
    monkeypatch.setattr(prompt_linear, "_scratch", {})
    monkeypatch.setattr(prompt_linear, "_SCRATCH", 5 * 16 * 640 + 7)
    assert prompt_linear.pieces(packed) == [(0, 64), (64, 128), (128, 200)]
    small_x, small, _ = case(5, 16, 128)
    prompt_linear.run_dense(small_x, Map(small), torch.empty(5, 16))
    (memory,) = prompt_linear._scratch.values()  # whose address a graph may hold
    out = torch.full((5, 200), torch.nan)
    assert_close(prompt_linear.run_dense(x, Map(packed), out), x.double() @ values.T)
    (found,) = prompt_linear._scratch.values()
    assert found is memory


def test_decoding_never_takes_the_way_of_prompts():
    assert not any(prompt_linear.takes(rows, prompt=False) for rows in BUCKETS)
    assert prompt_linear.takes(300, prompt=False)
    assert not prompt_linear.takes(64, prompt=True)
    assert prompt_linear.takes(65, prompt=True)


@given(tiles=st.integers(1, 4000), groups=st.integers(1, 256))
def test_no_part_of_the_columns_is_empty(tiles: int, groups: int):
    splits = prompt_linear.splits(tiles, groups)
    assert (splits - 1) * -(-groups // splits) < groups


COMPILED = """
from codesign.kernels import join_parts_triton, prompt_linear_triton, unpack_triton
TYPES = {"words": "*i32", "parts": "*fp32", "eps": "fp32"}
POINTERS = ("x", "out", "bias", "residual", "norm")
def made_of(kernel, constants, warps=4, stages=3):
    types = TYPES | dict.fromkeys(POINTERS, "*bf16")
    aligned = ("*", "features", "columns")
    return compiled(kernel, types, constants, aligned, num_warps=warps, num_stages=stages)
flags = {"BIAS": False, "RESIDUAL": True, "SWIGLU": False}
cut = prompt_linear_triton.CUT
fixed = {"ROWS": cut.rows, "CHANNELS": cut.channels, "WORDS": 264}
made = made_of(prompt_linear_triton._product, flags | fixed, cut.channels // 16, cut.stages)
assert made.asm["ptx"].count("wgmma.mma_async") == 16
assert 2 * made.metadata.shared <= 227 << 10
keep(made)
made_of(prompt_linear_triton._arrange, {"NORM": True, "BLOCK": 1024})
made_of(join_parts_triton._join, flags | {"SPLITS": 4, "BLOCK": 1024})
made_of(unpack_triton._unpack, {"GROUPS": 4, "WORDS": 264})
"""


def test_the_kernels_compile_for_hopper_with_values_in_registers(assert_keeps_values_in_registers):
    assert_keeps_values_in_registers(COMPILED)
