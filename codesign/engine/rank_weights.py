"""The weights of one tensor parallel rank, layer by layer, from any kind of checkpoint.

A ``WeightReader`` gives parts of named matrices: from tensors in memory (here), from safetensors
files (checkpoint.py) or made up from a seed (inflate.py). ``RankWeights`` cuts out a rank's part,
fills it up with zeros and joins what runs as one map. A layer is read when it is asked for, so
that a caller that repacks it for its kernels never holds a model twice.

Letters in shapes: D hidden size, E head size; h query heads, g key-value heads, i channels and
v head rows of the rank; V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from codesign.kernels.int4 import Int4Weight, quantize_int4, stack_rows
from codesign.models.shape import ModelShape
from codesign.models.sharding import Cut, Sharding

Matrix = Tensor | Int4Weight

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
NORM = "model.norm"


class WeightReader(Protocol):
    """Where weights come from; names are those of Hugging Face without ``.weight``.

    Attributes:
        shape: The whole model's.
        group: Columns that share a quantisation scale; None if weights are not quantised.
        num_head_rows: Rows of the head.
        num_tokens: Rows of the head that stand for tokens; those behind them only fill it up.
        token_map: (num_tokens,) int64, head row -> token; None if they are the same.
        int4_head: Whether decoding rounds the head to int4.
    """

    shape: ModelShape
    group: int | None
    num_head_rows: int
    num_tokens: int
    token_map: Tensor | None
    int4_head: bool

    def matrix(self, name: str, rows: Cut, columns: Cut) -> Matrix:
        """Return rows ``[rows.start, rows.stop)`` and such columns of a matrix, unpadded."""
        ...

    def vector(self, name: str, entries: Cut) -> Tensor:
        """Return entries of a vector, unpadded; ``name`` is whole, such as ``NAME.bias``."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of one rank.

    Attributes:
        input_norm: (D,).
        qkv: (h E + 2 g E, D): query heads, key heads, value heads.
        qkv_bias: As many entries, or None.
        q_norm: (E,), or None.
        k_norm: (E,), or None.
        out: (D, h E); the sum over ranks is the attention's output.
        mlp_norm: (D,).
        gate_up: (2 i, D): gate channels, then up channels.
        down: (D, i); the sum over ranks is the feed-forward's output.
    """

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class EndWeights:
    """What comes before the first and behind the last layer.

    Attributes:
        embedding: (V, D), whole on every rank.
        norm: (D,).
        head: (v, D), the rank's rows of the head.
        head_start: Row of the whole head that row 0 is.
        num_real: Rows of ``head`` that stand for tokens; logits of the others do not count.
        num_tokens: Such rows of the whole head; they come first.
        token_map: Head row of the whole head -> token, or None if they are the same.
        head_group: Columns that share a scale where decoding rounds the head to int4; None: it
            does not.
    """

    embedding: Tensor
    norm: Tensor
    head: Tensor
    head_start: int
    num_real: int
    num_tokens: int
    token_map: Tensor | None
    head_group: int | None = None

    def decoding_head(self) -> Matrix:
        """The head that decoding multiplies by."""
        if self.head_group is None:
            return self.head
        return quantize_int4(self.head, group=self.head_group)


class RankWeights:
    """One rank's part of a model.

    Args:
        reader: Where the weights come from.
        size: Tensor parallel degree.
        rank: 0 to size - 1.
        device: Where tensors go.
        dtype: What floating-point tensors are converted to; int4 matrices stay int4.

    Attributes:
        sharding: How the whole model is cut.
        shape: The rank's own shape.

    Raises:
        InputError: If the degree does not fit the model.
    """

    def __init__(
        self,
        reader: WeightReader,
        *,
        size: int = 1,
        rank: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.sharding = Sharding(
            reader.shape,
            size=size,
            rank=rank,
            group=reader.group,
            num_head_rows=reader.num_head_rows,
        )
        self.shape = self.sharding.shape
        self.device = torch.device(device)
        self.dtype = dtype
        self._reader = reader

    def layer(self, index: int) -> LayerWeights:
        """Read or make one layer.

        Raises:
            InputError: If a tensor is missing or broken.
        """
        cuts, whole = self.sharding, self.sharding.whole
        at, hidden = f"model.layers.{index}.", cuts.hidden
        qkv = tuple(
            (f"{at}self_attn.{name}_proj", rows)
            for name, rows in (("q", cuts.q_rows), ("k", cuts.kv_rows), ("v", cuts.kv_rows))
        )
        return LayerWeights(
            input_norm=self._vector(f"{at}input_layernorm.weight", hidden),
            qkv=_stack([self._matrix(name, rows, hidden) for name, rows in qkv]),
            qkv_bias=torch.cat([self._vector(f"{name}.bias", rows) for name, rows in qkv])
            if whole.qkv_bias
            else None,
            q_norm=self._head_norm(f"{at}self_attn.q_norm.weight"),
            k_norm=self._head_norm(f"{at}self_attn.k_norm.weight"),
            out=self._matrix(f"{at}self_attn.o_proj", hidden, cuts.q_rows),
            mlp_norm=self._vector(f"{at}post_attention_layernorm.weight", hidden),
            gate_up=_stack(
                [self._matrix(f"{at}mlp.{n}_proj", cuts.channels, hidden) for n in ("gate", "up")]
            ),
            down=self._matrix(f"{at}mlp.down_proj", hidden, cuts.channels),
        )

    def ends(self) -> EndWeights:
        """Read or make embedding, last norm and head.

        Raises:
            InputError: If a tensor is missing or broken.
        """
        cuts, reader = self.sharding, self._reader
        vocab = Cut(0, cuts.whole.vocab, cuts.whole.vocab)
        rows = cuts.head_rows
        embedding = self._tensor(EMBEDDING, vocab, cuts.hidden)
        if cuts.whole.tie:
            head = _pad(embedding[rows.start : rows.stop], rows.length, cuts.hidden.length)
        else:
            head = self._tensor(HEAD, rows, cuts.hidden)
        return EndWeights(
            embedding=embedding,
            norm=self._vector(f"{NORM}.weight", cuts.hidden),
            head=head,
            head_start=rows.start,
            num_real=max(0, min(rows.stop, reader.num_tokens) - rows.start),
            num_tokens=reader.num_tokens,
            token_map=None if reader.token_map is None else reader.token_map.to(self.device),
            head_group=reader.group if reader.int4_head else None,
        )

    def _matrix(self, name: str, rows: Cut, columns: Cut) -> Matrix:
        matrix = self._reader.matrix(name, rows, columns)
        if isinstance(matrix, Int4Weight):
            group = self.sharding.group
            assert group is not None, f"{name}: the reader names no group"
            return matrix.to(self.device).pad(rows.length, columns.length, group=group)
        return _pad(matrix.to(self.device, self.dtype), rows.length, columns.length)

    def _tensor(self, name: str, rows: Cut, columns: Cut) -> Tensor:
        matrix = self._matrix(name, rows, columns)
        assert isinstance(matrix, Tensor), f"{name} must not be quantised"
        return matrix

    def _vector(self, name: str, entries: Cut) -> Tensor:
        vector = self._reader.vector(name, entries).to(self.device, self.dtype)
        return F.pad(vector, (0, entries.length - entries.num_real))

    def _head_norm(self, name: str) -> Tensor | None:
        if not self.sharding.whole.qk_norm:
            return None
        size = self.sharding.whole.head_dim
        return self._vector(name, Cut(0, size, size))


class StateReader:
    """Weights from tensors in memory, by their whole Hugging Face names.

    Args:
        shape: Sizes and switches.
        state: See ``ModelShape.tensors``.
        token_map: (rows of the head,) int64, head row -> token, where the head has fewer rows
            than the vocabulary; None if they are the same.
    """

    def __init__(
        self, shape: ModelShape, state: Mapping[str, Tensor], *, token_map: Tensor | None = None
    ) -> None:
        rows = shape.vocab if token_map is None else token_map.shape[0]
        self.shape = shape
        self.group: int | None = None
        self.num_head_rows = self.num_tokens = rows
        self.token_map = token_map
        self.int4_head = False
        self._state = state

    def matrix(self, name: str, rows: Cut, columns: Cut) -> Matrix:
        """See ``WeightReader.matrix``."""
        tensor = self._state[f"{name}.weight"]
        part = tensor[rows.start : rows.stop, columns.start : columns.stop]
        return tensor if part.shape == tensor.shape else part  # shared, not only the same memory

    def vector(self, name: str, entries: Cut) -> Tensor:
        """See ``WeightReader.vector``."""
        return self._state[name][entries.start : entries.stop]


def _stack(parts: list[Matrix]) -> Matrix:
    quantized = [part for part in parts if isinstance(part, Int4Weight)]
    if quantized:
        assert len(quantized) == len(parts), "maps that run as one must be quantised alike"
        return stack_rows(quantized)
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _pad(tensor: Tensor, rows: int, columns: int) -> Tensor:
    more_rows, more_columns = rows - tensor.shape[0], columns - tensor.shape[1]
    if more_rows == more_columns == 0:
        return tensor
    return F.pad(tensor, (0, more_columns, 0, more_rows))
