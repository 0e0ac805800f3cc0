from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from codesign.errors import InputError  # noqa: E402
from codesign.kernels.int4 import quantize_int4  # noqa: E402
from codesign.kernels.packed_reference import Norm, gate_up, linear  # noqa: E402
from codesign.kernels.packing import (  # noqa: E402
    gate_up_order,
    pack_bf16,
    pack_int4,
    unpack,
)
from codesign.kernels.reference import rms_norm, swiglu  # noqa: E402


def random(*size: int, seed: int = 0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def tensor_core_product(record, x_MK, *, bits: int):
    """One record times 8 rows, lane by lane, as mma.m16n8k16 and gemm_core.cuh define it."""
    out = torch.zeros(16, 8, dtype=torch.float64)
    for c in range(2):
        for w in range(4):
            a = torch.zeros(16, 16, dtype=torch.float64)
            b = torch.zeros(16, 8, dtype=torch.float64)
            for lane in range(32):
                g, t = lane >> 2, lane & 3
                k = 64 * c + 32 * (w // 2) + 8 * t + 4 * (w % 2)
                places = ((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))
                for i, (row, column) in enumerate(places):
                    if bits == 4:
                        at = c * 512 + lane * 16 + w * 4
                        word = int(record[at : at + 4].view(torch.int32)[0]) & 0xFFFFFFFF
                        pair = (word >> 4 * i) & 15, (word >> 4 * i + 16) & 15
                        a[row, column], a[row, column + 1] = 128 + pair[0], 128 + pair[1]
                    else:
                        at = (4 * c + w) * 512 + lane * 16 + 4 * i
                        a[row, column : column + 2] = record[at : at + 4].view(torch.bfloat16)
                b[2 * t : 2 * t + 2, g] = x_MK[g, k : k + 2].double()
                b[2 * t + 8 : 2 * t + 10, g] = x_MK[g, k + 2 : k + 4].double()
            out += a @ b
    if bits == 4:
        ends = record[1024:].view(torch.float16).view(8, 2, 2).double()
        scale = torch.cat((ends[:, 0, 0], ends[:, 0, 1]))[:, None]
        zero = torch.cat((ends[:, 1, 0], ends[:, 1, 1]))[:, None]
        out = scale * (out - zero * x_MK.double().sum(-1))
    return out.T


@pytest.mark.parametrize("rows", [16, 40])
def test_unpacking_gives_the_values_that_were_packed(rows):
    weight = quantize_int4(random(rows, 256), group=128)
    assert torch.equal(unpack(pack_int4(weight)), weight.dequantize())
    dense = random(rows, 200)
    assert torch.equal(unpack(pack_bf16(dense)), dense.bfloat16().float())


def test_packing_in_an_order_moves_whole_rows():
    weight, order = quantize_int4(random(48, 128), group=128), torch.randperm(48)
    assert torch.equal(unpack(pack_int4(weight, order=order)), weight.dequantize()[order])


def test_lanes_find_their_codes_where_the_kernel_reads_them():
    weight = quantize_int4(random(16, 256), group=128)
    x = random(8, 256, seed=1).bfloat16()
    data = pack_int4(weight).data
    got = sum(
        tensor_core_product(data[0, s], x[:, 128 * s : 128 * (s + 1)], bits=4) for s in range(2)
    )
    want = x.double() @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_lanes_find_bfloat16_weights_where_the_kernel_reads_them():
    weight, x = random(16, 128), random(8, 128, seed=1).bfloat16()
    got = tensor_core_product(pack_bf16(weight).data[0, 0], x, bits=16)
    torch.testing.assert_close(got, x.double() @ weight.bfloat16().double().T)


def test_gate_and_up_of_a_channel_share_a_tile_eight_rows_apart():
    order = gate_up_order(24).view(-1, 2, 8)
    assert order.shape[0] == 3
    assert torch.equal(order[:, 1], order[:, 0] + 24)
    assert sorted(order.flatten().tolist()) == list(range(48))


def test_the_reference_of_gate_up_is_swiglu_of_the_two_halves():
    weight, x = random(32, 128) / 10, random(3, 128, seed=1).bfloat16()
    packed = pack_bf16(weight, order=gate_up_order(16))
    want = swiglu(x.double() @ weight.bfloat16().double().T)
    torch.testing.assert_close(gate_up(x, packed), want)


def test_a_fused_norm_is_a_norm_before_the_product():
    weight, x = random(16, 128), random(3, 128, seed=1).bfloat16()
    scale = random(128, seed=2).bfloat16()
    got = linear(x, pack_bf16(weight), norm=Norm(scale, 1e-5))
    want = rms_norm(x.double(), scale.double(), 1e-5) @ weight.bfloat16().double().T
    error = (got - want).norm() / want.norm()
    assert float(error) < 5e-3  # h * w is rounded to bfloat16 on the way


def test_other_group_widths_are_refused_with_the_width_that_is_needed():
    with pytest.raises(InputError, match="groups of 128"):
        pack_int4(quantize_int4(random(16, 128), group=64))
    with pytest.raises(InputError, match="multiple of 8"):
        pack_bf16(random(16, 100))
