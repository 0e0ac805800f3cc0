from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from codesign.errors import InputError  # noqa: E402
from codesign.kernels.int4 import Int4Weight, quantize_int4  # noqa: E402
from codesign.kernels.packed_reference import Norm, gate_up, linear  # noqa: E402
from codesign.kernels.packing import (  # noqa: E402
    gate_up_order,
    pack_int4,
    unpack,
)
from codesign.kernels.reference import rms_norm, swiglu  # noqa: E402


def random(*size: int, seed: int = 0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def fixed_point(x_MK):
    """Rows in units of their own, powers of two that leave 16 bits, as in gemm_product.cuh."""
    exponent = torch.frexp(x_MK.float().abs().amax(1, keepdim=True)).exponent
    unit_M1 = torch.exp2(exponent.double() - 15)
    return (x_MK.double() / unit_M1).round().to(torch.int64), unit_M1


def int4_product(record, x_MK):
    """One record times 8 rows, lane by lane, as mma.m16n8k32 and gemm_product.cuh define it."""
    out, sums = (torch.zeros(16, 8, dtype=torch.int64) for _ in range(2))
    q_MK, unit_M1 = fixed_point(x_MK)
    words = record[:1024].view(2, 32, 4, 4)  # c, lane, step, byte
    for c, i in itertools.product(range(2), range(2)):
        a = torch.zeros(16, 32, dtype=torch.int64)
        high, low = torch.zeros(2, 32, 8, dtype=torch.int64)
        for lane, h in itertools.product(range(32), range(2)):
            g, t = lane >> 2, lane & 3
            k = slice(16 * h + 4 * t, 16 * h + 4 * t + 4)
            word = words[c, lane, 2 * i + h].to(torch.int64)
            a[g, k], a[g + 8, k] = word & 0x0F, word & 0xF0
            first = 64 * c + 32 * i + 8 * t + 4 * h
            q = q_MK[g, [first, first + 2, first + 1, first + 3]]
            high[k, g], low[k, g] = q >> 8, q & 255
        assert torch.equal(high.to(torch.int8).to(torch.int64), high)
        out += 256 * (a @ high) + a @ low
        sums += 256 * high.sum(0) + low.sum(0)
    ends = record[1024:].view(torch.int16).view(8, 2)
    both_scales = (ends >> 1 & 0x7FF8).view(torch.float16).double()
    scale = torch.cat((both_scales[:, 0], both_scales[:, 1] / 16))[:, None]
    zero = torch.cat((ends[:, 0] & 15, 16 * (ends[:, 1] & 15)))[:, None]
    return (scale * (out - zero * sums)).T * unit_M1


@pytest.mark.parametrize("rows", [16, 40])
def test_unpacking_gives_the_values_that_were_packed(rows):
    weight = quantize_int4(random(rows, 256), group=128)
    assert torch.equal(unpack(pack_int4(weight)), weight.dequantize())


def test_packing_in_an_order_moves_whole_rows():
    weight, order = quantize_int4(random(48, 128), group=128), torch.randperm(48)
    assert torch.equal(unpack(pack_int4(weight, order=order)), weight.dequantize()[order])


def test_lanes_find_their_codes_where_the_kernel_reads_them():
    weight = quantize_int4(random(16, 256), group=128)
    x = random(8, 256, seed=1).bfloat16()
    data = pack_int4(weight).records
    got = sum(int4_product(data[0, s], x[:, 128 * s : 128 * (s + 1)]) for s in range(2))
    want = x.double() @ weight.dequantize(torch.float64).T
    assert float((got - want).norm() / want.norm()) < 1e-5
    rounded = torch.cat([torch.mul(*fixed_point(x[:, i : i + 128])) for i in (0, 128)], dim=1)
    torch.testing.assert_close(got, rounded @ weight.dequantize(torch.float64).T)


def test_gate_and_up_of_a_channel_share_a_tile_eight_rows_apart():
    order = gate_up_order(24).view(-1, 2, 8)
    assert order.shape[0] == 3
    assert torch.equal(order[:, 1], order[:, 0] + 24)
    assert sorted(order.flatten().tolist()) == list(range(48))


def test_the_reference_of_gate_up_is_swiglu_of_the_two_halves():
    weight, x = quantize_int4(random(32, 128), group=128), random(3, 128, seed=1).bfloat16()
    packed = pack_int4(weight, order=gate_up_order(16))
    want = swiglu(x.double() @ weight.dequantize(torch.float64).T)
    torch.testing.assert_close(gate_up(x, packed), want)


def test_a_fused_norm_is_a_norm_before_the_product():
    weight, x = quantize_int4(random(16, 128), group=128), random(3, 128, seed=1).bfloat16()
    scale = random(128, seed=2).bfloat16()
    got = linear(x, pack_int4(weight), norm=Norm(scale, 1e-5))
    want = rms_norm(x.double(), scale.double(), 1e-5) @ weight.dequantize(torch.float64).T
    error = (got - want).norm() / want.norm()
    assert float(error) < 5e-3  # h * w is rounded to bfloat16 on the way


def test_other_group_widths_are_refused_with_the_width_that_is_needed():
    with pytest.raises(InputError, match="groups of 128"):
        pack_int4(quantize_int4(random(16, 128), group=64))


def test_every_scale_of_twelve_bits_survives_with_some_zero_point():
    bits = torch.arange(0, 0x7C00, 8).to(torch.int16)  # from 0 to 65280, normal and not
    rows = -(-len(bits) // 16) * 16
    scales = torch.zeros(rows, 1, dtype=torch.float16)
    scales[: len(bits), 0] = bits.view(torch.float16)
    zeros = (torch.arange(rows) % 16).to(torch.uint8)[:, None]
    packed = quantize_int4(random(rows, 128), group=128).packed
    weight = Int4Weight(packed, scales, zeros)
    assert torch.equal(unpack(pack_int4(weight)), weight.dequantize())


def test_scales_that_do_not_fit_a_record_are_not_packed():
    weight = quantize_int4(random(16, 128), group=128)
    for scale in (1 + 2.0**-10, -1.0):
        scales = torch.full_like(weight.scales, scale)
        with pytest.raises(AssertionError, match="twelve bits"):
            pack_int4(Int4Weight(weight.packed, scales, weight.zeros))


@pytest.mark.parametrize("columns", [128, 384, 640])
def test_a_tile_begins_a_line_of_the_caches(columns):
    weight = quantize_int4(random(48, columns), group=128)
    packed = pack_int4(weight)
    assert packed.data.shape[1] % 128 == 0
    assert packed.data.shape[1] - packed.records[0].numel() < 128
    assert torch.equal(unpack(packed), weight.dequantize())
