"""Int4 checkpoints: file formats against written-out arithmetic, and the quantise command's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from benchmarks.random_pair import random_tensors  # noqa: E402
from codesign.engine.checkpoint import open_reader  # noqa: E402
from codesign.engine.kv_cache import KVCache  # noqa: E402
from codesign.engine.model import load_decoder  # noqa: E402
from codesign.engine.quantize import quantize_model  # noqa: E402
from codesign.engine.rows import causal_rows  # noqa: E402
from codesign.errors import InputError  # noqa: E402
from codesign.kernels.int4 import (  # noqa: E402
    Int4Weight,
    pack_nibbles,
    quantize_int4,
    round_scales,
    unpack_nibbles,
)
from codesign.kernels.reference import int4_linear  # noqa: E402
from codesign.models.importing import (  # noqa: E402
    check_checkpoint,
    import_model,
    read_header,
)
from codesign.models.quantization import read_quantization  # noqa: E402
from codesign.models.scales import check_scales  # noqa: E402
from codesign.models.shape import model_shape  # noqa: E402
from codesign.models.sharding import Cut  # noqa: E402
from codesign.models.tokenizer import Tokenizer  # noqa: E402

Q_PROJ = "model.layers.0.self_attn.q_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def source(tiny_models, tmp_path: Path) -> Path:
    """A tiny model whose widths are whole groups of 32."""
    folder = tmp_path / "source"
    folder.mkdir()
    for file in tiny_models[0].glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(model_shape(folder).tensors(), 0), folder / "model.safetensors")
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return path


def test_words_hold_the_lowest_column_in_the_lowest_bits():
    q = torch.arange(16, dtype=torch.uint8).flip(0)[None]
    packed = pack_nibbles(q)
    assert [int(word) & 15 for word in packed[0]] == [15, 7]
    assert torch.equal(unpack_nibbles(packed), q)


def test_the_int4_product_is_that_of_the_dequantised_matrix():
    generator = torch.Generator().manual_seed(0)
    weight = quantize_int4(torch.randn(24, 128, generator=generator), group=64)
    x = torch.randn(5, 128, generator=generator)
    want = (x.double() @ weight.dequantize().double().t()).float()
    torch.testing.assert_close(int4_linear(x, weight), want, atol=2e-5, rtol=1e-5)


def test_rounding_is_within_half_a_step_of_what_is_not_clipped():
    weight = torch.linspace(-1, 1, 256).view(2, 128)
    made = quantize_int4(weight, group=128)
    error = (made.dequantize() - weight).abs().square().mean().sqrt()
    assert float(error) < float(made.scales.max()) / 2


def test_a_quantised_checkpoint_is_awq_as_autoawq_writes_it(source, text, tmp_path):
    out = tmp_path / "out"
    quantize_model(str(source), out, group=32, text=text)
    stored = load_file(out / "model.safetensors")
    words, zeros = stored[f"{Q_PROJ}.qweight"], stored[f"{Q_PROJ}.qzeros"]
    scales = stored[f"{Q_PROJ}.scales"].float()
    assert words.shape == (64, 8)
    want = torch.empty(64, 64)  # rows are inputs here, columns outputs
    for column in range(64):
        nibble = 4 * AWQ_ORDER.index(column % 8)
        q = (words[:, column // 8] >> nibble) & 15
        zero = ((zeros[:, column // 8] >> nibble) & 15).repeat_interleave(32)
        want[:, column] = (q - zero) * scales[:, column].repeat_interleave(32)
    got = open_reader(out).matrix(Q_PROJ, Cut(0, 64, 64), Cut(0, 64, 64))
    assert isinstance(got, Int4Weight)
    assert torch.equal(got.dequantize(), want.t())
    check_checkpoint(out)


def perplexity(directory: Path, text: Path) -> float:
    ids = Tokenizer(directory).encode(text.read_text())
    held_out = ids[len(ids) * 4 // 5 :]
    decoder = load_decoder(directory)
    cache = KVCache(decoder.shape, num_slots=1, max_tokens=len(held_out))
    hidden = decoder.forward(causal_rows(cache.take(), held_out), cache)
    logits = decoder.logits(hidden[:-1])
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(held_out[1:]))
    return float(loss.exp())


@pytest.mark.parametrize("int4_head", [False, True])
def test_the_perplexities_told_are_those_of_the_files(source, text, tmp_path, int4_head):
    out = tmp_path / "out"
    made = quantize_model(str(source), out, group=32, int4_head=int4_head, text=text)
    assert open_reader(out).int4_head == int4_head
    stored = load_file(out / "model.safetensors")["lm_head.weight"]
    assert stored.dtype == torch.float16, "other engines read it as it was"
    assert perplexity(source, text) == pytest.approx(made.perplexity_before, rel=1e-4)
    # norms and head are stored in float16
    assert perplexity(made.path, text) == pytest.approx(made.perplexity_after, rel=4e-3)
    assert made.perplexity_after == pytest.approx(made.perplexity_before, rel=0.3)


def test_a_head_in_int4_is_rounded_when_it_is_loaded(source, text, tmp_path):
    plain, rounded = (
        quantize_model(str(source), tmp_path / f"{flag}", group=32, int4_head=flag, text=text).path
        for flag in (False, True)
    )
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    head = load_file(plain / "model.safetensors")["lm_head.weight"]
    want = hidden @ quantize_int4(head, group=32).dequantize().t()
    torch.testing.assert_close(load_decoder(rounded).logits(hidden), want, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(load_decoder(plain).logits(hidden), want, atol=1e-3)


def test_a_rank_reads_only_its_part_of_an_awq_matrix(source, text, tmp_path):
    out = quantize_model(str(source), tmp_path / "out", group=32, text=text).path
    reader = open_reader(out)
    whole = reader.matrix(Q_PROJ, Cut(0, 64, 64), Cut(0, 64, 64))
    part = reader.matrix(Q_PROJ, Cut(16, 48, 32), Cut(32, 64, 32))
    assert isinstance(whole, Int4Weight)
    assert isinstance(part, Int4Weight)
    assert torch.equal(part.dequantize(), whole.dequantize()[16:48, 32:])


def test_scales_of_files_are_rounded_to_what_bfloat16_holds_too(source, text, tmp_path):
    out = quantize_model(str(source), tmp_path / "out", group=32, text=text).path
    stored = load_file(out / "model.safetensors")
    finer = stored[f"{Q_PROJ}.scales"] * (1 + 2.0**-10)
    save_file(stored | {f"{Q_PROJ}.scales": finer}, out / "model.safetensors")
    whole = open_reader(out).matrix(Q_PROJ, Cut(0, 64, 64), Cut(0, 64, 64))
    assert isinstance(whole, Int4Weight)
    assert torch.equal(whole.scales.t(), stored[f"{Q_PROJ}.scales"])


def test_negative_scales_are_turned_round_and_give_the_same_weights(source, text, tmp_path):
    out = quantize_model(str(source), tmp_path / "out", group=32, text=text).path
    stored = load_file(out / "model.safetensors")
    before = open_reader(out).matrix(Q_PROJ, Cut(0, 64, 64), Cut(0, 64, 64))
    stored[f"{Q_PROJ}.scales"][0, 8:] *= -1
    save_file(stored, out / "model.safetensors")
    after = open_reader(out).matrix(Q_PROJ, Cut(0, 64, 64), Cut(0, 64, 64))
    assert isinstance(before, Int4Weight)
    assert isinstance(after, Int4Weight)
    assert torch.equal(after.scales, before.scales)
    expected = before.dequantize()
    expected[8:, :32] *= -1
    assert torch.equal(after.dequantize(), expected)


@pytest.mark.parametrize("wrong", [float("-inf"), float("inf"), float("nan"), 65504.0])
def test_scales_that_no_kernel_takes_are_refused_by_name(
    source, text, tmp_path, monkeypatch, wrong
):
    out = quantize_model(str(source), tmp_path / "out", group=32, text=text).path
    stored = load_file(out / "model.safetensors")
    stored[f"{Q_PROJ}.scales"][0, 0] = wrong
    save_file(stored, out / "model.safetensors")
    with pytest.raises(InputError, match=rf"{Q_PROJ}: .* beyond 65280"):
        open_reader(out).matrix(Q_PROJ, Cut(0, 64, 64), Cut(0, 64, 64))
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path / "home"))
    said = rf"1 of 128 scales in {Q_PROJ}\.scales .* beyond 65280, first"
    for copy in (True, False):
        with pytest.raises(InputError, match=said):
            import_model(out, name="mine", copy=copy)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [65280.0, 65407.0, 65408.0, -65408.0, float("nan"), 1e38])
def test_an_import_refuses_the_scales_that_loading_would(tmp_path, stored, value):
    scales = torch.tensor([0.5, value, 1.0]).to(stored)
    file = tmp_path / "model.safetensors"
    save_file({"another": torch.ones(3), f"{Q_PROJ}.scales": scales, "z": torch.ones(5)}, file)
    try:
        round_scales(scales.abs())
    except ValueError:
        with pytest.raises(InputError, match=rf"1 of 3 scales in {Q_PROJ}\.scales"):
            check_scales(file, read_header(file))
    else:
        check_scales(file, read_header(file))


def test_rounded_scales_are_within_half_a_unit_of_their_last_place():
    wide = torch.cat((torch.logspace(-4.2, 4.8, 4000), torch.linspace(0, 2.0**-14, 500)))
    rounded = round_scales(wide).double()
    assert torch.equal(rounded, rounded.bfloat16().double())
    off = (rounded - wide.double()).abs()
    assert bool((off <= torch.clamp(wide.double() * 2.0**-8, min=2.0**-22)).all())
    assert torch.equal(round_scales(rounded), rounded.half())


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_files_are_read(source, symmetric):
    shape = model_shape(source)
    state, stored, want = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in state.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        stem, weight = name.removesuffix("weight"), quantize_int4(tensor, group=32)
        if symmetric:
            weight = replace(weight, zeros=torch.full_like(weight.zeros, 8))
        else:
            stored[f"{stem}weight_zero_point"] = pack_nibbles(weight.zeros.t()).t().contiguous()
        stored[f"{stem}weight_packed"] = weight.packed
        stored[f"{stem}weight_scale"] = weight.scales.to(torch.bfloat16)
        stored[f"{stem}weight_shape"] = torch.tensor(tensor.shape)
        want[stem.removesuffix(".")] = weight.dequantize()
    save_file(stored, source / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    entry = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": symmetric}}
        },
    }
    rewrite(source, entry)
    reader = open_reader(source)
    for name, expected in want.items():
        rows, columns = shape.tensors()[f"{name}.weight"]
        got = reader.matrix(name, Cut(0, rows, rows), Cut(0, columns, columns))
        assert isinstance(got, Int4Weight)
        assert torch.equal(got.dequantize(), expected)


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "group_size": 32, "version": "gemm"}


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({**AWQ, "bits": 8}, "bits = 8"),
        ({**AWQ, "version": "gemv"}, "'gemv'"),
        ({**AWQ, "group_size": -1}, "groups of -1"),
        ({**AWQ, "group_size": 128}, "hidden size 64 is no multiple.*groups of 32 would fit"),
        ({**AWQ, "modules_to_not_convert": ["visual"]}, "unquantised visual"),
    ],
)
def test_what_is_not_supported_is_named(source, entry, found):
    rewrite(source, entry)
    with pytest.raises(InputError, match=found):
        read_quantization(source, model_shape(source))


def rewrite(folder: Path, entry: dict) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": entry}))
