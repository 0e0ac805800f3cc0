"""One rank's forward over a step's rows: fixed shapes, everything else read from device memory.

The same code runs eagerly on a CPU and inside a CUDA graph. Ops come from codesign.kernels.

Letters in shapes: T rows, D hidden size, H query heads and G key/value heads of the rank, E head
size, F = E / 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from codesign.engine.gpu.prompt_rows import DevicePrompt
from codesign.engine.gpu.rank_head import RankHead
from codesign.engine.gpu.slabs import Slabs, seen_rows
from codesign.engine.gpu.step_rows import DeviceRows
from codesign.engine.gpu.tensor_group import TensorGroup
from codesign.engine.rank_weights import RankWeights
from codesign.kernels import rms_norm, rotary_frequencies
from codesign.kernels.attention_shares import (
    SPAN,
    Crowd,
    SharedParts,
    pairs_do_more,
    pairs_may_do_more,
)
from codesign.kernels.embedding import embed_rows
from codesign.kernels.fused_attention import attention_in_two, fits, fused_attention
from codesign.kernels.gemm import num_sms
from codesign.kernels.packed_linear import (
    LinearMap,
    for_prompts,
    linear_map,
    swiglu_map,
)
from codesign.kernels.packed_reference import Norm
from codesign.kernels.prompt_attention import prompt_attention, slab_attention, takes_slabs
from codesign.kernels.row_attention import Scratch, rotate_and_append
from codesign.policy.step_time import BUCKETS


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: LinearMap  # of normed rows
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: LinearMap
    swiglu: LinearMap  # of normed rows
    down: LinearMap

    def for_prompts(self) -> _Layer:
        return replace(
            self,
            qkv=for_prompts(self.qkv),
            out=for_prompts(self.out),
            swiglu=for_prompts(self.swiglu),
            down=for_prompts(self.down),
        )


class RankForward:
    """A model's part on one rank.

    Args:
        weights: Read layer by layer.
        group: The ranks that hold the model.
        fused: Attend with one kernel where there is one for this GPU and model.

    Attributes:
        shape: The rank's part: its heads and channels.
        head: The rank's part of the head.
    """

    def __init__(self, weights: RankWeights, group: TensorGroup, *, fused: bool = True) -> None:
        self.shape = weights.shape
        self.group = group
        self._layers = [_layer(weights, index) for index in range(weights.shape.layers)]
        self._prompt_layers = [layer.for_prompts() for layer in self._layers]
        ends = weights.ends()
        self.embedding_VD = ends.embedding
        self._norm = ends.norm
        self.head = RankHead(ends, coded=fused)
        frequency_F = rotary_frequencies(self.shape.rope, self.shape.head_dim)
        self._frequency_F = frequency_F.to(ends.embedding.device)
        self._fused = fused and self._can_fuse()
        self._parts = self._room_for_parts() if self._fused else None
        self._multiprocessors = num_sms(self.device.index or 0) if self._fused else 0

    def _can_fuse(self) -> bool:
        return self.dtype == torch.bfloat16 and fits(
            rows=BUCKETS[-1],
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            device=self.device,
        )

    def _room_for_parts(self) -> SharedParts:
        shape = self.shape
        return SharedParts.make(shape.heads, shape.kv_heads, shape.head_dim, self.device)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, keys and values."""
        return self.embedding_VD.dtype

    def pairs_do_more(self, crowd: Crowd) -> bool:
        """Whether ``hidden`` is faster in pairs for such rows."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        return self._fused and pairs_do_more(crowd, heads, kv_heads, self._multiprocessors)

    def pairs_may_do_more(self, bucket: int, requests: int, tokens: int) -> bool:
        """Whether it is for any step of a bucket, of up to so many requests and tokens of each."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        most = requests, tokens // SPAN + 1, heads, kv_heads, self._multiprocessors
        return self._fused and pairs_may_do_more(bucket, *most)

    def scratch(self, rows: int, tokens: int) -> Scratch | None:
        """What ``hidden`` needs for so many rows in slabs of so many tokens; None: nothing."""
        if self._fused or self.device.type == "cpu":
            return None
        heads, head_dim = self.shape.heads, self.shape.head_dim
        return Scratch.make(rows, heads, head_dim, tokens, self.device)

    def hidden(
        self, rows: DeviceRows, slabs: Slabs, scratch: Scratch | None, *, in_pairs: bool = False
    ) -> Tensor:
        """Write the rows' keys and values to their slabs and return last hidden states, (T, D).

        Args:
            rows: Of the step.
            slabs: Of the model.
            scratch: From ``scratch``; for steps that follow one another.
            in_pairs: How blocks share out fused attention; bits are the same.
        """
        seen = seen_rows(rows, slabs)

        def attend(index: int, qkv_TN: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
            tables = (cos_TF, sin_TF, *slabs.layers[index])
            heads, places_T = self.shape.heads, rows.kv_rows_T
            if not self._fused:
                return attention_in_two(
                    qkv_TN, *tables, seen, places_T, heads=heads, scratch=scratch
                )
            return fused_attention(
                qkv_TN,
                *tables,
                seen,
                places_T,
                heads=heads,
                parts=self._parts,
                pdl=True,
                in_pairs=in_pairs,
            )

        return self._run(self._layers, rows.tokens_T, rows.positions_T, attend)

    def prompt_hidden(
        self,
        tokens_N: Tensor,
        slot: int,
        slabs: Slabs,
        *,
        start: int = 0,
        first_written: int = 0,
    ) -> Tensor:
        """Run a prompt, or a piece of it, into a slab and return its last hidden state, (1, D).

        Args:
            tokens_N: Of the piece.
            slot: Slab, whose rows before the piece are there.
            slabs: All of them.
            start: Position of the first token.
            first_written: Rows below are there already, and are not written again.
        """
        end = start + tokens_N.shape[0]
        positions_N = torch.arange(start, end, device=tokens_N.device)
        places = slabs.prompt_places(slot, positions_N, first_written, end)
        rows_of = slabs.prompt_rows(slot, end)

        def see(index: int, q_THE: Tensor) -> Tensor:
            return prompt_attention(q_THE, *rows_of(index))

        return self._run_prompt(tokens_N, positions_N, slabs, places, see)[-1:]

    @property
    def pads_prompts(self) -> bool:
        """Whether ``padded_prompt_hidden`` runs within a graph here."""
        of = {"head_dim": self.shape.head_dim, "dtype": self.dtype, "device": self.device}
        return self._fused and takes_slabs(**of)

    def padded_prompt_hidden(self, prompt: DevicePrompt, slabs: Slabs) -> Tensor:
        """``prompt_hidden`` of a message on the device, padded to a bucket, (1, D)."""
        slot_1, start_1, count_1 = prompt.slot_1, prompt.start_1, prompt.count_1
        rows_T = torch.arange(len(prompt.tokens_T), dtype=torch.int32, device=self.device)
        positions_T = rows_T + start_1
        places = slabs.prompt_places(slot_1, positions_T, prompt.first_written_1, start_1 + count_1)
        seen = slot_1, start_1, count_1, slabs.tables_SK

        def see(index: int, q_THE: Tensor) -> Tensor:
            return slab_attention(q_THE, *slabs.layers[index], *seen)

        hidden_TD = self._run_prompt(prompt.tokens_T, positions_T, slabs, places, see)
        return hidden_TD.index_select(0, count_1 - 1)

    def _run_prompt(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slabs: Slabs,
        places: tuple[Tensor, Tensor],
        see: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """Hidden states of rows; ``see`` is attention behind their keys and values' writing."""
        tables_SK, heads = slabs.tables_SK, self.shape.heads

        def attend(index: int, qkv_TN: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
            tables = (cos_TF, sin_TF, *slabs.layers[index], *places)
            q_THE = rotate_and_append(qkv_TN, *tables, heads=heads, tables_SK=tables_SK)
            return see(index, q_THE)

        return self._run(self._prompt_layers, tokens_T, positions_T, attend)

    def _run(
        self,
        layers: Sequence[_Layer],
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        add_map = self.group.add_map
        x_TD, cos_TF, sin_TF = embed_rows(
            tokens_T, positions_T, self.embedding_VD, self._frequency_F
        )
        for index, layer in enumerate(layers):
            qkv_TN = self._head_norms(layer, layer.qkv(x_TD))
            x_TD = add_map(layer.out, attend(index, qkv_TN, cos_TF, sin_TF), x_TD)
            x_TD = add_map(layer.down, layer.swiglu(x_TD), x_TD)
        return rms_norm(x_TD, self._norm, self.shape.eps)

    def _head_norms(self, layer: _Layer, qkv_TN: Tensor) -> Tensor:
        if layer.q_norm is None or layer.k_norm is None:
            return qkv_TN
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        parts = qkv_TN.view(qkv_TN.shape[0], -1, self.shape.head_dim)
        q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)
        q = rms_norm(q, layer.q_norm, self.shape.eps)
        k = rms_norm(k, layer.k_norm, self.shape.eps)
        return torch.cat((q, k, v), dim=1).flatten(1)


def _layer(weights: RankWeights, index: int) -> _Layer:
    layer, eps = weights.layer(index), weights.shape.eps
    return _Layer(
        qkv=linear_map(layer.qkv, layer.qkv_bias, norm=Norm(layer.input_norm, eps)),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        out=linear_map(layer.out),
        swiglu=swiglu_map(layer.gate_up, norm=Norm(layer.mlp_norm, eps)),
        down=linear_map(layer.down),
    )
