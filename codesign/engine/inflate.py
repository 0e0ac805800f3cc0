"""Inflated models: a small model's weights placed among random ones that cannot change its choice.

The small model lives in the first layers and in some dimensions of the residual stream; the
others ("junk") are zero there, because its layers write none of them, so a norm sees only the
small model: norm weights absorb sqrt(d / D), and eps is scaled. The other layers read everything
but write junk dimensions only; the head reads real ones only. So behind the last norm the logits
are the small model's times one positive factor per row.

Dimensions and channels of the small model are spread over quantisation groups, as few to a group
as there is room for: a group's other columns meet zeros, so each scale serves few real weights.
Blocks that must stay zero have scale 0. Key-value heads and channels are spread over the whole
width, so that every tensor parallel rank has some.

Letters in shapes: N outputs and K inputs of a big matrix, n real rows, D and d hidden sizes,
E and e head sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from codesign.engine.degrade import degrade
from codesign.engine.junk import Junk
from codesign.engine.rank_weights import EMBEDDING, HEAD, NORM, Matrix
from codesign.kernels.int4 import (
    PER_WORD,
    Int4Weight,
    pack_nibbles,
    quantize_int4,
    unpack_nibbles,
)
from codesign.models.recipe import GROUP, Recipe, check_fit
from codesign.models.shape import ModelShape
from codesign.models.sharding import Cut

_ROOM = (32, 64, 128)  # real columns of a group
# Junk layers write this much of their input's scale into junk dimensions: over 50 layers it adds
# up to a few percent of a small model's residual stream, so the factor of the logits stays near 1.
_JUNK_GAIN = 0.25
_WRITERS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the small model's dimensions lie in the big one; int64 indices, ascending.

    Attributes:
        hidden: (d,) in the residual stream.
        channels: (i,) in the feed-forward.
        q_rows: (heads e,) rows of the query projection, columns of the output projection.
        kv_rows: (kv heads e,) rows of the key and the value projection.
        q_heads: (heads,) big query heads.
        kv_heads: (kv heads,) big key-value heads.
    """

    hidden: Tensor
    channels: Tensor
    q_rows: Tensor
    kv_rows: Tensor
    q_heads: Tensor
    kv_heads: Tensor


