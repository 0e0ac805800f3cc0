"""The shape of a decoder, read from a Hugging Face config.json.

Needs neither torch nor the weights: the planner and the simulator size models with it, the
engine builds its layers from it, and an import checks a checkpoint's tensors against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codesign.artifacts import parse_json
from codesign.errors import InputError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies stretched as in Llama 3.1: low ones divided, high ones kept.

    Source:
        The ``llama3`` rope type of Hugging Face configurations.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; ``scaling`` None means the plain form."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes and switches that fix a decoder's forward pass.

    Attributes:
        family: ``llama``, ``qwen2`` or ``qwen3``.
        vocab: Rows of the embedding; padding rows included.
        qkv_bias: Query, key and value projections add a bias (Qwen2).
        qk_norm: Queries and keys are RMS-normalised per head (Qwen3).
        tie: The head's weight is the embedding's.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope: Rope
    eps: float
    tie: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly"
            )

    @property
    def parameters(self) -> int:
        """Number of trained values; a tied head is counted once."""
        return sum(math.prod(size) for size in self.tensors().values())

    @property
    def layer_weights(self) -> int:
        """Number of values in the matrices of a layer."""
        return sum(math.prod(size) for size in self._layer_tensors().values() if len(size) == 2)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor that a checkpoint of this shape holds."""
        tensors: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tie:
            tensors["lm_head.weight"] = (self.vocab, self.hidden)
        layer = self._layer_tensors()
        for index in range(self.layers):
            tensors.update({f"model.layers.{index}.{name}": size for name, size in layer.items()})
        return tensors

    def _layer_tensors(self) -> dict[str, tuple[int, ...]]:
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (q_rows, self.hidden),
            "self_attn.k_proj.weight": (kv_rows, self.hidden),
            "self_attn.v_proj.weight": (kv_rows, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, q_rows),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        if self.qkv_bias:
            layer["self_attn.q_proj.bias"] = (q_rows,)
            layer["self_attn.k_proj.bias"] = (kv_rows,)
            layer["self_attn.v_proj.bias"] = (kv_rows,)
        if self.qk_norm:
            layer["self_attn.q_norm.weight"] = (self.head_dim,)
            layer["self_attn.k_norm.weight"] = (self.head_dim,)
        return layer


def model_shape(directory: Path) -> ModelShape:
    """Read a model's shape from the config.json in its directory.

    Raises:
        InputError: If the file is missing or broken, or describes a model whose forward
            pass differs from the supported families' in any way that it states.
    """
    path = Path(directory) / "config.json"
    config = read_config(path)
    family = _family(config, path=path)
    _check_plain(config, path=path)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return ModelShape(
            family=family,
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            rope=_rope(config, path=path),
            eps=float(config["rms_norm_eps"]),
            tie=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            max_positions=int(config["max_position_embeddings"]),
        )
    except KeyError as err:
        raise InputError(f"{path} lacks the entry {err.args[0]!r}") from err
    except (TypeError, ValueError) as err:
        raise InputError(f"{path} holds a value that is no number: {err}") from err


def read_config(path: Path) -> dict[str, Any]:
    """Return what a config.json holds.

    Raises:
        InputError: If the file is missing or no JSON object.
    """
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise InputError(
            f"{path} cannot be read: {err.strerror}. Name a Hugging Face folder"
        ) from err
    except ValueError as err:
        raise InputError(f"{path} is no JSON: {err}") from err
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no JSON object")
    return config


def _family(config: dict[str, Any], *, path: Path) -> str:
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    found = ", ".join(architectures) or "none"
    raise InputError(f"{path} names architecture {found}; supported: {', '.join(FAMILIES)}")


def _check_plain(config: dict[str, Any], *, path: Path) -> None:
    """Refuse every switch that would change the forward pass if it were skipped."""
    plain = {
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "hidden_act": (None, "silu"),
    }
    for key, accepted in plain.items():
        if config.get(key) not in accepted:
            raise InputError(f"{path} sets {key} = {config[key]!r}, which is not supported")


def _rope(config: dict[str, Any], *, path: Path) -> Rope:
    """Read either spelling: rope_parameters (transformers 5) or rope_theta and rope_scaling."""
    entry = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(entry.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = entry.get("rope_type") or entry.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise InputError(f"{path} asks for rope type {kind!r}; supported: default, llama3")
    return Rope(
        theta,
        Llama3Scaling(
            factor=float(entry["factor"]),
            low_freq_factor=float(entry["low_freq_factor"]),
            high_freq_factor=float(entry["high_freq_factor"]),
            original_max_positions=int(entry["original_max_position_embeddings"]),
        ),
    )
