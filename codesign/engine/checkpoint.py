"""Opening a model directory: which reader its files need.

A directory holds a Hugging Face checkpoint (floating point, AutoAWQ or compressed-tensors int4),
a shipped draft (int8 rows, its target's embedding), or the recipe of an inflated model.

Letters in shapes: N outputs, K inputs of a matrix.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from codesign.engine.draft_weights import TOKEN_MAP, load_draft_state
from codesign.engine.inflate import InflatedReader
from codesign.engine.rank_weights import (
    EMBEDDING,
    HEAD,
    Matrix,
    RankWeights,
    StateReader,
    WeightReader,
)
from codesign.engine.weights import TensorFiles, read_tensors
from codesign.errors import InputError
from codesign.kernels.int4 import Int4Weight, pack_nibbles, rounded_weight, unpack_nibbles
from codesign.models import draft_target, resolve_model
from codesign.models.quantization import Quantization, expected_tensors, read_quantization
from codesign.models.recipe import read_recipe, weights_sha256
from codesign.models.shape import ModelShape, model_shape, read_config
from codesign.models.sharding import Cut

# Column of the eight that a word holds, by nibble from the lowest, in AutoAWQ's files.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def open_rank(
    directory: Path | str,
    *,
    size: int = 1,
    rank: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> RankWeights:
    """Return one rank's weights of the model in a directory; a layer is read when asked for.

    Args:
        directory: A Hugging Face directory, or one that ``codesign models inflate`` wrote.
        size: Tensor parallel degree, any.
        rank: 0 to size - 1.
        device: Where tensors go; an inflated model is built there.
        dtype: What floating-point tensors are converted to.

    Raises:
        InputError: If its family or format is not supported, or a file is missing or broken.
    """
    reader = open_reader(Path(directory), device=device)
    return RankWeights(reader, size=size, rank=rank, device=device, dtype=dtype)


def open_reader(directory: Path, *, device: torch.device | str = "cpu") -> WeightReader:
    """Return what reads, or makes, the weights of a directory. See ``open_rank``.

    Raises:
        InputError: If the directory was inflated from weights that have changed since.
    """
    recipe = read_recipe(directory)
    if recipe is None:
        shape = model_shape(directory)
        return CheckpointReader(directory, shape, read_quantization(directory, shape))
    source = resolve_model(recipe.source)
    if weights_sha256(recipe.source) != recipe.source_sha256:
        raise InputError(
            f"{directory} was inflated from another {recipe.source} than {source}. Inflate it "
            f"again under a new name: codesign models inflate --{recipe.role} "
            f"--shape {recipe.shape} --name NAME"
        )
    token_map: Tensor | None = None
    if (target := draft_target(recipe.source)) is None:
        shape = model_shape(source)
        state = read_tensors(source, shape.tensors())
    else:
        shape, state, token_map = _shipped_draft(source, read_embedding(resolve_model(target)))
    big = model_shape(directory)
    return InflatedReader(recipe, shape, state, big=big, token_map=token_map, device=device)


def is_shipped_draft(directory: Path) -> bool:
    """Whether a model uses its target's embedding (see draft_weights.py)."""
    return "codesign_draft" in read_config(directory / "config.json")


def read_embedding(directory: Path) -> Tensor:
    """Return a model's embedding, (V, D), as it is stored."""
    name = f"{EMBEDDING}.weight"
    return read_tensors(directory, {name: model_shape(directory).tensors()[name]})[name]


def open_draft(directory: Path, embedding_VD: Tensor) -> StateReader:
    """Return the weights of a shipped draft.

    Args:
        directory: Holds config.json and the draft's weights.
        embedding_VD: The target's, which the draft uses.

    Raises:
        InputError: If a file or tensor is missing or broken, or the draft was made for a target
            of another width or vocabulary.
    """
    shape, state, token_map = _shipped_draft(directory, embedding_VD)
    return StateReader(shape, state, token_map=token_map)


