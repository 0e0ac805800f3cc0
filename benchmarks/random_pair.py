"""A random target and a draft that agrees with it now and then, so that nothing is downloaded.

    python -m benchmarks.random_pair FOLDER [--layers 16] [--sharpness 3]

writes a model with a tokenizer of letters, which ``inflated_plan`` takes as the source of
target and draft. The target may be inflated to a published shape.
"""

from __future__ import annotations

import argparse
import json
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import Tensor

from codesign.models.recipe import Recipe, create_inflated, weights_sha256
from codesign.models.shape import model_shape

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 61,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""config.json of a Llama for tests on the CPU."""
LETTERS = ["[UNK]", *string.ascii_lowercase, *" ,.:-\n"]


def small_config(
    *,
    layers: int,
    vocabulary: int = 4096,
    max_positions: int = 2048,
    rope_theta: float = 10000.0,
) -> dict[str, Any]:
    """config.json of a Llama that is 512 wide."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "vocab_size": vocabulary,
        "rope_theta": rope_theta,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }


def write_sharp_model(folder: Path, *, layers: int, sharpness: float) -> None:
    """Write a model whose likeliest token is far ahead of the others.

    Args:
        folder: A new one.
        layers: Of the model.
        sharpness: What the logits of ``write_random_pair``'s target are multiplied by.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(small_config(layers=layers)))
    state = _random_state(model_shape(folder).tensors())
    state["lm_head.weight"] *= sharpness
    save_file(state, folder / "model.safetensors")
    write_letters(folder)


def write_letters(folder: Path) -> None:
    """Write a tokenizer of one token a letter, 0 for others, and a chat template that adds none."""
    kind = tokenizer_models.WordLevel({word: i for i, word in enumerate(LETTERS)}, "[UNK]")
    tokenizer = Tokenizer(kind)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}: "
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def random_tensors(sizes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return random tensors for names and shapes: norms near 1, maps that keep a row's scale."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in sizes.items():
        noise = torch.randn(size, generator=generator)
        is_norm = name.endswith("norm.weight")
        tensors[name] = 1 + 0.1 * noise if is_norm else noise * size[-1] ** -0.5
    return tensors


def _random_state(
    sizes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Weights by name; the head's four times as large as the other maps'.

    So greedy output is neither constant nor decided by rounding.
    """
    state = random_tensors(sizes, seed=0)
    return {k: (v * (4.0 if "lm_head" in k else 1.0)).to(dtype) for k, v in state.items()}


def write_random_pair(
    root: Path,
    config: Mapping[str, Any],
    *,
    target: str = "target",
    noise: float = 0.05,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the folders ``target`` and "draft" below ``root``, without tokenizers.

    Args:
        root: An empty folder.
        config: Both models' config.json.
        target: Name of the target's folder.
        noise: On the draft's matrices, in their standard deviations.
        dtype: Of the weights.
    """
    for name in (target, "draft"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    state = _random_state(model_shape(root / target).tensors(), dtype)
    generator = torch.Generator().manual_seed(1)
    noisy = {}
    for name, tensor in state.items():
        drawn = torch.randn(tensor.shape, generator=generator).to(dtype)
        noisy[name] = tensor + noise * tensor.std() * drawn if tensor.ndim == 2 else tensor
    save_file(state, root / target / "model.safetensors")
    save_file(noisy, root / "draft" / "model.safetensors")


def write_source_pair(root: Path, config: Mapping[str, Any]) -> None:
    """Write the folders "source" and "draft" below ``root``, with a tokenizer that is none."""
    write_random_pair(root, config, target="source")
    for name in ("source", "draft"):
        (root / name / "tokenizer.json").write_text("{}")


def inflate_source(root: Path, shape: str, *, prefix: str) -> Path:
    """Return the directory of a new model of a published shape with the answers of "source"."""
    source = str(root / "source")
    recipe = Recipe(shape, "target", source, weights_sha256(source))
    return create_inflated(recipe, name=f"{prefix}-{time.monotonic_ns()}")


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sharpness", type=float, default=3.0)
    args = parser.parse_args()
    write_sharp_model(args.folder, layers=args.layers, sharpness=args.sharpness)


if __name__ == "__main__":
    main()
