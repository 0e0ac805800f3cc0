"""Write an int4 checkpoint of a floating-point one, in AutoAWQ's file format.

Weights that meet large activations matter most: column_factors.py makes their columns finer before
rounding, awq_files.py writes what comes out.

One layer is in memory at a time. The original and both rounded models run side by side over a
held-out text, which gives the change of perplexity.

Letters in shapes: T rows, D hidden size, H and G query and key-value heads, E head size.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from codesign import Progress
from codesign.engine.awq_files import AwqFiles, copy_rest
from codesign.engine.checkpoint import CheckpointReader
from codesign.engine.column_factors import MAPS, balanced, floats
from codesign.engine.rank_weights import LayerWeights, RankWeights
from codesign.errors import InputError, counted
from codesign.kernels.int4 import Int4Weight, quantize_int4
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
from codesign.models.shape import ModelShape, model_shape
from codesign.models.tokenizer import Tokenizer
from codesign.prompts import load_prompts

_MAX_TOKENS = 2048


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
    int4_head: bool = False,
    text: Path | None = None,
    progress: Progress | None = None,
) -> QuantizedModel:
    """Write an int4 checkpoint in groups of ``group`` columns to the new directory ``out``.

    Args:
        name: Model directory, or a name in the cache.
        out: Must not exist.
        group: 32, 64 or 128.
        int4_head: Engines of this project round the head to int4, too, when they load it.
        text: Calibration text whose last fifth is held out; None = the shipped prompts.
        progress: Called for every layer.

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
        run = _Run(source, shape, group, partial, int4_head=int4_head)
        losses = run.run(probe, held_out, progress)
        copy_rest(source, partial, group, int4_head=int4_head)
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

    def __init__(
        self, source: Path, shape: ModelShape, group: int, folder: Path, *, int4_head: bool
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._weights = RankWeights(
            CheckpointReader(source, shape, None), device=device, dtype=torch.float32
        )
        self._shape = shape
        self._group = group
        self._int4_head = int4_head
        self._files = AwqFiles(folder, shape)
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
            scaled = balanced(layer, seen, self._shape, self._group)
            rounded = {name: self._round(getattr(scaled, name)) for name in MAPS}
            self._files.add_layer(index, scaled, rounded)
            plain = {name: self._round(getattr(layer, name)).dequantize() for name in MAPS}
            ours = {name: weight.dequantize() for name, weight in rounded.items()}
            layers = (layer, replace(scaled, **ours), replace(layer, **plain))
            streams = [self._forward(one, x, {}) for one, x in zip(layers, streams, strict=True)]
        self._files.add_ends(ends)
        self._files.finish()
        next_T = torch.tensor(held_out[1:], device=self._device)
        head = self._round(ends.head).dequantize() if self._int4_head else ends.head
        losses = [
            torch.nn.functional.cross_entropy(
                linear(rms_norm(x_TD[:-1], ends.norm, self._shape.eps), head_VD), next_T
            )
            for x_TD, head_VD in zip(streams, (ends.head, head, head), strict=True)
        ]
        return losses[0], losses[1], losses[2]

    def _round(self, weight: Tensor) -> Int4Weight:
        return quantize_int4(weight, group=self._group)

    def _forward(self, layer: LayerWeights, x_TD: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """Return one sequence's rows behind a layer; leaves the maps' inputs in ``seen``."""
        shape = self._shape
        h_TD = seen["qkv"] = rms_norm(x_TD, layer.input_norm, shape.eps)
        heads = linear(h_TD, floats(layer.qkv), layer.qkv_bias).unflatten(1, (-1, shape.head_dim))
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
        x_TD = x_TD + linear(seen["out"], floats(layer.out))
        h_TD = seen["gate_up"] = rms_norm(x_TD, layer.mlp_norm, shape.eps)
        seen["down"] = swiglu(linear(h_TD, floats(layer.gate_up)))
        return x_TD + linear(seen["down"], floats(layer.down))


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
        raise InputError(
            f"{text} is too short: it has {counted(len(probe) + len(held_out), 'token')}"
        )
    return list(probe[:most]), list(held_out[:most])