def place(small: ModelShape, big: ModelShape) -> Placement:
    """Return where a small model goes in a big one.

    Raises:
        InputError: If it does not fit.
    """
    check_fit(small, big)
    kv_heads = torch.arange(small.kv_heads) * big.kv_heads // small.kv_heads
    ratio = torch.arange(small.heads // small.kv_heads)
    q_heads = (kv_heads[:, None] * (big.heads // big.kv_heads) + ratio).flatten()
    # Frequency i of e / 2 is frequency i * E / e of E / 2; a head's two halves hold the same.
    factor, half = big.head_dim // small.head_dim, small.head_dim // 2
    first = torch.arange(half) * factor
    inside = torch.cat((first, first + big.head_dim // 2))
    return Placement(
        hidden=_spread(small.hidden, big.hidden, evenly=False),
        channels=_spread(small.intermediate, big.intermediate, evenly=True),
        q_rows=(q_heads[:, None] * big.head_dim + inside).flatten(),
        kv_rows=(kv_heads[:, None] * big.head_dim + inside).flatten(),
        q_heads=q_heads,
        kv_heads=kv_heads,
    )


def _spread(count: int, whole: int, *, evenly: bool) -> Tensor:
    """Return ``count`` indices below ``whole``, as few in a quantisation group as possible."""
    groups = whole // GROUP
    room = next(room for room in _ROOM if -(-count // room) <= groups)
    used = -(-count // room)
    index = torch.arange(used) * groups // used if evenly else torch.arange(used)
    return (index[:, None] * GROUP + torch.arange(room)).flatten()[:count]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A small matrix in its place: real rows over the whole width.

    Attributes:
        rows: (n,) big rows.
        zero_rows: Big rows that must be zero.
        columns: (K,) bool, real ones.
        weight: (n, K); groups without a real column have scale 0.
    """

    rows: Tensor
    zero_rows: Tensor
    columns: Tensor
    weight: Int4Weight


class InflatedReader:
    """Makes the weights of an inflated model; see ``WeightReader``.

    Args:
        recipe: What to make.
        small: The small model's shape before it is degraded.
        state: Its tensors by Hugging Face names.
        big: The whole inflated model's shape; see ``inflated_shape``.
        token_map: Head row -> token, if the small model's head has fewer rows than tokens.
        device: Where weights are made.

    Raises:
        InputError: If the small model does not fit.
    """

    def __init__(
        self,
        recipe: Recipe,
        small: ModelShape,
        state: Mapping[str, Tensor],
        *,
        big: ModelShape,
        token_map: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = big
        self.group: int | None = GROUP
        self.num_head_rows = big.vocab
        self.num_tokens = small.vocab if token_map is None else token_map.shape[0]
        self.token_map = token_map
        self.small, left = degrade(small, state, recipe.degradation, seed=recipe.seed)
        self._state = left
        self._device = torch.device(device)
        where = place(self.small, big)
        names = Placement.__dataclass_fields__
        self._at = Placement(**{name: getattr(where, name).to(device) for name in names})
        self._junk = Junk(recipe.seed, device)
        self._shrink = (small.hidden / big.hidden) ** 0.5

    def matrix(self, name: str, rows: Cut, columns: Cut) -> Matrix:
        """See ``WeightReader.matrix``; int4, the embedding and the head bfloat16."""
        if name == EMBEDDING:
            return self._table(name, self.small.vocab, rows, columns)
        if name == HEAD:
            source = EMBEDDING if self.small.tie else HEAD
            return self._table(source, self.num_tokens, rows, columns)
        layer, kind = _parsed(name)
        width = self._width(kind)
        gain = _JUNK_GAIN if kind in _WRITERS else 1.0
        made = self._junk.int4(name, rows, columns, whole_columns=width, group=GROUP, gain=gain)
        if layer < self.small.layers:
            self._overlay(made, self._placed(name, kind), rows, columns, writes=kind in _WRITERS)
        elif kind in _WRITERS:
            inside, local = _inside(self._at.hidden, rows)
            made.scales[local[inside]] = 0
        return made

    def vector(self, name: str, entries: Cut) -> Tensor:
        """See ``WeightReader.vector``; values that bfloat16 holds."""
        is_norm = name.endswith("norm.weight")
        low, high = (0.75, 1.25) if is_norm else (-0.1, 0.1)
        made = self._junk.vector(name, entries, low=low, high=high)
        layer = self.shape.layers if name == f"{NORM}.weight" else _parsed(name)[0]
        if is_norm and (layer < self.small.layers or layer == self.shape.layers):
            made[self._at.hidden] = self._norm(name)
        elif not is_norm and layer < self.small.layers:
            heads = self._at.q_heads if ".q_proj." in name else self._at.kv_heads
            inside, local = _inside(_entries(heads, self.shape.head_dim), entries)
            made[local[inside]] = 0  # the small model has no biases
        return made

    def small_state(self) -> dict[str, Tensor]:
        """Return the small model as it was placed, by Hugging Face names, float32.

        This rounded model, not the one it was made of, is what the inflated one must agree with.
        """
        state = {}
        for name in self.small.tensors():
            stem = name.removesuffix(".weight")
            if name.endswith("norm.weight"):
                state[name] = self._norm(name) / self._shrink
            elif stem in (EMBEDDING, HEAD):
                state[name] = self._rounded(name)
            else:
                kind = _parsed(stem)[1]
                placed = self._placed(stem, kind)
                state[name] = placed.weight.dequantize()[:, placed.columns] / self._boost(kind)
        return state

    def _rounded(self, name: str) -> Tensor:
        return self._state[name].to(self._device, torch.bfloat16).to(torch.float32)

    def _norm(self, name: str) -> Tensor:
        weight_d = self._state[name].to(self._device, torch.float32)
        return (weight_d * self._shrink).to(torch.bfloat16).to(torch.float32)

    def _boost(self, kind: str) -> float:
        """What the big head size takes from a score, given back to the queries."""
        factor = self.shape.head_dim / self.small.head_dim
        return factor**0.5 if kind == "q_proj" else 1.0

    def _width(self, kind: str) -> int:
        shape = self.shape
        widths = {"o_proj": shape.heads * shape.head_dim, "down_proj": shape.intermediate}
        return widths.get(kind, shape.hidden)

    def _table(self, source: str, num_real: int, rows: Cut, columns: Cut) -> Tensor:
        """Return rows of the embedding or the head: real rows in real columns, then junk rows."""
        junk = Cut(max(rows.start, num_real), max(rows.stop, num_real), 0)
        made = torch.zeros(
            rows.num_real, columns.num_real, dtype=torch.bfloat16, device=self._device
        )
        first = min(rows.stop, num_real) - rows.start
        if first > 0:
            part = self._state[f"{source}.weight"][rows.start : rows.start + first]
            made[:first, self._at.hidden] = part.to(self._device, torch.bfloat16)
        if junk.num_real:
            made[-junk.num_real :] = self._junk.matrix(
                source, junk, columns, whole_columns=self.shape.hidden
            )
        return made

    def _placed(self, name: str, kind: str) -> _Placed:
        at, size, width = self._at, self.shape.head_dim, self._width(kind)
        none = at.hidden[:0]
        if kind in _WRITERS:
            rows, zero_rows = at.hidden, none
            columns = at.q_rows if kind == "o_proj" else at.channels
        else:
            columns = at.hidden
            if kind in ("gate_proj", "up_proj"):
                groups = torch.unique(at.channels // GROUP)
                rows, zero_rows = at.channels, _entries(groups, GROUP)
            elif kind == "k_proj":
                rows, zero_rows = at.kv_rows, none
            else:
                heads, rows = (
                    (at.q_heads, at.q_rows) if kind == "q_proj" else (at.kv_heads, at.kv_rows)
                )
                zero_rows = _entries(heads, size)
        small = self._state[f"{name}.weight"].to(self._device, torch.float32)
        real = torch.zeros(width, dtype=torch.bool, device=self._device)
        real[columns] = True
        wide = small.new_zeros(small.shape[0], width)
        wide[:, columns] = small * self._boost(kind)
        return _Placed(rows, zero_rows, real, quantize_int4(wide, group=GROUP, real_K=real))

    def _overlay(
        self, made: Int4Weight, placed: _Placed, rows: Cut, columns: Cut, *, writes: bool
    ) -> None:
        """Put real rows over junk ones, in place.

        A group's other columns keep junk where their inputs are zero. In a matrix that writes
        the residual stream, where inputs may be another head's, they hold the zero point.
        """
        inside, local = _inside(placed.zero_rows, rows)
        made.scales[local[inside]] = 0
        if writes:
            made.scales.zero_()
        inside, local = _inside(placed.rows, rows)
        local, weight = local[inside], placed.weight
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        words = slice(columns.start // PER_WORD, columns.stop // PER_WORD)
        real_K = placed.columns[columns.start : columns.stop]
        real_U = real_K.view(-1, GROUP).any(-1)
        ours_K = real_U.repeat_interleave(GROUP) if writes else real_K
        q_nK = unpack_nibbles(weight.packed[inside, words])
        junk_nK = unpack_nibbles(made.packed[local])
        made.packed[local] = pack_nibbles(torch.where(ours_K, q_nK, junk_nK))
        for into, values in ((made.scales, weight.scales), (made.zeros, weight.zeros)):
            into[local] = torch.where(real_U, values[inside, groups], into[local])


def _parsed(name: str) -> tuple[int, str]:
    """Return layer and kind of a tensor, such as ``o_proj``."""
    parts = name.split(".")
    return int(parts[2]), next(part for part in parts if part.endswith(("_proj", "norm")))


def _entries(blocks: Tensor, width: int) -> Tensor:
    """Return the indices of all entries of blocks of ``width``."""
    return (blocks[:, None] * width + torch.arange(width, device=blocks.device)).flatten()


def _inside(index: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return which indices lie in a cut, and where in it."""
    return (index >= cut.start) & (index < cut.stop), index - cut.start
