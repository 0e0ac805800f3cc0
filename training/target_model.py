"""Reads the target from a Hugging Face directory with torch, safetensors and tokenizers only.

Every tensor leaves this module under its Hugging Face Llama name, in float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

END_OF_TURN = 2
START_OF_TURN = 1
NUM_SPECIAL_TOKENS = 17
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


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


def load_target(path: Path) -> Checkpoint:
    """The target from a Hugging Face directory, such as `codesign models fetch` makes."""
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