def _shipped_draft(
    directory: Path, embedding_VD: Tensor
) -> tuple[ModelShape, dict[str, Tensor], Tensor]:
    shape = replace(model_shape(directory), tie=False)  # the head is the draft's own
    ours, theirs = (shape.vocab, shape.hidden), tuple(embedding_VD.shape)
    if ours != theirs:
        raise InputError(
            f"the draft has vocabulary and width {ours}, its target {theirs}: it was made for "
            "another target. List the pairs that fit: codesign models list"
        )
    state = load_draft_state(directory) | {f"{EMBEDDING}.weight": embedding_VD}
    if missing := sorted(set(shape.tensors()) - set(state)):
        raise InputError(
            f"{directory} holds no tensor {missing[0]} ({len(missing)} missing). Fetch or make the "
            "draft again: codesign models list"
        )
    return shape, state, state.pop(TOKEN_MAP)


class CheckpointReader:
    """Weights in the safetensors files of a Hugging Face directory."""

    def __init__(
        self, directory: Path, shape: ModelShape, quantization: Quantization | None
    ) -> None:
        self.shape = shape
        self.group = None if quantization is None else quantization.group
        self.num_head_rows = self.num_tokens = shape.vocab
        self.token_map: Tensor | None = None
        self.int4_head = quantization is not None and quantization.int4_head
        self._quantization = quantization
        self._files = TensorFiles(directory, expected_tensors(shape, quantization))

    def matrix(self, name: str, rows: Cut, columns: Cut) -> Matrix:
        """See ``WeightReader.matrix``."""
        if self._quantization is None or name in (EMBEDDING, HEAD):
            spans = (rows.start, rows.stop), (columns.start, columns.stop)
            return self._files.read(f"{name}.weight", *spans)
        if self._quantization.method == "awq":
            return self._awq(name, rows, columns, self._quantization.group)
        return self._packed(name, rows, columns, self._quantization)

    def vector(self, name: str, entries: Cut) -> Tensor:
        """See ``WeightReader.vector``."""
        return self._files.read(name, (entries.start, entries.stop))

    def _awq(self, name: str, rows: Cut, columns: Cut, group: int) -> Int4Weight:
        words, outputs = _divided(rows, 8, name), (rows.start, rows.stop)
        groups, inputs = _divided(columns, group, name), (columns.start, columns.stop)
        q_KN = unpack_awq(self._files.read(f"{name}.qweight", inputs, words))
        zeros_UN = unpack_awq(self._files.read(f"{name}.qzeros", groups, words))
        scales_UN = self._files.read(f"{name}.scales", groups, outputs)
        return _rounded(pack_nibbles(q_KN.t()), scales_UN.t(), zeros_UN.t(), name)

    def _packed(self, name: str, rows: Cut, columns: Cut, how: Quantization) -> Int4Weight:
        outputs, words = (rows.start, rows.stop), _divided(columns, 8, name)
        groups = _divided(columns, how.group, name)
        scales_NU = self._files.read(f"{name}.weight_scale", outputs, groups)
        if how.symmetric:
            zeros_NU = torch.full(scales_NU.shape, 8, dtype=torch.uint8)
        else:
            span = _divided(rows, 8, name)
            words_NU = self._files.read(f"{name}.weight_zero_point", span, groups)
            zeros_NU = unpack_nibbles(words_NU.t()).t().contiguous()
        packed_NW = self._files.read(f"{name}.weight_packed", outputs, words)
        return _rounded(packed_NW.to(torch.int32), scales_NU, zeros_NU, name)


def pack_awq(q: Tensor) -> Tensor:
    """Return int32 words of values 0..15, eight columns to a word in AutoAWQ's order."""
    return pack_nibbles(q.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2))


def unpack_awq(words: Tensor) -> Tensor:
    """Return the values of AutoAWQ's words, columns in their order, uint8."""
    places = [AWQ_ORDER.index(column) for column in range(8)]
    return unpack_nibbles(words).unflatten(-1, (-1, 8))[..., places].flatten(-2)


def _divided(cut: Cut, by: int, name: str) -> tuple[int, int]:
    assert cut.start % by == cut.stop % by == 0, f"{name}: {cut} cuts through {by}"
    return cut.start // by, cut.stop // by


def _rounded(packed: Tensor, scales: Tensor, zeros: Tensor, name: str) -> Int4Weight:
    try:
        return rounded_weight(packed, scales, zeros)
    except ValueError as err:
        raise InputError(f"{name}: {err}") from err
