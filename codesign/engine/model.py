"""Decoders of the Llama, Qwen2 and Qwen3 families: one forward pass over ragged rows.

Linear maps run over all rows at once, attention request by request over its slab. Every op
comes from codesign.kernels. Knows no policy, no sampling and no process.

Letters in shapes: T rows, n rows of one request, D hidden size, H query heads, G key/value heads,
E head size, S rows of a slab in use, V rows of the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from codesign.engine.checkpoint import open_draft, open_rank, read_embedding
from codesign.engine.kv_cache import KVCache
from codesign.engine.rank_weights import LayerWeights, RankWeights, StateReader
from codesign.engine.rows import RowBatch
from codesign.kernels import (
    LinearMap,
    pack_linear,
    pad_rows,
    padded_rows,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    rotate,
    swiglu,
    tree_attention,
)
from codesign.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: LinearMap
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: LinearMap
    mlp_norm: Tensor
    gate_up: LinearMap
    down: LinearMap


@dataclass(frozen=True, slots=True)
class _Span:
    """One request's part of a batch: its rows [start, end) and what they see."""

    slot: int
    start: int
    end: int
    bias_nS: Tensor | None
    causal: bool


class Decoder:
    """A decoder with its weights on one device.

    Args:
        weights: Of the whole model.

    Attributes:
        shape: Sizes and switches.
        token_map: (V,) int64, head row -> token id, where the head has fewer rows than the
            vocabulary; None if they are the same.
    """

    def __init__(self, weights: RankWeights) -> None:
        ends = weights.ends()
        self.shape = weights.shape
        self.token_map = ends.token_map
        self.embedding_VD = ends.embedding
        self._head = pack_linear(ends.decoding_head())
        self._num_tokens = ends.num_tokens
        self._norm = ends.norm
        layers = range(self.shape.layers)
        self._layers = [_layer(weights.layer(i), weights.dtype) for i in layers]
        frequency_F = rotary_frequencies(self.shape.rope, self.shape.head_dim)
        self._frequency_F = frequency_F.to(weights.device)

    @torch.inference_mode()
    def forward(self, batch: RowBatch, cache: KVCache) -> Tensor:
        """Append the rows' keys and values to their slabs and return hidden states, (T, D).

        Raises:
            CapacityError: If a slab is too short; nothing is changed then.
        """
        cache.extend(batch)
        spans = _spans(batch, cache, self._norm.dtype)
        num_rows = batch.num_rows
        # Rows behind the batch's own only bring the count to a fast one; attention skips them.
        size = padded_rows(num_rows) if self.embedding_VD.device.type == "cpu" else num_rows
        tables = rotary_tables(pad_rows(batch.positions, size), self._frequency_F)
        tables = (tables[0].to(self._norm.dtype), tables[1].to(self._norm.dtype))
        x_TD = self.embedding_VD[pad_rows(batch.tokens, size)]
        for index, layer in enumerate(self._layers):
            x_TD = x_TD + self._attention(index, layer, x_TD, tables, spans, cache)
            h_TD = rms_norm(x_TD, layer.mlp_norm, self.shape.eps)
            x_TD = x_TD + layer.down(swiglu(layer.gate_up(h_TD)))
        return rms_norm(x_TD[:num_rows], self._norm, self.shape.eps)

    @torch.inference_mode()
    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the head's float32 logits of hidden states from ``forward``, (T, V)."""
        num_rows = hidden_TD.shape[0]
        size = padded_rows(num_rows) if hidden_TD.device.type == "cpu" else num_rows
        logits_TV = self._head(pad_rows(hidden_TD, size))[:num_rows].float()
        return logits_TV[:, : self._num_tokens].contiguous()

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x_TD: Tensor,
        tables: tuple[Tensor, Tensor],
        spans: list[_Span],
        cache: KVCache,
    ) -> Tensor:
        shape = self.shape
        qkv_T = layer.qkv(rms_norm(x_TD, layer.input_norm, shape.eps)).contiguous()
        heads = qkv_T.view(qkv_T.shape[0], -1, shape.head_dim)
        qk, v_TGE = heads.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THE, k_TGE = qk.split((shape.heads, shape.kv_heads), dim=1)
            q_THE = rms_norm(q_THE, layer.q_norm, shape.eps)
            qk = torch.cat((q_THE, rms_norm(k_TGE, layer.k_norm, shape.eps)), dim=1)
        q_THE, k_TGE = rotate(qk, *tables).split((shape.heads, shape.kv_heads), dim=1)
        out_THE = torch.zeros_like(q_THE, memory_format=torch.contiguous_format)
        for span in spans:
            rows = slice(span.start, span.end)
            cache.append(index, span.slot, k_TGE[rows], v_TGE[rows])
            keys, values = cache.rows(index, span.slot)
            out_THE[rows] = tree_attention(
                q_THE[rows], keys, values, span.bias_nS, causal=span.causal
            )
        return layer.out(out_THE.flatten(1))


