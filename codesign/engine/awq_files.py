"""Checkpoints in AutoAWQ's file format, written layer by layer. What reads them: checkpoint.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from codesign.engine.checkpoint import pack_awq
from codesign.engine.rank_weights import EMBEDDING, HEAD, NORM, EndWeights, LayerWeights
from codesign.kernels.int4 import Int4Weight, unpack_nibbles
from codesign.models.importing import INDEX, SINGLE
from codesign.models.quantization import INT4_HEAD
from codesign.models.shape import ModelShape, read_config

_SHARD_BYTES = 4e9
_COPIED = ("*.json", "*.jinja", "*.model", "LICENSE*")


class AwqFiles:
    """Writes the layers of a model in turn, into files of a few gigabytes."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder = folder
        self._shape = shape
        self._held: dict[str, Tensor] = {}
        self._file_of: dict[str, str] = {}
        self._num_bytes = 0
        self._total = 0

    def add_layer(self, index: int, layer: LayerWeights, maps: Mapping[str, Int4Weight]) -> None:
        """Write a layer; ``maps`` are its four matrices."""
        at, shape = f"model.layers.{index}.", self._shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        parts = {
            "self_attn.q_proj": (maps["qkv"], 0, q),
            "self_attn.k_proj": (maps["qkv"], q, q + kv),
            "self_attn.v_proj": (maps["qkv"], q + kv, q + 2 * kv),
            "self_attn.o_proj": (maps["out"], 0, shape.hidden),
            "mlp.gate_proj": (maps["gate_up"], 0, shape.intermediate),
            "mlp.up_proj": (maps["gate_up"], shape.intermediate, 2 * shape.intermediate),
            "mlp.down_proj": (maps["down"], 0, shape.hidden),
        }
        tensors = {
            f"{at}input_layernorm.weight": layer.input_norm,
            f"{at}post_attention_layernorm.weight": layer.mlp_norm,
        }
        for name, (weight, start, stop) in parts.items():
            rows = slice(start, stop)
            tensors[f"{at}{name}.qweight"] = pack_awq(unpack_nibbles(weight.packed[rows]).t())
            tensors[f"{at}{name}.qzeros"] = pack_awq(weight.zeros[rows].t())
            tensors[f"{at}{name}.scales"] = weight.scales[rows].t()
            if layer.qkv_bias is not None and weight is maps["qkv"]:
                tensors[f"{at}{name}.bias"] = layer.qkv_bias[rows]
        if layer.q_norm is not None and layer.k_norm is not None:
            tensors[f"{at}self_attn.q_norm.weight"] = layer.q_norm
            tensors[f"{at}self_attn.k_norm.weight"] = layer.k_norm
        self._add(tensors)

    def add_ends(self, ends: EndWeights) -> None:
        """Write what stands before and behind the layers."""
        self._add({f"{EMBEDDING}.weight": ends.embedding, f"{NORM}.weight": ends.norm})
        if not self._shape.tie:
            self._add({f"{HEAD}.weight": ends.head})

    def finish(self) -> None:
        """Write what is left, and the index if there are several files."""
        if not self._file_of:
            self._flush(SINGLE)
            return
        if self._held:
            self._flush(f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors")
        index = {"metadata": {"total_size": self._total}, "weight_map": self._file_of}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            kept = tensor if tensor.dtype == torch.int32 else tensor.to(torch.float16)
            self._held[name] = kept.contiguous().cpu()
            self._num_bytes += kept.numel() * kept.element_size()
        if self._num_bytes > _SHARD_BYTES:
            self._flush(f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors")

    def _flush(self, name: str) -> None:
        save_file(self._held, self._folder / name, metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(self._held, name)
        self._total += self._num_bytes
        self._held, self._num_bytes = {}, 0


def copy_rest(source: Path, folder: Path, group: int, *, int4_head: bool) -> None:
    """Copy all but the weights, and say in config.json how these are quantised."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in ("config.json", INDEX):
                shutil.copyfile(file, folder / file.name)
    config = read_config(source / "config.json")
    config.pop("torch_dtype", None)
    config["dtype"] = "float16"
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    if int4_head:
        config[INT4_HEAD] = True
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
