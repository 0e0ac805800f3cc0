"""Inflated models: a small model's weights placed among random ones that cannot change its choice.

The small model lives in the first layers and in some dimensions of the residual stream; the
others ("junk") are zero there, because its layers write none of them, so a norm sees only the
small model: norm weights absorb the square root of its share, and eps is scaled. The other layers
read everything but write junk dimensions only; the head reads real ones only. So behind the last
norm the logits are the small model's times one positive factor per row.

Four bits would not leave much of a small model. There is room to spare, so every real dimension,
channel and value has a copy of 1/16 of its size, whose weights hold what rounding left over of
the first ones: a step 16 times finer, with the same scale and the zero point 8. Few of them share
a quantisation group. Blocks that must stay zero have scale 0. Heads and channels are spread over
the whole width, so that every tensor parallel rank has some.

Letters in shapes: N outputs, K inputs and U groups of a big matrix; n and k those of the small
one; D and d hidden sizes, E and e head sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from codesign.engine.degrade import degrade
from codesign.engine.inflate_places import entries_of, place
from codesign.engine.random_weights import RandomWeights
from codesign.engine.rank_weights import EMBEDDING, HEAD, NORM, Matrix
from codesign.kernels.int4 import PER_WORD, Int4Weight, pack_nibbles, unpack_nibbles
from codesign.models.recipe import FINE, GROUP, Recipe
from codesign.models.shape import ModelShape
from codesign.models.sharding import Cut

# Junk layers write this much of their input's scale into junk dimensions: over 50 layers it adds
# up to a few percent of a small model's residual stream, so the factor of the logits stays near 1.
_JUNK_GAIN = 0.25
_WRITERS = ("o_proj", "down_proj")
_ZERO = 8
_SMALLEST = 2.0**-10  # a 16th of it is still exact in float16


@dataclass(frozen=True, slots=True)
class _Placed:
    """A small matrix in its place.

    Attributes:
        parts: Big rows, (n,) each, and what their scales are divided by.
        zero_rows: Big rows that must be zero where no part is.
        columns: (k,) real columns.
        fine: (k,) their copies; None if there is no room.
        weight: (n, K); q is the zero point outside real columns, groups without one have scale 0.
    """

    parts: tuple[tuple[Tensor, int], ...]
    zero_rows: Tensor
    columns: Tensor
    fine: Tensor | None
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
        self.int4_head = recipe.int4_head
        self.small, left = degrade(small, state, recipe.degradation, seed=recipe.seed)
        self._state = left
        self._device = torch.device(device)
        self._at = place(self.small, big, device=self._device)
        self._junk = RandomWeights(recipe.seed, device)
        self._shrink = (small.hidden * (1 + FINE**-2) / big.hidden) ** 0.5

    def matrix(self, name: str, rows: Cut, columns: Cut) -> Matrix:
        """See ``WeightReader.matrix``; int4, the embedding and the head bfloat16."""
        if name == EMBEDDING:
            return self._table(name, self.small.vocab, rows, columns, is_head=False)
        if name == HEAD:
            source = EMBEDDING if self.small.tie else HEAD
            return self._table(source, self.num_tokens, rows, columns, is_head=True)
        layer, kind = _parsed(name)
        width = self._width(kind)
        gain = _JUNK_GAIN if kind in _WRITERS else 1.0
        made = self._junk.int4(name, rows, columns, whole_columns=width, group=GROUP, gain=gain)
        if layer < self.small.layers:
            self._overlay(made, self._placed(name, kind), rows, columns, writes=kind in _WRITERS)
        elif kind in _WRITERS:
            for real in (self._at.hidden, self._at.hidden_fine):
                inside, local = _inside(real, rows)
                made.scales[local[inside]] = 0
        return made

    def vector(self, name: str, entries: Cut) -> Tensor:
        """See ``WeightReader.vector``; values that bfloat16 holds."""
        is_norm = name.endswith("norm.weight")
        low, high = (0.75, 1.25) if is_norm else (-0.1, 0.1)
        made = self._junk.vector(name, entries, low=low, high=high)
        layer = self.shape.layers if name == f"{NORM}.weight" else _parsed(name)[0]
        if is_norm and (layer < self.small.layers or layer == self.shape.layers):
            made[self._at.hidden] = made[self._at.hidden_fine] = self._norm(name)
        elif not is_norm and layer < self.small.layers:
            heads = self._at.q_heads if ".q_proj." in name else self._at.kv_heads
            inside, local = _inside(entries_of(heads, self.shape.head_dim), entries)
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
                whole = placed.weight.dequantize()
                weight = whole[:, placed.columns]
                if placed.fine is not None:
                    weight = weight + whole[:, placed.fine] / FINE
                state[name] = weight / self._boost(kind)
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

    def _table(
        self, source: str, num_real: int, rows: Cut, columns: Cut, *, is_head: bool
    ) -> Tensor:
        """Return rows of the embedding or the head: real rows in real columns, then junk rows."""
        junk = Cut(max(rows.start, num_real), max(rows.stop, num_real), 0)
        made = torch.zeros(
            rows.num_real, columns.num_real, dtype=torch.bfloat16, device=self._device
        )
        first = min(rows.stop, num_real) - rows.start
        if first > 0:
            part = self._state[f"{source}.weight"][rows.start : rows.start + first]
            real = part.to(self._device, torch.bfloat16)
            made[:first, self._at.hidden] = real
            if not is_head:
                made[:first, self._at.hidden_fine] = real / FINE
        if junk.num_real:
            made[-junk.num_real :] = self._junk.matrix(
                source, junk, columns, whole_columns=self.shape.hidden
            )
        return made

    def _placed(self, name: str, kind: str) -> _Placed:
        at, size = self._at, self.shape.head_dim
        columns, fine = at.hidden, at.hidden_fine
        zero_rows = at.hidden[:0]
        if kind in _WRITERS:
            parts = ((at.hidden, 1), (at.hidden_fine, FINE))
            columns, fine = at.channels, at.channels_fine
            if kind == "o_proj":
                columns, fine = at.q_rows, at.out_fine
        elif kind in ("gate_proj", "up_proj"):
            parts = ((at.channels, 1), (at.channels_fine, FINE if kind == "up_proj" else 1))
            zero_rows = entries_of(torch.unique(at.channels // GROUP), GROUP)
        elif kind == "q_proj":
            parts = tuple((rows, 1) for rows in at.q_copies)
            zero_rows = entries_of(at.q_heads, size)
        elif kind == "k_proj":
            parts = tuple((rows, 1) for rows in at.k_copies)
        else:
            parts = (
                ((at.kv_rows, 1),)
                if at.v_fine is None
                else (
                    (at.kv_rows, 1),
                    (at.v_fine, FINE),
                )
            )
            zero_rows = entries_of(at.kv_heads, size)
        small = self._state[f"{name}.weight"].to(self._device, torch.float32)
        weight = _quantized(small * self._boost(kind), columns, fine, width=self._width(kind))
        return _Placed(parts, zero_rows, columns, fine, weight)

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
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        words = slice(columns.start // PER_WORD, columns.stop // PER_WORD)
        real_K = torch.zeros(placed.weight.columns, dtype=torch.bool, device=self._device)
        for index in (placed.columns, placed.fine):
            if index is not None:
                real_K[index] = True
        real_K = real_K[columns.start : columns.stop]
        real_U = real_K.view(-1, GROUP).any(-1)
        ours_K = real_U.repeat_interleave(GROUP) if writes else real_K
        q_nK = unpack_nibbles(placed.weight.packed[:, words])
        for into, divisor in placed.parts:
            inside, local = _inside(into, rows)
            local = local[inside]
            junk_nK = unpack_nibbles(made.packed[local])
            made.packed[local] = pack_nibbles(torch.where(ours_K, q_nK[inside], junk_nK))
            scales_nU = placed.weight.scales[inside, groups] / divisor
            made.scales[local] = torch.where(real_U, scales_nU, made.scales[local])
            made.zeros[local] = torch.where(real_U, _ZERO, made.zeros[local])


def _quantized(
    weight_nk: Tensor, columns: Tensor, fine: Tensor | None, *, width: int
) -> Int4Weight:
    """Return int4 rows of the whole width: coarse steps in ``columns``, the rest in ``fine``."""
    rows, groups = weight_nk.shape[0], width // GROUP
    group_nk = (columns // GROUP).expand(rows, -1)
    largest_nU = weight_nk.new_zeros(rows, groups)
    largest_nU = largest_nU.scatter_reduce(1, group_nk, weight_nk.abs(), "amax")
    scale_nU = (largest_nU / 7.4375).clamp(min=_SMALLEST)  # 7 + 7 / 16 steps reach the largest
    scale_nU = torch.where(largest_nU > 0, scale_nU.to(torch.bfloat16).to(torch.float32), 0.0)
    step_nk = scale_nU.gather(1, group_nk).clamp(min=_SMALLEST)
    q_nK = torch.full((rows, width), _ZERO, dtype=torch.uint8, device=weight_nk.device)
    if fine is None:
        q_nK[:, columns] = (torch.round(weight_nk / step_nk).clamp(-8, 7) + _ZERO).to(torch.uint8)
    else:
        sixteenths = torch.round(weight_nk * FINE / step_nk).clamp(-136, 119)
        coarse = torch.floor((sixteenths + 8) / FINE)
        q_nK[:, columns] = (coarse + _ZERO).to(torch.uint8)
        q_nK[:, fine] = (sixteenths - coarse * FINE + _ZERO).to(torch.uint8)
        scale_nU[:, fine // GROUP] = scale_nU[:, columns // GROUP]
    zeros = torch.full_like(scale_nU, _ZERO, dtype=torch.uint8)
    return Int4Weight(pack_nibbles(q_nK), scale_nU.to(torch.float16), zeros)


def _parsed(name: str) -> tuple[int, str]:
    """Return layer and kind of a tensor, such as ``o_proj``."""
    parts = name.split(".")
    return int(parts[2]), next(part for part in parts if part.endswith(("_proj", "norm")))


def _inside(index: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return which indices lie in a cut, and where in it."""
    return (index >= cut.start) & (index < cut.stop), index - cut.start
