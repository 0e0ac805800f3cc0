"""GGUF to Hugging Face: read a llama.cpp checkpoint and write the directory transformers would.

Knows the two things the GGUF format changes: the names of the tensors, and the order of the
query and key rows. llama.cpp rotates neighbouring pairs (2i, 2i+1) where Hugging Face rotates
the halves (i, i + head_dim/2), so its converter interleaves the rows of every head; here that is
undone. Weights come out in float32, the tokenizer as byte-level BPE with individual digits.

Must not import torch. The packages ``gguf``, ``tokenizers`` and ``safetensors`` are imported
inside the functions, because nothing but a fetch needs them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from codesign import Progress
from codesign.errors import InputError
from codesign.models.importing import SINGLE

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

"""Called with the stage, how much of it is done and how much there is."""

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN_TYPE = 3  # gguf.TokenType.CONTROL
_BYTE_LEVEL_WITH_DIGITS = "smollm"  # llama.cpp's name of the pre-tokeniser rebuilt below


def convert_gguf(path: Path, *, output: Path, progress: Progress | None = None) -> None:
    """Write the GGUF file at ``path`` as a Hugging Face directory.

    Args:
        path: A GGUF file of architecture ``llama`` with its tokenizer inside.
        output: An existing directory; gets config.json, generation_config.json,
            model.safetensors (float32), tokenizer.json and tokenizer_config.json.
        progress: Called for every tensor converted.

    Raises:
        InputError: If the file is no GGUF file, or of an architecture, a tensor or a
            tokenizer that this converter does not know.
    """
    import safetensors.numpy

    report = progress or (lambda _stage, _done, _total: None)
    reader = open_gguf(path)
    config = read_config(reader)
    tensors = read_tensors(reader, config=config, progress=report)
    _write_json(output / "config.json", config)
    _write_json(output / "generation_config.json", _generation_config(config))
    build_tokenizer(reader).save(str(output / "tokenizer.json"))
    _write_json(output / "tokenizer_config.json", _tokenizer_config(reader, config=config))
    report("writing weights", 0, 1)
    safetensors.numpy.save_file(tensors, output / SINGLE, metadata={"format": "pt"})
    report("writing weights", 1, 1)


def open_gguf(path: Path) -> GGUFReader:
    """Map a GGUF file into memory and check that it holds a Llama model.

    Raises:
        InputError: If it is no GGUF file or holds another architecture.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError) as err:
        raise InputError(f"{path} cannot be read as a GGUF file: {err}") from err
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise InputError(f"{path} holds architecture {architecture!r}; only 'llama' is converted")
    return reader


def read_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the contents of config.json for a Llama checkpoint."""
    hidden = int(_field(reader, "llama.embedding_length"))
    heads = int(_field(reader, "llama.attention.head_count"))
    tensor_names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv", heads)),
        "head_dim": int(_field(reader, "llama.rope.dimension_count", hidden // heads)),
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        "rope_theta": _short_float(_field(reader, "llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": _short_float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # A tied model is written once: llama.cpp leaves output.weight out.
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id", None),
        "dtype": "float32",
    }


def read_tensors(
    reader: GGUFReader, *, config: dict[str, Any], progress: Progress
) -> dict[str, NDArray[np.float32]]:
    """Return every tensor under its Hugging Face name, dequantised to float32.

    Raises:
        InputError: If the file holds a tensor that a Llama model does not have.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name = _hugging_face_name(tensor.name)
        if name is None:
            continue
        weight = _dequantise(tensor)
        if name.endswith("q_proj.weight"):
            weight = unpermute_rows(weight, num_heads=config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = unpermute_rows(weight, num_heads=config["num_key_value_heads"])
        tensors[name] = np.ascontiguousarray(weight, dtype=np.float32)
        progress("converting tensors", done, len(reader.tensors))
    return tensors


def unpermute_rows(weight: NDArray[np.float32], *, num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's interleaving of query or key rows.

    Args:
        weight: (num_heads * head_dim, hidden); in each head the rows run
            0, D/2, 1, D/2 + 1, ... for head dimension D.
        num_heads: Query heads for q_proj, key-value heads for k_proj.

    Returns:
        Same shape; in each head the rows run 0, 1, ..., D - 1.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Return the byte-level BPE tokenizer whose vocabulary and merges the file holds.

    Raises:
        InputError: If the file's tokenizer is of another kind.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre", None))
    if kind != ("gpt2", _BYTE_LEVEL_WITH_DIGITS):
        raise InputError(
            f"the tokenizer of this GGUF file is {kind[0]}/{kind[1]}; only "
            f"gpt2/{_BYTE_LEVEL_WITH_DIGITS} is converted. Import a Hugging Face directory: "
            "codesign models import DIR --name NAME"
        )
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN_TYPE]
    # The tokens are in the vocabulary already, so this keeps their ids.
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    return tokenizer


def _hugging_face_name(name: str) -> str | None:
    """Return the name, or None for a table that is derived from the configuration."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    raise InputError(f"the GGUF file holds a tensor {name!r} that a Llama model does not have")


def _dequantise(tensor: ReaderTensor) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as err:
        raise InputError(
            f"tensor {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf "
            "package cannot dequantise"
        ) from err


def _tokenizer_config(reader: GGUFReader, *, config: dict[str, Any]) -> dict[str, Any]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    pad, unknown = config["pad_token_id"], _field(reader, "tokenizer.ggml.unknown_token_id", None)
    return {
        # Reads tokenizer.json as it stands; a named class would rebuild its own pre-tokeniser.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": None if pad is None else tokens[pad],
        "unk_token": None if unknown is None else tokens[unknown],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": _field(reader, "tokenizer.chat_template", None),
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _field(reader: GGUFReader, key: str, *default: Any) -> Any:
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default:
        return default[0]
    raise InputError(f"the GGUF file has no field {key!r}")


def _short_float(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
