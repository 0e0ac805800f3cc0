"""What a model's forward reads and computes on one of several GPUs.

Shapes of known models are Hugging Face configurations in codesign/data/shapes. Weights of layers
are bf16, fp8, int8 or int4 in groups; embedding, head and KV rows stay bf16, as in AWQ checkpoints.
Key-value heads are filled up to a multiple of the GPUs with their query heads, feed-forward
channels to multiples of 128 per GPU (SwiftSpec, section 4).

Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from codesign.errors import InputError
from codesign.models import lasting_name, resolve_model
from codesign.models.shape import ModelShape, model_shape, read_config

Weights = Literal["bf16", "fp8", "int8", "int4"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)

_FOLDER = Path(__file__).parents[1] / "data" / "shapes"
_BITS: dict[str, float] = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0}
_INT4_GROUP_BITS = 16 + 4  # scale and zero point of a group
_CHANNELS = 128
_ALIASES = {"llama-3-8b": "llama-3.1-8b"}  # as codesign models inflate calls that size
_LARGE = 6.5e9  # parameters of a "7B" model
PADDING = 0.01  # of a vocabulary: more than this is not padding of the same one
# Mean relative error of a forward's seconds for an engine that the fitting left out
# (benchmarks/fit_roofline.py), models of 7B and more, and smaller ones.
LARGE_ERROR, SMALL_ERROR = 0.19, 0.33


@dataclass(frozen=True, slots=True)
class PricedModel:
    """A model's shape and the width of its weights.

    Attributes:
        name: Of the model.
        shape: Its sizes.
        weights: Kind of its layers' weights.
        group: Weights that share a scale, int4 only.
        is_head_quantized: The head's weights are like the layers'.
    """

    name: str
    shape: ModelShape
    weights: Weights = "bf16"
    group: int = 128
    is_head_quantized: bool = False

    @property
    def label(self) -> str:
        """As ``parse_model`` reads it."""
        return self.name if self.weights == "bf16" else f"{self.name}:{self.weights}"

    @property
    def is_large(self) -> bool:
        """7B parameters or more."""
        return self.shape.parameters >= _LARGE

    @property
    def error(self) -> float:
        """Mean relative error of its forward's seconds for an engine nobody measured."""
        return LARGE_ERROR if self.is_large else SMALL_ERROR

    def weight_bytes(self, gpus: int) -> dict[str, float]:
        """Bytes of weights that one GPU reads in a forward, by kind."""
        layers = self.shape.layers * self._layer_weights(gpus) * self._bytes_per_weight
        head = float(_ceil(self.shape.vocab, gpus) * self.shape.hidden)
        if self.weights == "bf16" or self.is_head_quantized:
            return {self.weights: layers + head * self._bytes_per_weight}
        return {self.weights: layers, "bf16": 2.0 * head}

    def memory_bytes(self, gpus: int) -> float:
        """Bytes of weights that lie on one GPU: the embedding too, which is not cut."""
        table = 0.0 if self.shape.tie and gpus == 1 else 2.0 * self.shape.vocab * self.shape.hidden
        return sum(self.weight_bytes(gpus).values()) + table

    def kv_bytes(self, gpus: int) -> float:
        """Bytes of one token's keys and values on one GPU."""
        kv_heads = _ceil(self.shape.kv_heads, gpus)
        return 2.0 * 2.0 * self.shape.layers * kv_heads * self.shape.head_dim

    def flops_per_row(self, gpus: int) -> float:
        """Operations of one GPU for a row, attention not counted."""
        head = _ceil(self.shape.vocab, gpus) * self.shape.hidden
        return 2.0 * (self.shape.layers * self._layer_weights(gpus) + head)

    def attention_flops(self, gpus: int) -> float:
        """Operations of one GPU for a row and one token that it attends to."""
        return 4.0 * self.shape.layers * self._heads(gpus) * self.shape.head_dim

    @property
    def _bytes_per_weight(self) -> float:
        bits = _BITS[self.weights]
        return (bits + _INT4_GROUP_BITS / self.group if self.weights == "int4" else bits) / 8.0

    def _heads(self, gpus: int) -> int:
        shape = self.shape
        return _ceil(shape.kv_heads, gpus) * (shape.heads // shape.kv_heads)

    def _layer_weights(self, gpus: int) -> int:
        """Weights of one layer on one GPU, padding included."""
        shape = self.shape
        heads, kv_heads = self._heads(gpus), _ceil(shape.kv_heads, gpus)
        channels = _ceil(shape.intermediate, gpus)
        if gpus > 1:
            channels = _ceil(channels, _CHANNELS) * _CHANNELS
        attention = 2 * (heads + kv_heads) * shape.head_dim * shape.hidden
        return attention + 3 * channels * shape.hidden


def known_models() -> tuple[str, ...]:
    """Names of the shapes that come with the package."""
    return tuple(sorted(path.name for path in _FOLDER.iterdir() if path.is_dir()))


def parse_model(text: str) -> PricedModel:
    """The model that a word of the command line names, and its weights ("NAME:int4"; bf16).

    Args:
        text: A known shape as "llama-3-70b", a model in the cache, or a folder with a config.json,
            whose absolute path becomes the model's name.

    Raises:
        InputError: If there is no such model or no such kind of weights, or a folder holds
            quantised weights and nothing is said of their kind.
    """
    name, colon, weights = text.rpartition(":")
    if not colon:
        name, weights = text, "bf16"
    if weights not in WEIGHTS:
        raise InputError(f"unknown weights {weights!r} of {name}; one of {', '.join(WEIGHTS)}")
    folder, is_known = _folder(name)
    if not colon and "quantization_config" in read_config(folder / "config.json"):
        raise InputError(
            f"{folder} holds quantised weights. Say of which kind: {name}:int4, :int8 or :fp8"
        )
    return PricedModel(
        folder.name if is_known else lasting_name(name),
        model_shape(folder),
        weights,  # type: ignore[arg-type]
    )


def find_shape(label: str) -> ModelShape | None:
    """Sizes of the model that a fit or a plan names; None where neither package nor disk has it."""
    name, _, weights = label.rpartition(":")
    try:
        return model_shape(_folder(name if weights in WEIGHTS else label)[0])
    except InputError:
        return None


def _folder(name: str) -> tuple[Path, bool]:
    """Where a model's config.json lies, and whether it is one of the package's shapes."""
    folder = _FOLDER / _ALIASES.get(name.lower(), name.lower())
    if "/" not in name and (folder / "config.json").is_file():
        return folder, True
    try:
        return resolve_model(name), False
    except InputError as err:
        raise InputError(
            f"unknown model {name!r}; name a folder with a config.json, a model of codesign models "
            f"list, or one of {', '.join(known_models())}"
        ) from err


def _ceil(value: int, parts: int) -> int:
    return -(-value // parts)
