"""Batched text writing with the target: prefill, then a decode step captured in a CUDA graph.

All rows of a batch share one step; each has its own length, and a finished row neither grows nor
reads its cache. The key/value cache is one allocation that every batch shape is a view of. On a CPU
the same code runs without graphs.

Shapes: B rows, S prompt tokens, N new tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from decode_kernels import decode_attention, rotate, rotate_and_store
from target_model import END_OF_TURN, NUM_SPECIAL_TOKENS, Checkpoint, rope_tables
from torch import Tensor

PREFILL_TOKENS = 65536
CHECK_EVERY = 16
MIN_PROB_RATIO = 0.02
GROUP = 64


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Written:
    """What a batch wrote: ids [B, N], tokens of each row [B], hidden states [B, N, D] or None.

    hidden[b, i] is the normalised state that chose ids[b, i].
    """

    ids: Tensor
    count: Tensor
    hidden: Tensor | None


class _Batch:
    """Static tensors of one batch shape, which a captured graph reads and writes."""

    def __init__(self, writer: Writer, rows: int, slots: int, max_new: int) -> None:
        device, shape = writer.device, writer.shape
        self.rows, self.slots, self.max_new = rows, slots, max_new
        size = (shape.num_layers, 2, rows, shape.num_kv_heads, slots, shape.head_dim)
        self.cache = writer.cache_pool[: math.prod(size)].view(size)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.ids = torch.zeros(rows, max_new, dtype=torch.long, device=device)
        self.graphs: dict[tuple[float, bool, bool], torch.cuda.CUDAGraph] = {}


class Writer:
    """The target, ready to continue many prompts at once.

    Args:
        checkpoint: the target's weights.
        device: where it runs.
        cache_bytes: size of the key/value pool.
        max_positions: longest prompt plus answer.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, device: str, cache_bytes: int, max_positions: int = 1280
    ) -> None:
        self.shape, self.device = checkpoint.shape, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.embedding = self._put(checkpoint.tensors["model.embed_tokens.weight"])
        self.final_norm = self._put(checkpoint.tensors["model.norm.weight"])
        self.layers = [self._layer(checkpoint, i) for i in range(self.shape.num_layers)]
        cos, sin = rope_tables(self.shape, max_positions)
        self.cos, self.sin = cos.to(device), sin.to(device)
        item = torch.tensor([], dtype=self.dtype).element_size()
        self.cache_pool = torch.zeros(cache_bytes // item, dtype=self.dtype, device=device)
        self.batches: dict[tuple[int, int], _Batch] = {}
        self.hidden_pool: dict[tuple[int, int], Tensor] = {}
        self.graph_pool = torch.cuda.graph_pool_handle() if device == "cuda" else None

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).contiguous()

    def _layer(self, checkpoint: Checkpoint, index: int) -> _Layer:
        def weight(name: str) -> Tensor:
            return checkpoint.tensors[f"model.layers.{index}.{name}.weight"]

        projections = [weight(f"self_attn.{name}_proj") for name in "qkv"]
        return _Layer(
            input_norm=self._put(weight("input_layernorm")),
            qkv=self._put(torch.cat(projections)),
            out=self._put(weight("self_attn.o_proj")),
            post_norm=self._put(weight("post_attention_layernorm")),
            gate_up=self._put(torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")])),
            down=self._put(weight("mlp.down_proj")),
        )

    @property
    def bytes_per_slot(self) -> int:
        """Cache bytes of one token."""
        item = torch.tensor([], dtype=self.dtype).element_size()
        return 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim * item

    def max_rows(self, slots: int) -> int:
        """Rows of `slots` cache slots that fit in the pool."""
        item = self.cache_pool.element_size()
        return self.cache_pool.numel() * item // (self.bytes_per_slot * slots)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.width,), weight, self.shape.rms_norm_eps)

    def _feed_forward(self, x: Tensor, layer: _Layer) -> Tensor:
        gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), layer.down.T)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, V] of normalised hidden states [n, D].

        Bfloat16 outputs would tie at the top: at a logit of 20 they are 0.125 apart.
        """
        if hidden.is_cuda:
            return torch.mm(hidden, self.embedding.T, out_dtype=torch.float32)
        return F.linear(hidden, self.embedding)

    @torch.inference_mode()
    def prefill(self, batch: _Batch, prompts: list[list[int]]) -> None:
        """Fill the cache with all prompt tokens but the last, which the first step reads."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        at = 0
        while at < len(order):
            longest = len(prompts[order[at]])
            end = at
            while end < len(order):
                longest = max(longest, len(prompts[order[end]]))
                if end > at and (end - at + 1) * longest > PREFILL_TOKENS:
                    break
                end += 1
            self._prefill_chunk(batch, order[at:end], prompts)
            at = end
        lengths = torch.tensor([len(prompt) - 1 for prompt in prompts])
        batch.length[: len(prompts)] = lengths.to(self.device)
        batch.token[: len(prompts)] = torch.tensor([p[-1] for p in prompts]).to(self.device)
        batch.done.zero_()
        batch.done[len(prompts) :] = True
        batch.length[len(prompts) :] = 0
        batch.step.zero_()

    def _prefill_chunk(self, batch: _Batch, rows: list[int], prompts: list[list[int]]) -> None:
        width = max(len(prompts[i]) for i in rows) - 1
        if width == 0:
            return
        padded = [prompts[i][:-1] + [0] * (width + 1 - len(prompts[i])) for i in rows]
        ids_BS = torch.tensor(padded).to(self.device)
        target_rows = torch.tensor(rows).to(self.device)
        shape = self.shape
        num_rows, num_kv = len(rows), shape.num_kv_heads
        splits = [shape.num_heads, num_kv, num_kv]
        x = F.embedding(ids_BS.view(-1), self.embedding)
        cos, sin = self.cos[:width], self.sin[:width]
        for index, layer in enumerate(self.layers):
            qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv)
            heads = qkv.view(num_rows, width, -1, shape.head_dim).transpose(1, 2)
            query, key, value = heads.split(splits, dim=1)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            batch.cache[index, 0, target_rows, :, :width] = key
            batch.cache[index, 1, target_rows, :, :width] = value
            out = F.scaled_dot_product_attention(
                query, key, value.contiguous(), is_causal=True, enable_gqa=True
            )
            out = out.transpose(1, 2).reshape(num_rows * width, shape.width)
            x = self._feed_forward(torch.addmm(x, out, layer.out.T), layer)

    def _decode(
        self, batch: _Batch, hidden_out: Tensor | None, temperature: float, may_end: bool
    ) -> None:
        """One step for all rows; only tensor operations, so that a graph can hold it."""
        x = F.embedding(batch.token, self.embedding)
        visible = torch.where(batch.done, 0, batch.length + 1)
        for index, layer in enumerate(self.layers):
            keys, values = batch.cache[index, 0], batch.cache[index, 1]
            qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv)
            query = rotate_and_store(qkv, keys, values, batch.length, self.cos, self.sin)
            out = decode_attention(query, keys, values, visible)
            x = self._feed_forward(torch.addmm(x, out, layer.out.T), layer)
        hidden = self._norm(x, self.final_norm)
        choice = self._choose(self.logits(hidden), temperature, may_end)
        at = batch.step.expand(batch.rows)[:, None]
        batch.ids.scatter_(1, at, choice[:, None])
        if hidden_out is not None:
            hidden_out.index_copy_(1, batch.step, hidden[:, None])
        batch.length.add_(~batch.done)
        batch.done.logical_or_(choice == END_OF_TURN)
        batch.token.copy_(choice)
        batch.step.add_(1)

    def _choose(self, logits: Tensor, temperature: float, may_end: bool) -> Tensor:
        """Greedy at temperature 0, else a Gumbel draw without tail and control tokens."""
        if temperature == 0:
            return logits.argmax(dim=-1)
        logits[:, : END_OF_TURN + (not may_end)] = -1e30
        logits[:, END_OF_TURN + 1 : NUM_SPECIAL_TOKENS] = -1e30
        logits.div_(temperature)
        floor = logits.amax(dim=-1, keepdim=True) + math.log(MIN_PROB_RATIO)
        noise = torch.empty_like(logits).exponential_().log_()
        return torch.where(logits < floor, -torch.inf, logits - noise).argmax(dim=-1)

    def _capture(
        self, batch: _Batch, hidden_out: Tensor | None, temperature: float, may_end: bool
    ) -> torch.cuda.CUDAGraph:
        """A graph of one step; its warm-up step spoils the batch, so prefill afterwards."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(batch, hidden_out, temperature, may_end)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool):
            self._decode(batch, hidden_out, temperature, may_end)
        return graph

    def _batch(self, rows: int, slots: int, max_new: int) -> _Batch:
        key = (rows, slots)
        if key not in self.batches:
            self.batches[key] = _Batch(self, rows, slots, max_new)
        return self.batches[key]

    @torch.inference_mode()
    def write(
        self,
        prompts: list[list[int]],
        *,
        rows: int,
        slots: int,
        max_new: int,
        temperature: float,
        keep_hidden: bool = False,
        stop_share: float = 1.0,
        may_end: bool = True,
    ) -> Written:
        """Continue every prompt until it ends its turn or has written `max_new` tokens.

        Args:
            prompts: at most `rows` id lists, each at most `slots - max_new` long.
            rows: rows of the batch shape (one captured graph for each shape and temperature).
            slots: cache slots a row has.
            max_new: most tokens to write.
            temperature: 0 is greedy.
            keep_hidden: also return the hidden states (at most 256 new tokens).
            stop_share: stop once this share of the rows has ended its turn.
            may_end: whether a sampled turn may end before `max_new` tokens.
        """
        batch = self._batch(rows, slots, slots)
        hidden_out = None
        if keep_hidden:
            key = (rows, slots)
            if key not in self.hidden_pool:
                size = (rows, min(slots, 256), self.shape.width)
                self.hidden_pool[key] = torch.zeros(size, dtype=self.dtype, device=self.device)
            hidden_out = self.hidden_pool[key]
        graph_key = (temperature, keep_hidden, may_end)
        if self.device == "cuda" and graph_key not in batch.graphs:
            self.prefill(batch, prompts)
            batch.graphs[graph_key] = self._capture(batch, hidden_out, temperature, may_end)
        self.prefill(batch, prompts)
        graph = batch.graphs.get(graph_key)
        for step in range(max_new):
            if graph is not None:
                graph.replay()
            else:
                self._decode(batch, hidden_out, temperature, may_end)
            is_checked = step % CHECK_EVERY == CHECK_EVERY - 1
            if is_checked and int(batch.done.sum()) >= stop_share * rows:
                break
        return self._collect(batch, len(prompts), step + 1, hidden_out)

    def _collect(
        self, batch: _Batch, num_rows: int, num_steps: int, hidden_out: Tensor | None
    ) -> Written:
        ids = batch.ids[:num_rows, :num_steps].clone()
        is_end = ids == END_OF_TURN
        first_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, num_steps)
        hidden = None if hidden_out is None else hidden_out[:num_rows, :num_steps]
        return Written(ids, first_end, hidden)

    @torch.inference_mode()
    def top_choices(self, hidden: Tensor, *, k: int, chunk: int = 16384) -> tuple[Tensor, Tensor]:
        """Ids [n, k] and float16 log probabilities [n, k] of the k likeliest tokens of each state.

        The k largest of a row lie in the k groups of largest maxima, so only those are sorted.
        """
        ids, logs = [], []
        for part in hidden.split(chunk):
            logits = self.logits(part)
            groups = logits.view(len(part), -1, GROUP)
            best = groups.amax(dim=-1).topk(k, dim=-1).indices
            inside = groups.gather(1, best[:, :, None].expand(-1, -1, GROUP)).view(len(part), -1)
            values, at = inside.topk(k, dim=-1)
            logs.append((values - logits.logsumexp(-1, keepdim=True)).half())
            ids.append((best.gather(1, at // GROUP) * GROUP + at % GROUP).to(torch.int32))
        return torch.cat(ids), torch.cat(logs)
