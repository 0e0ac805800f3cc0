"""Inflated models: a small model inside a network of another's size, made from a recipe.

A recipe names the shape, the small model, the seed of everything else, and how the small model
is degraded on purpose. It is an entry of the config.json in a model directory that holds the
small model's tokenizer and no weights: the engine makes them from the recipe on the device that
runs them (engine/inflate.py).
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from codesign.artifacts import sha256
from codesign.errors import InputError, counted
from codesign.models import draft_target, resolve_model
from codesign.models.importing import SINGLE, installing
from codesign.models.shape import FAMILIES, ModelShape, model_shape, read_config

ENTRY = "codesign_inflated"
GROUP = 128
FINE = 16  # everything real has a copy of 1/16 of its size, which makes rounding 16 times finer
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE")
_CONFIG_EXTRAS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOISE_LIMIT = 10.0

# family, hidden, layers, query heads, key-value heads, head_dim, intermediate, vocabulary
_SIZES = {
    "llama-3-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 128256),
    "llama-3-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256),
    "llama-3.2-3b": ("llama", 3072, 28, 24, 8, 128, 8192, 128256),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 64, 8192, 128256),
    "qwen2-72b": ("qwen2", 8192, 80, 64, 8, 128, 29568, 152064),
    "qwen2-1.5b": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936),
}
SHAPES = tuple(_SIZES)


@dataclass(frozen=True, slots=True)
class Degradation:
    """What is taken from the small model before it is placed, to lower its acceptance.

    Attributes:
        bits: Weights are rounded to so many bits first; None = not.
        noise: Gaussian noise on every matrix, as a fraction of its standard deviation.
        drop_layers: Layers that are left out, counted in the small model.
        drop_kv_heads: Key-value heads, with their query heads, left out of every layer: those
            whose output weighs least.
    """

    bits: int | None = None
    noise: float = 0.0
    drop_layers: tuple[int, ...] = ()
    drop_kv_heads: int = 0

    def __post_init__(self) -> None:
        if self.bits is not None and not 2 <= self.bits <= 8:
            raise InputError(f"bits must be in [2, 8], got {self.bits}")
        if not 0 <= self.noise <= _NOISE_LIMIT or math.isnan(self.noise):
            raise InputError(f"noise must be in [0, {_NOISE_LIMIT:g}], got {self.noise}")
        if self.drop_kv_heads < 0:
            raise InputError(f"heads to drop must be 0 or more, got {self.drop_kv_heads}")

    def shape(self, small: ModelShape) -> ModelShape:
        """Return the shape that is left of a small model.

        Raises:
            InputError: If a layer is not there, or nothing would be left.
        """
        unknown = [index for index in self.drop_layers if not 0 <= index < small.layers]
        if unknown:
            raise InputError(f"layer {unknown[0]} cannot be dropped: there are {small.layers}")
        layers = small.layers - len(set(self.drop_layers))
        kv_heads = small.kv_heads - self.drop_kv_heads
        if layers < 1 or kv_heads < 1:
            left = f"{counted(layers, 'layer')} and {counted(kv_heads, 'key-value head')}"
            raise InputError(f"dropping leaves {left}")
        ratio = small.heads // small.kv_heads
        return replace(small, layers=layers, kv_heads=kv_heads, heads=kv_heads * ratio)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make an inflated model.

    Attributes:
        shape: One of SHAPES.
        role: ``target`` or ``draft``; says what it is for, and changes nothing.
        source: The small model's name or directory.
        source_sha256: Of its weights.
        seed: Of every weight that is not the small model's, and of the noise.
        int4_head: Decoding rounds the head to int4; allowed for drafts only.
    """

    shape: str
    role: str
    source: str
    source_sha256: str
    seed: int = 0
    degradation: Degradation = Degradation()
    int4_head: bool = False

    def __post_init__(self) -> None:
        if self.int4_head and self.role != "draft":
            raise InputError("only a draft's head may be int4: a target's choices must stay")