def load_decoder(directory: Path | str) -> Decoder:
    """Return the decoder in a Hugging Face directory, in float32 on the CPU.

    Raises:
        InputError: If its family is not supported, or a file or tensor is missing or broken.
    """
    return Decoder(open_rank(directory, dtype=torch.float32))


def state_decoder(
    shape: ModelShape, state: Mapping[str, Tensor], *, device: torch.device | str = "cpu"
) -> Decoder:
    """Return a decoder of tensors in memory, in float32.

    Args:
        shape: Sizes and switches.
        state: Tensors by their Hugging Face names; see ``ModelShape.tensors``.
        device: Where the weights go.
    """
    return Decoder(RankWeights(StateReader(shape, state), device=device, dtype=torch.float32))


def load_draft_decoder(directory: Path | str, target: Decoder | Path | str) -> Decoder:
    """Return a shipped draft, which uses its target's embedding.

    Args:
        directory: Holds config.json and the draft's weights.
        target: The loaded target, whose embedding is then shared, or its directory, of which
            the embedding alone is read.

    Raises:
        InputError: If a file or tensor is missing or broken, or the draft was made for a target
            of another width or vocabulary.
    """
    loaded = isinstance(target, Decoder)
    embedding_VD = target.embedding_VD if loaded else read_embedding(Path(target))
    return Decoder(RankWeights(open_draft(Path(directory), embedding_VD), dtype=torch.float32))


def _layer(weights: LayerWeights, dtype: torch.dtype) -> _Layer:
    return _Layer(
        input_norm=weights.input_norm,
        qkv=pack_linear(weights.qkv, weights.qkv_bias, dtype=dtype),
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        out=pack_linear(weights.out, dtype=dtype),
        mlp_norm=weights.mlp_norm,
        gate_up=pack_linear(weights.gate_up, dtype=dtype),
        down=pack_linear(weights.down, dtype=dtype),
    )


def _spans(batch: RowBatch, cache: KVCache, dtype: torch.dtype) -> list[_Span]:
    """Turn what rows see into score biases, once for all layers; the rows are in the cache."""
    spans = []
    start = 0
    for slot, count, visible in zip(batch.slots, batch.counts, batch.visible, strict=True):
        length = cache.length(slot)
        causal = visible is None and count == length and count > 1
        bias_nS = None
        if not causal:
            if visible is None:
                visible = torch.ones(count, count, dtype=torch.bool).tril()
            if not bool(visible.all()):
                bias_nS = torch.zeros(count, length, dtype=dtype)
                bias_nS[:, length - visible.shape[1] :].masked_fill_(~visible, -torch.inf)
                bias_nS = bias_nS.to(batch.tokens.device)
        spans.append(_Span(slot, start, start + count, bias_nS, causal))
        start += count
    return spans
