"""What benchmarks give to other projects' kernels, and what they compare them with."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from codesign.kernels.int4 import unpack_nibbles
from codesign.kernels.reference import tree_attention

ROOT = Path(__file__).parents[2]
ROWS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 8, 4, 2, 16, 37


@pytest.fixture(scope="module")
def bench():
    """The benchmarks' modules by name."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT))
    peers = {f"peer_{name}": f"peers.{name}" for name in ("gemm", "attention", "collectives")}
    names = {name: name for name in ("common", "bench_kernels", "bench_attention")} | peers
    yield SimpleNamespace(
        **{name: importlib.import_module(f"benchmarks.{path}") for name, path in names.items()}
    )
    patch.undo()


@pytest.fixture
def weight(bench):
    torch.manual_seed(0)
    return bench.peer_gemm.random_int4(48, 256, group=128, device="cpu")


@pytest.fixture
def slabs():
    """Slabs of two layers with room behind the rows, and a mask that is no triangle."""
    torch.manual_seed(0)
    size = (2, 1, KV_HEADS, 64, HEAD_DIM)
    keys, values = (torch.randn(size, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.ones(ROWS, CONTEXT + ROWS, dtype=torch.bool)
    mask[:, CONTEXT:] = torch.rand(ROWS, ROWS) < 0.5
    return SimpleNamespace(
        q_THE=torch.randn(ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16),
        mask_TS=mask,
        keys=keys,
        heads=HEADS,
        context=CONTEXT,
        layer=lambda i: (keys[i % 2], values[i % 2]),
    )


def test_humming_is_given_the_weight(bench, weight):
    tensors = bench.peer_gemm.humming_tensors(weight, torch.bfloat16)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "weight": (48, 32),
        "weight_scale": (48, 2),
        "zero_point": (6, 2),
    }
    assert all(t.is_contiguous() for t in tensors.values())
    codes = unpack_nibbles(tensors["weight"]).float()
    zeros = unpack_nibbles(tensors["zero_point"].t()).t().float().repeat_interleave(128, 1)
    scales = tensors["weight_scale"].float().repeat_interleave(128, 1)
    assert torch.equal((codes - zeros) * scales, weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gemlite_is_given_the_weight(bench, weight, dtype):
    codes, scales, zeros = bench.peer_gemm.gemlite_tensors(weight, dtype)
    assert codes.dtype == torch.uint8
    assert scales.dtype == zeros.dtype == dtype
    steps = codes.float() - zeros.float().repeat_interleave(128, 1)
    assert torch.equal(steps * scales.float().repeat_interleave(128, 1), weight.dequantize())


def test_marlin_is_given_the_weight(bench):
    """Read back as its threads do: B of ``mma.m16n8k16``, low and high nibbles of half words."""
    torch.manual_seed(0)
    weight = bench.peer_gemm.random_int4(128, 256, group=128, device="cpu")
    words, scales, zeros = bench.peer_gemm.marlin_tensors(weight, torch.bfloat16)
    assert (tuple(words.shape), words.dtype) == ((16, 256), torch.int32)
    assert (tuple(scales.shape), scales.dtype) == ((2, 128), torch.bfloat16)
    assert (tuple(zeros.shape), zeros.dtype) == ((2, 16), torch.int32)
    assert all(t.is_contiguous() for t in (words, scales, zeros))
    nibbles = unpack_nibbles(words).view(16, 2, 32, 4, 8)  # K / 16, N / 64, lanes, words
    zero_points, found = unpack_nibbles(zeros), torch.zeros(128, 256)
    for k, n, lane, word, at in itertools.product(*map(range, nibbles.shape)):
        half, (block, high) = at // 4, divmod(at % 4, 2)
        column = 16 * k + 8 * high + 2 * (lane % 4) + half
        row = 64 * n + 16 * word + 8 * block + lane // 4
        # a thread loads its eight outputs' scales and zero points, one a block of a word, at once
        place = 64 * n + 8 * (lane // 4)
        scale = scales[column // 128, place + 2 * word + block]
        zero = zero_points[column // 128, place + 4 * block + word]
        found[row, column] = (float(nibbles[k, n, lane, word, at]) - float(zero)) * float(scale)
    assert torch.equal(found, weight.dequantize())


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_marlin_is_called_with_what_it_checks(bench, monkeypatch, is_symmetric):
    calls = []
    library = SimpleNamespace(gptq_marlin_gemm=lambda *given: calls.append(given))
    sms = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(bench.peer_gemm, "marlin_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    x = torch.randn(9, 256).to(torch.bfloat16)
    make = bench.peer_gemm.random_int4
    weight = make(64, 256, group=128, device="cpu", is_symmetric=is_symmetric)
    assert bench.peer_gemm.marlin(weight, 9, torch.bfloat16)(x).shape == (9, 64)
    (given,) = calls
    shapes = [tuple(t.shape) for t in given if isinstance(t, torch.Tensor)]
    words = [(16, 128), (2, 64), (0,), (0,) if is_symmetric else (2, 8), (0,), (0,)]
    assert shapes == [(9, 256), *words, (9, 64), (3 * 16 * 256,), (0,), (3,)]
    taken_off = 8 if is_symmetric else 0
    assert given[11:] == (1 << 50 | taken_off << 17 | 4 << 8, True, False, True, False)


def test_a_product_that_is_another_one_is_not_timed(bench, weight):
    x = torch.randn(8, 256)
    right = weight.dequantize().t()
    rounded = right.to(torch.bfloat16).float()
    assert 0 < bench.peer_gemm.relative_error(lambda x: x @ rounded, weight, x) < 5e-3
    swapped = right[:, torch.arange(48).roll(1)]
    with pytest.raises(ValueError, match="another product"):
        bench.peer_gemm.relative_error(lambda x: x @ swapped, weight, x)
    with pytest.raises(ValueError, match="nan"):
        bench.peer_gemm.relative_error(lambda x: x @ (right * torch.nan), weight, x)


@pytest.fixture
def case(bench, monkeypatch):
    """A case of ``bench_kernels`` without a GPU."""
    make = bench.peer_gemm.random_int4

    def on_cpu(rows, columns, *, group, device, is_symmetric):
        return make(rows, columns, group=group, device="cpu", is_symmetric=is_symmetric)

    monkeypatch.setattr(bench.peer_gemm, "random_int4", on_cpu)
    of = bench.bench_kernels.Map("a model", "o", 256, 48)
    case = object.__new__(bench.bench_kernels.Case)
    case.of, case.rows, case.x = of, 8, torch.randn(8, 256)
    case.weights = [SimpleNamespace(num_bytes=1)] * 4
    return case


def test_a_project_that_is_not_installed_gets_a_row_that_says_so(bench, case, monkeypatch):
    for name in ("humming", "humming.layer", "gemlite"):
        monkeypatch.setitem(sys.modules, name, None)  # imports of it fail
    monkeypatch.delenv("CODESIGN_MARLIN", raising=False)
    rows = [case.peer(peer) for peer in bench.peer_gemm.PEERS]
    names = ["Humming bf16", "GemLite fp16", "GemLite bf16"]
    names += ["Marlin bf16", "Marlin bf16, symmetric"]
    assert [row["kernel"] for row in rows] == names
    assert rows[-1]["status"] == "not installed: CODESIGN_MARLIN names no library"
    assert all(row["status"].startswith("not installed: ") for row in rows)
    assert all((row["op"], row["rows"]) == ("o", 8) for row in rows)


def test_a_project_that_fails_gets_a_row_with_its_first_line(bench, case, capsys):
    def broken(weight, rows, dtype):
        raise RuntimeError("no such instruction\nmany more lines")

    row = case.peer(bench.peer_gemm.Peer("theirs", torch.float16, broken))
    assert row["status"] == "RuntimeError: no such instruction"
    ours = {"model": "a model", "op": "o", "rows": 8, "kernel": "ours", "floor_us": 1, "us": 2.0}
    bench.bench_kernels.show([ours, row])
    assert "- theirs RuntimeError: no such instruction" in capsys.readouterr().out


def test_flashinfer_reads_the_first_key_in_the_lowest_bit(bench, slabs):
    bits = bench.peer_attention.packed_bits(slabs.mask_TS)
    expected = np.packbits(slabs.mask_TS.numpy().reshape(-1), bitorder="little")
    assert bits.dtype == torch.uint8
    assert np.array_equal(bits.numpy(), expected)


def test_attention_is_compared_with_the_definition(bench, slabs):
    keys, values = (t[0, :, : CONTEXT + ROWS].float() for t in slabs.layer(0))
    bias = torch.zeros(slabs.mask_TS.shape).masked_fill(~slabs.mask_TS, -torch.inf)
    for mask, bias_or_none in ((slabs.mask_TS, bias), (None, None)):
        expected = tree_attention(slabs.q_THE.float(), keys, values, bias_or_none)
        found = bench.peer_attention.expected_attention(slabs, mask)
        torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_pytorchs_attention_is_asked_for_the_same(bench, slabs, masked):
    layers = bench.bench_attention.Layers
    call = layers.sdpa(slabs, SDPBackend.MATH, masked=masked)
    assert layers.error(slabs, call, masked=masked) < 1e-2
    slabs.q_THE = slabs.q_THE.flip(1)
    with pytest.raises(ValueError, match="other attention"):
        layers.error(slabs, call, masked=masked)


def test_flash_attention_3_is_asked_for_the_same(bench, slabs, monkeypatch):
    """Its causal mask is aligned to the last row and key."""
    slabs.mask_TS = torch.ones(ROWS, CONTEXT + ROWS, dtype=torch.bool).tril(CONTEXT)

    def attend(q, k_cache, v_cache, *, causal):
        assert causal
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert k_cache.shape == v_cache.shape == (1, CONTEXT + ROWS, KV_HEADS, HEAD_DIM)
        q, keys, values = (t.transpose(1, 2).float() for t in (q, k_cache, v_cache))
        bias = torch.zeros(slabs.mask_TS.shape).masked_fill(~slabs.mask_TS, -torch.inf)
        out = tree_attention(q[0].transpose(0, 1), keys[0], values[0], bias)
        return out.reshape(1, ROWS, HEADS, HEAD_DIM)

    package = SimpleNamespace(flash_attn_with_kvcache=attend)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", package)
    call = bench.peer_attention.makers(slabs)["FlashAttention-3, causal"]()
    assert bench.bench_attention.Layers.error(slabs, call, masked=True) < 1e-2


def test_attention_that_cannot_be_made_gets_a_row_that_says_so(bench, slabs, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    make = bench.peer_attention.makers(slabs)["FlashInfer, masked"]
    row = bench.bench_attention.checked(slabs, make, masked=True)
    assert row == {"status": "not installed: flashinfer"}


class FakeComm:
    """FlashInfer's sums of two ranks that have the same part; ``wrong`` is added to them."""

    class AllReduceFusionPattern:
        kAllReduce, kARResidualRMSNorm = 0, 1

    wrong = 0.0

    def trtllm_create_ipc_workspace_for_all_reduce_fusion(self, rank, world, rows, hidden, group):
        assert (rank, world, rows, hidden) == (1, 2, 16, 64)
        return None, "workspace"

    def trtllm_allreduce_fusion(self, *, allreduce_in, pattern_code, use_oneshot, **rest):
        assert use_oneshot, "two shots were asked for"
        assert (rest["world_size"], rest["world_rank"], rest["token_num"]) == (2, 1, 8)
        assert rest["workspace_ptrs"] == "workspace"
        total = allreduce_in.float() * 2 + self.wrong
        if pattern_code == 0:
            rest["allreduce_out"].copy_(total)
            return
        total = total + rest["residual_in"]
        rest["residual_out"].copy_(total)
        factor = torch.rsqrt(total.square().mean(-1, keepdim=True) + rest["rms_eps"])
        rest["norm_out"].copy_(total * factor * rest["rms_gamma"])


@pytest.fixture
def comm(bench, monkeypatch):
    def all_gather(parts, part, group):
        for other in parts:
            other.copy_(part)

    module = bench.peer_collectives.dist
    monkeypatch.setattr(module, "get_rank", lambda group: 1)
    monkeypatch.setattr(module, "get_world_size", lambda group: 2)
    monkeypatch.setattr(module, "all_gather", all_gather)
    fake = FakeComm()
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(comm=fake))
    return fake


def test_sums_of_two_ranks_are_compared_with_the_definition(bench, comm):
    sums = bench.peer_collectives.FusedSums(None, 16, 64)
    part = torch.randn(8, 64).to(torch.bfloat16)
    assert list(sums.calls(part)) == ["FlashInfer one-shot", "FlashInfer, residual and norm"]
    comm.wrong = 0.05
    with pytest.raises(ValueError, match="another sum"):
        sums.calls(part)
