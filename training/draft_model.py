"""The draft in training: a Llama decoder with the target's frozen embedding and its own small head.

Nothing here is special to training, so what ships is exactly a Llama checkpoint with a reduced
head. Work that does not mix positions runs on a flat list of tokens, whose constant length lets one
compiled version serve every batch.

Shapes: B rows, S tokens of a row, M = B * S, D width, N draft vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from decode_kernels import rotate
from target_model import Checkpoint, LlamaShape, rope_tables
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What can be chosen about the draft; the rest follows the target."""

    num_layers: int
    ffn_width: int
    vocab_size: int


class Block(nn.Module):
    """One decoder layer; parameter names are Hugging Face's, last parts only."""

    def __init__(self, target: LlamaShape, ffn_width: int) -> None:
        super().__init__()
        width, kv_width = target.width, target.num_kv_heads * target.head_dim
        self.target = target
        self.input_layernorm = nn.Parameter(torch.ones(width))
        self.post_attention_layernorm = nn.Parameter(torch.ones(width))
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, ffn_width, bias=False)
        self.up_proj = nn.Linear(width, ffn_width, bias=False)
        self.down_proj = nn.Linear(ffn_width, width, bias=False)

    def heads(self, x_MD: Tensor, cos_M: Tensor, sin_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys and the values, each [M, heads, head_dim]."""
        y = rms_norm(x_MD, self.input_layernorm, self.target.rms_norm_eps)
        size = (x_MD.shape[0], -1, self.target.head_dim)
        cos, sin = cos_M[:, None], sin_M[:, None]
        query = rotate(self.q_proj(y).view(size), cos, sin)
        key = rotate(self.k_proj(y).view(size), cos, sin)
        return query, key, self.v_proj(y).view(size)

    def mix(self, x_MD: Tensor, attended_MD: Tensor) -> Tensor:
        """The residual stream after the attention output and the feed-forward layer."""
        x_MD = x_MD + self.o_proj(attended_MD)
        y = rms_norm(x_MD, self.post_attention_layernorm, self.target.rms_norm_eps)
        return x_MD + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, in the dtype of x."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class Draft(nn.Module):
    """Llama decoder of `shape`; `draft_to_target` [N] are the target ids its head can name."""

    def __init__(
        self, target: LlamaShape, shape: DraftShape, *, embedding: Tensor, draft_to_target: Tensor
    ) -> None:
        super().__init__()
        self.target, self.shape = target, shape
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_to_target", draft_to_target)
        cos, sin = rope_tables(target, 2048)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.layers = nn.ModuleList(Block(target, shape.ffn_width) for _ in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(target.width))
        self.lm_head = nn.Linear(target.width, shape.vocab_size, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Normalised hidden states [B * S, D]."""
        rows, length = ids_BS.shape
        target = self.target
        x = F.embedding(ids_BS.reshape(-1), self.embedding)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[:length].repeat(rows, 1), self.sin[:length].repeat(rows, 1)
        for layer in self.layers:
            qkv = layer.heads(x, cos, sin)
            query, key, value = (
                part.view(rows, length, -1, target.head_dim).transpose(1, 2) for part in qkv
            )
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            x = layer.mix(x, attended.transpose(1, 2).reshape(rows * length, target.width))
        return rms_norm(x, self.norm, target.rms_norm_eps)

    def compile_parts(self) -> None:
        """Fuse the parts of every layer that work token by token."""
        heads = torch.compile(Block.heads, dynamic=False)
        mix = torch.compile(Block.mix, dynamic=False)
        for layer in self.layers:
            layer.heads = functools.partial(heads, layer)
            layer.mix = functools.partial(mix, layer)

    @torch.no_grad()
    def start_from(self, checkpoint: Checkpoint, sources: list[int]) -> None:
        """Copy target layers and head rows; of each feed-forward layer the heaviest neurons."""
        tensors = checkpoint.tensors
        for layer, source in zip(self.layers, sources, strict=True):
            prefix = f"model.layers.{source}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(layer, name).copy_(tensors[f"{prefix}{name}.weight"])
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer, name).weight.copy_(tensors[f"{prefix}self_attn.{name}.weight"])
            gate, up, down = (
                tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            size = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
            kept = size.topk(self.shape.ffn_width).indices.sort().values
            layer.gate_proj.weight.copy_(gate[kept])
            layer.up_proj.weight.copy_(up[kept])
            layer.down_proj.weight.copy_(down[:, kept])
        self.norm.copy_(tensors["model.norm.weight"])
        rows = tensors["model.embed_tokens.weight"][self.draft_to_target.cpu()]
        self.lm_head.weight.copy_(rows)

    def state(self) -> dict[str, Tensor]:
        """Float32 tensors on the host by Hugging Face name, plus the token map."""
        state: dict[str, Tensor] = {"draft_to_target": self.draft_to_target}
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            for name, parameter in layer.named_parameters():
                block = (
                    ""
                    if name.endswith("layernorm")
                    else ("self_attn." if name[0] in "qkvo" else "mlp.")
                )
                state[prefix + block + name.removesuffix(".weight") + ".weight"] = parameter
        state["model.norm.weight"] = self.norm
        state["lm_head.weight"] = self.lm_head.weight
        return {name: tensor.detach().cpu() for name, tensor in state.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over tensors as `state` names them."""
        own = {"draft_to_target": self.draft_to_target, "lm_head.weight": self.lm_head.weight}
        own["model.norm.weight"] = self.norm
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                block = (
                    ""
                    if name.endswith("layernorm")
                    else ("self_attn." if name[0] in "qkvo" else "mlp.")
                )
                own[f"model.layers.{index}.{block}{name.removesuffix('.weight')}.weight"] = (
                    parameter
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
