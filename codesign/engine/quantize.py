"""Write an int4 checkpoint of a floating-point one, in AutoAWQ's file format.

Weights that meet large activations matter most. Before rounding, input columns are multiplied by
a power of the mean activation they meet and what produces the activation is divided by it (a norm,
the value map, the up map), which leaves the model as it is and rounds those columns finer. The
power is the one, of a few, that changes a map's output least on a calibration text.

One layer is in memory at a time. The original and both rounded models run side by side over a
held-out text, which gives the change of perplexity.

Letters in shapes: T rows, D hidden size, N outputs and K inputs of a map, I channels, E head size.

Source:
    Activation-aware weight quantisation: arXiv:2306.00978.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from codesign.engine.checkpoint import CheckpointReader, pack_awq
from codesign.engine.rank_weights import EMBEDDING, HEAD, NORM, LayerWeights, RankWeights
from codesign.engine.weights import INDEX, SINGLE
from codesign.errors import InputError
from codesign.kernels.int4 import Int4Weight, quantize_int4, unpack_nibbles
from codesign.kernels.reference import (
    linear,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    rotate,
    swiglu,
    tree_attention,
)
from codesign.models import directory_bytes, resolve_model
from codesign.models.quantization import check_group, read_quantization
from codesign.models.recipe import read_recipe
from codesign.models.shape import ModelShape, model_shape, read_config
from codesign.models.tokenizer import Tokenizer
from codesign.prompts import load_prompts

Progress = Callable[[str, int, int], None]

_POWERS = tuple(i / 10 for i in range(11))
_PROBES = 512  # rows on which a power is judged
_MAX_TOKENS = 2048
_SHARD_BYTES = 4e9
_COPIED = ("*.json", "*.jinja", "*.model", "LICENSE*")


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """What a quantisation did.

    Attributes:
        num_tokens: Held-out tokens that the perplexities are of.
        plain_change: Relative change of perplexity had the weights only been rounded.
    """

    path: Path
    group: int
    num_bytes: int
    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    plain_change: float


def quantize_model(
    name: str,
    out: Path,
    *,
    group: int = 128,
    text: Path | None = None,
    progress: Progress | None = None,
) -> QuantizedModel:
    """Write an int4 checkpoint in groups of ``group`` columns to the new directory ``out``.

    Args:
        name: Model directory, or a name in the cache.
        out: Must not exist.
        group: 32, 64 or 128.
        text: Calibration text whose last fifth is held out; None = the shipped prompts.
        progress: Told about every layer.

    Raises:
        InputError: If the model is quantised already or does not fit the group, if ``out`` is
            there, or if the text is too short.
    """
    source = resolve_model(name)
    shape = model_shape(source)
    if read_recipe(source) is not None or read_quantization(source, shape) is not None:
        raise InputError(f"{source} is int4 already")
    check_group(shape, group, name=str(source))
    if out.exists():
        raise InputError(f"{out} is there already. Choose another directory")
    probe, held_out = _texts(Tokenizer(source), text, limit=shape.max_positions)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        losses = _Run(source, shape, group, partial).run(probe, held_out, progress)
        _copy_rest(source, partial, group)
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    before, after, plain = (float(loss.exp()) for loss in losses)
    return QuantizedModel(
        path=out,
        group=group,
        num_bytes=directory_bytes(out),
        num_tokens=len(held_out) - 1,
        perplexity_before=before,
        perplexity_after=after,
        plain_change=plain / before - 1,
    )


class _Run:
    """One pass over the layers of a model."""

    def __init__(self, source: Path, shape: ModelShape, group: int, folder: Path) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._weights = RankWeights(
            CheckpointReader(source, shape, None), device=device, dtype=torch.float32
        )
        self._shape = shape
        self._group = group
        self._shards = _Shards(folder)
        self._device = device

    @torch.inference_mode()
    def run(
        self, probe: list[int], held_out: list[int], progress: Progress | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write all layers; return held-out losses before, after, and of plain rounding."""
        ends = self._weights.ends()
        embedding = ends.embedding
        probe_TD = embedding[torch.tensor(probe, device=self._device)]
        streams = [embedding[torch.tensor(held_out, device=self._device)]] * 3
        for index in range(self._shape.layers):
            if progress is not None:
                progress("quantising layers", index, self._shape.layers)
            layer = self._weights.layer(index)
            seen: dict[str, Tensor] = {}
            probe_TD = self._forward(layer, probe_TD, seen)
            scaled = _balanced(layer, seen, self._shape, self._group)
            rounded = {name: self._round(getattr(scaled, name)) for name in _MAPS}
            self._write(index, scaled, rounded)
            plain = {name: self._round(getattr(layer, name)).dequantize() for name in _MAPS}
            ours = {name: weight.dequantize() for name, weight in rounded.items()}
            layers = (layer, replace(scaled, **ours), replace(layer, **plain))
            streams = [self._forward(one, x, {}) for one, x in zip(layers, streams, strict=True)]
        self._shards.add({f"{EMBEDDING}.weight": embedding, f"{NORM}.weight": ends.norm})
        if not self._shape.tie:
            self._shards.add({f"{HEAD}.weight": ends.head})
        self._shards.finish()
        next_T = torch.tensor(held_out[1:], device=self._device)
        losses = [
            torch.nn.functional.cross_entropy(
                linear(rms_norm(x_TD[:-1], ends.norm, self._shape.eps), ends.head), next_T
            )
            for x_TD in streams
        ]
        return losses[0], losses[1], losses[2]

    def _round(self, weight: Tensor) -> Int4Weight:
        return quantize_int4(weight, group=self._group)

    def _forward(self, layer: LayerWeights, x_TD: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """Return one sequence's rows behind a layer; leaves the maps' inputs in ``seen``."""
        shape = self._shape
        h_TD = seen["qkv"] = rms_norm(x_TD, layer.input_norm, shape.eps)
        heads = linear(h_TD, _floats(layer.qkv), layer.qkv_bias).unflatten(1, (-1, shape.head_dim))
        sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
        q_THE, k_TGE, v_TGE = heads.split(sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THE = rms_norm(q_THE, layer.q_norm, shape.eps)
            k_TGE = rms_norm(k_TGE, layer.k_norm, shape.eps)
        frequency_F = rotary_frequencies(shape.rope, shape.head_dim).to(x_TD.device)
        tables = rotary_tables(torch.arange(len(x_TD), device=x_TD.device), frequency_F)
        keys, values = rotate(k_TGE, *tables).transpose(0, 1), v_TGE.transpose(0, 1)
        out_THE = tree_attention(rotate(q_THE, *tables), keys, values, causal=True)
        seen["out"] = out_THE.flatten(1)
        x_TD = x_TD + linear(seen["out"], _floats(layer.out))
        h_TD = seen["gate_up"] = rms_norm(x_TD, layer.mlp_norm, shape.eps)
        seen["down"] = swiglu(linear(h_TD, _floats(layer.gate_up)))
        return x_TD + linear(seen["down"], _floats(layer.down))

    def _write(self, index: int, layer: LayerWeights, maps: Mapping[str, Int4Weight]) -> None:
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
        self._shards.add(tensors)


_MAPS = ("qkv", "out", "gate_up", "down")


def _balanced(
    layer: LayerWeights, seen: Mapping[str, Tensor], shape: ModelShape, group: int
) -> LayerWeights:
    """Return the same layer with the factors of its four inputs moved into its maps."""
    qkv, out, gate_up, down = (_floats(getattr(layer, name)) for name in _MAPS)
    by_qkv = _factors(qkv, seen["qkv"], group)
    by_gate_up = _factors(gate_up, seen["gate_up"], group)
    by_down = _factors(down, seen["down"], group)
    # Query heads of a group read the same values, so they share their factors.
    ratio = shape.heads // shape.kv_heads
    shared = (shape.kv_heads, ratio, shape.head_dim)
    by_out = _factors(out, seen["out"], group, shared=shared)
    by_values = by_out.view(shared)[:, 0].flatten()
    values = slice(-by_values.numel(), None)
    up = slice(shape.intermediate, None)
    qkv, gate_up = qkv * by_qkv, gate_up * by_gate_up
    qkv[values] /= by_values[:, None]
    gate_up[up] /= by_down[:, None]
    bias = layer.qkv_bias
    if bias is not None:
        bias = bias.clone()
        bias[values] /= by_values
    return replace(
        layer,
        input_norm=layer.input_norm / by_qkv,
        qkv=qkv,
        qkv_bias=bias,
        out=out * by_out,
        mlp_norm=layer.mlp_norm / by_gate_up,
        gate_up=gate_up,
        down=down * by_down,
    )


def _factors(
    weight_NK: Tensor, x_TK: Tensor, group: int, *, shared: tuple[int, int, int] | None = None
) -> Tensor:
    """Return the (K,) column factors that change the map's output least; 1 is among them."""
    size_K = x_TK.abs().mean(0)
    if shared is not None:
        size_K = size_K.view(shared).mean(1, keepdim=True).expand(shared).flatten()
    size_K = size_K.clamp(min=1e-5)
    probes_TK = x_TK[:: max(1, len(x_TK) // _PROBES)]
    want_TN = linear(probes_TK, weight_NK)
    best_K, least = torch.ones_like(size_K), torch.inf
    for power in _POWERS:
        factor_K = size_K**power
        factor_K = factor_K / (factor_K.max() * factor_K.min()).sqrt()
        rounded_NK = quantize_int4(weight_NK * factor_K, group=group).dequantize() / factor_K
        loss = float((linear(probes_TK, rounded_NK) - want_TN).square().mean())
        if loss < least:
            best_K, least = factor_K, loss
    return best_K


def _floats(matrix: Tensor | Int4Weight) -> Tensor:
    assert isinstance(matrix, Tensor), "expected a floating-point matrix"
    return matrix


class _Shards:
    """Collects tensors into safetensors files of a few gigabytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._file_of: dict[str, str] = {}
        self._num_bytes = 0
        self._total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            kept = tensor if tensor.dtype == torch.int32 else tensor.to(torch.float16)
            self._held[name] = kept.contiguous().cpu()
            self._num_bytes += kept.numel() * kept.element_size()
        if self._num_bytes > _SHARD_BYTES:
            self._flush(f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors")

    def finish(self) -> None:
        if not self._file_of:
            self._flush(SINGLE)
            return
        if self._held:
            self._flush(f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors")
        index = {"metadata": {"total_size": self._total}, "weight_map": self._file_of}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self, name: str) -> None:
        save_file(self._held, self._folder / name, metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(self._held, name)
        self._total += self._num_bytes
        self._held, self._num_bytes = {}, 0


def _texts(tokenizer: Tokenizer, text: Path | None, *, limit: int) -> tuple[list[int], list[int]]:
    """Return the tokens to calibrate with and those held out."""
    if text is None:
        probe, held_out = (
            tokenizer.encode("\n\n".join(prompt.text for prompt in load_prompts(split)))
            for split in ("profile", "run")
        )
    else:
        try:
            ids = tokenizer.encode(text.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as err:
            raise InputError(f"{text} cannot be read as text: {err}") from err
        at = len(ids) * 4 // 5
        probe, held_out = ids[:at], ids[at:]
    most = min(limit, _MAX_TOKENS)
    if len(held_out) < 2 or len(probe) < 2:
        raise InputError(f"{text} is too short: it has {len(probe) + len(held_out)} tokens")
    return list(probe[:most]), list(held_out[:most])


def _copy_rest(source: Path, folder: Path, group: int) -> None:
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
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