def inflated_shape(name: str, small: ModelShape) -> ModelShape:
    """Return the shape of a small model inflated to the size called ``name``.

    Rotary base and positions are the small model's, and eps is scaled: the mean of squares runs
    over more dimensions, of which the small model and its copy fill only their own.

    Raises:
        InputError: If there is no such size.
    """
    if name not in _SIZES:
        raise InputError(f"no shape is called {name!r}; known: {', '.join(SHAPES)}")
    family, hidden, layers, heads, kv_heads, head_dim, intermediate, vocab = _SIZES[name]
    return ModelShape(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        rope=small.rope,
        eps=small.eps * small.hidden * (1 + FINE**-2) / hidden,
        tie=False,
        qkv_bias=family == "qwen2",
        qk_norm=False,
        max_positions=small.max_positions,
    )


def check_fit(small: ModelShape, big: ModelShape) -> None:
    """Check that a small model can be placed into a big one.

    Raises:
        InputError: If it cannot; the message says what does not fit and what would help.
    """
    if small.qkv_bias or small.qk_norm or small.rope.scaling is not None:
        raise InputError("only a Llama model without rope scaling can be inflated")
    if big.head_dim % small.head_dim:
        raise InputError(f"heads of {small.head_dim} do not divide heads of {big.head_dim} evenly")
    help_with = {"layers": "--drop-layers", "kv_heads": "--drop-kv-heads"}
    for name in ("layers", "kv_heads", "vocab"):
        ours, theirs = getattr(small, name), getattr(big, name)
        if ours > theirs:
            flag = help_with.get(name)
            advice = f"; leave {ours - theirs} out with {flag}" if flag else ""
            raise InputError(f"the small model has {ours} {name}, the shape {theirs}{advice}")
    if small.heads // small.kv_heads > big.heads // big.kv_heads:
        raise InputError("the small model has more query heads per key-value head than the shape")
    for name in ("hidden", "intermediate"):
        ours, theirs = getattr(small, name), getattr(big, name)
        if 2 * ours > theirs // GROUP * GROUP:
            raise InputError(f"{name} {ours} does not fit twice into {theirs}")


def create_inflated(recipe: Recipe, *, name: str) -> Path:
    """Write the model directory of a recipe into the cache; a few megabytes of tokenizer.

    Raises:
        InputError: If the name is taken, or the small model does not fit the shape.
    """
    source = resolve_model(recipe.source)
    small = model_shape(source)
    big = inflated_shape(recipe.shape, small)
    check_fit(recipe.degradation.shape(small), big)
    # A shipped draft has no tokenizer of its own.
    tokenizer = resolve_model(draft_target(recipe.source) or recipe.source)
    extras = read_config(tokenizer / "config.json")
    config = _config(big) | {key: extras[key] for key in _CONFIG_EXTRAS if key in extras}
    config[ENTRY] = asdict(recipe)
    with installing(name) as partial:
        for file in _TOKENIZER_FILES:
            if (tokenizer / file).is_file():
                shutil.copyfile(tokenizer / file, partial / file)
        text = json.dumps(config, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
    return resolve_model(name)


def weights_sha256(name: str) -> str:
    """Return the checksum of a small model's weights.

    Raises:
        InputError: If there is no such model, or it is in more than one file.
    """
    file = resolve_model(name) / SINGLE
    if not file.is_file():
        raise InputError(f"{name} has no {SINGLE}: only a small model can be inflated")
    return sha256(file)


def read_recipe(directory: Path) -> Recipe | None:
    """Return the recipe in a model directory; None if it is an ordinary model.

    Raises:
        InputError: If the recipe is broken.
    """
    path = directory / "config.json"
    entry = read_config(path).get(ENTRY)
    if entry is None:
        return None
    try:
        lost = dict(entry["degradation"])
        lost["drop_layers"] = tuple(lost["drop_layers"])
        return Recipe(**{**entry, "degradation": Degradation(**lost)})
    except (KeyError, TypeError, ValueError) as err:
        raise InputError(f"{path} holds a broken recipe: {err!r}. Inflate the model again") from err


def _config(shape: ModelShape) -> dict[str, Any]:
    architecture = next(name for name, family in FAMILIES.items() if family == shape.family)
    return {
        "architectures": [architecture],
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope.theta,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
