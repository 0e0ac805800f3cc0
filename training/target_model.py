"""Reads the target checkpoint (GGUF file or Hugging Face directory) with NumPy and torch only.

Every tensor leaves this module under its Hugging Face Llama name, in float32, so that the writer,
the trainer and the evaluator do not care which file it came from. The q/k row permutation of
llama.cpp is undone here. It stands apart from the package's own reader because the rented machine
has no more than NumPy, torch, safetensors and tokenizers.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

END_OF_TURN = 2
START_OF_TURN = 1
NUM_SPECIAL_TOKENS = 17
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
# ggml type -> (elements of a block, bytes of a block): F32, F16, Q4_1, Q8_0.
_BLOCKS = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34)}
_GGUF_TO_HF = {
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


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The numbers that fix a Llama-architecture decoder."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A decoder on the host: its shape, its float32 tensors by Hugging Face name, its tokenizer."""

    shape: LlamaShape
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer


class _Cursor:
    """Reads the header of a GGUF file in order."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 4

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        value = struct.unpack("<" + code, self.data[self.at : self.at + size].tobytes())[0]
        self.at += size
        return value

    def text(self) -> str:
        size = self.scalar("Q")
        raw = self.data[self.at : self.at + size].tobytes()
        self.at += size
        return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            return [self.value(element) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def _dequantize(raw: np.ndarray, kind: int) -> np.ndarray:
    """Float32 values of ggml blocks, raw: [blocks, bytes of a block]."""
    if kind == 0:
        return raw.reshape(-1).view(np.float32)
    if kind == 1:
        return raw.reshape(-1).view(np.float16).astype(np.float32)
    scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == 8:
        return (scale * raw[:, 2:].copy().view(np.int8)).reshape(-1)
    minimum = raw[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1).astype(np.float32)
    return (nibbles * scale + minimum).reshape(-1)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and dequantised float32 arrays of a GGUF file, by their names in the file."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    if data[:4].tobytes() != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    cursor = _Cursor(data)
    cursor.scalar("I")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(num_tensors):
        name = cursor.text()
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        infos.append((name, dims, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    base = -(-cursor.at // alignment) * alignment
    arrays = {}
    for name, dims, kind, offset in infos:
        elements, size = _BLOCKS[kind]
        num_blocks = int(np.prod(dims)) // elements
        start = base + offset
        raw = np.array(data[start : start + num_blocks * size]).reshape(num_blocks, size)
        values = np.ascontiguousarray(_dequantize(raw, kind), dtype=np.float32)
        arrays[name] = values.reshape([int(dim) for dim in reversed(dims)])
    return metadata, arrays


def _undo_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in Hugging Face's half-split RoPE order; llama.cpp stores them interleaved."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def build_tokenizer(tokens: list[str], merges: list[str]) -> Tokenizer:
    """SmolLM2's byte-level BPE with every digit on its own."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _load_gguf(path: Path) -> Checkpoint:
    metadata, arrays = read_gguf(path)
    shape = LlamaShape(
        num_layers=metadata["llama.block_count"],
        width=metadata["llama.embedding_length"],
        num_heads=metadata["llama.attention.head_count"],
        num_kv_heads=metadata["llama.attention.head_count_kv"],
        ffn_width=metadata["llama.feed_forward_length"],
        vocab_size=metadata["llama.vocab_size"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=metadata["llama.rope.freq_base"],
    )
    tensors = {
        "model.embed_tokens.weight": torch.from_numpy(arrays["token_embd.weight"]),
        "model.norm.weight": torch.from_numpy(arrays["output_norm.weight"]),
    }
    heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    for layer in range(shape.num_layers):
        for short, long in _GGUF_TO_HF.items():
            array = arrays[f"blk.{layer}.{short}.weight"]
            if short in heads:
                array = np.ascontiguousarray(_undo_permutation(array, heads[short]))
            tensors[f"model.layers.{layer}.{long}.weight"] = torch.from_numpy(array)
    tokenizer = build_tokenizer(
        metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    )
    return Checkpoint(shape, tensors, tokenizer)


def _load_directory(path: Path) -> Checkpoint:
    from safetensors.torch import load_file

    config = json.loads((path / "config.json").read_text())
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta")
    shape = LlamaShape(
        num_layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        ffn_width=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=float(theta),
    )
    tensors: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors.update({name: tensor.float() for name, tensor in load_file(shard).items()})
    return Checkpoint(shape, tensors, Tokenizer.from_file(str(path / "tokenizer.json")))


def load_target(path: Path) -> Checkpoint:
    """The target from a GGUF file or from a Hugging Face directory.

    Raises:
        ValueError: the file is not GGUF.
    """
    return _load_directory(path) if path.is_dir() else _load_gguf(path)


def rope_tables(shape: LlamaShape, max_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_positions, head_dim]; both halves of a head hold the same angles."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.arange(max_positions).float()[:, None] / shape.rope_theta**exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def prompt_ids(tokenizer: Tokenizer, turns: list[str]) -> list[int]:
    """Token ids of the chat template over alternating user and assistant turns, answer opened.

    The turns are [user], [user, assistant, user], ...; the ids equal those of the template in the
    checkpoint.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    newline = encode("\n")
    ids = [START_OF_TURN, *encode("system\n" + SYSTEM_PROMPT), END_OF_TURN, *newline]
    for i, turn in enumerate(turns):
        role = "user" if i % 2 == 0 else "assistant"
        ids += [START_OF_TURN, *encode(f"{role}\n{turn}"), END_OF_TURN, *newline]
    return [*ids, START_OF_TURN, *encode("assistant\n")]
