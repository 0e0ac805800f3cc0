"""How a checkpoint's weights are quantised, and which tensors it holds because of that.

Two file formats are read, both int4 in groups of input columns:

- AutoAWQ ("gemm"): ``qweight`` (K, N / 8), ``qzeros`` (K / group, N / 8) and ``scales``
  (K / group, N), eight outputs to a word in the order 0, 2, 4, 6, 1, 3, 5, 7.
- compressed-tensors "pack-quantized": ``weight_packed`` (N, K / 8), ``weight_scale``
  (N, K / group) and, unless symmetric, ``weight_zero_point`` (N / 8, K / group), eight values to
  a word in order, lowest first.

Needs neither torch nor the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codesign.errors import InputError
from codesign.models.shape import ModelShape, read_config

GROUPS = (32, 64, 128)
INT4_HEAD = "codesign_int4_head"  # entry of config.json
_HEAD = "lm_head"
_WAY_OUT = "Use the bfloat16 checkpoint, or make int4 of it: codesign models quantize DIR --out NEW"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a checkpoint must hold: its shape, and whether it holds integers."""

    size: tuple[int, ...]
    is_integer: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """Int4 in groups of input columns.

    Attributes:
        method: ``awq`` or ``compressed-tensors``.
        group: Columns that share scale and zero point.
        symmetric: The zero point is 8 everywhere and not stored.
        int4_head: The head is rounded to int4 when it is loaded; files keep it as it was.
    """

    method: str
    group: int
    symmetric: bool = False
    int4_head: bool = False

    def parts(self, size: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Return suffix and shape of the tensors that stand for a matrix of ``size`` (N, K)."""
        rows, columns = size
        groups = columns // self.group
        if self.method == "awq":
            return {
                "qweight": TensorSpec((columns, rows // 8), True),
                "qzeros": TensorSpec((groups, rows // 8), True),
                "scales": TensorSpec((groups, rows)),
            }
        parts = {
            "weight_packed": TensorSpec((rows, columns // 8), True),
            "weight_scale": TensorSpec((rows, groups)),
            "weight_shape": TensorSpec((2,), True),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = TensorSpec((rows // 8, groups), True)
        return parts


def read_quantization(directory: Path, shape: ModelShape) -> Quantization | None:
    """Return how the model in a directory is quantised; None if it is not.

    Raises:
        InputError: If it is quantised in a way that is not supported, or its sizes do not fit
            the group.
    """
    path = Path(directory) / "config.json"
    config = read_config(path)
    entry = config.get("quantization_config")
    if entry is None:
        return None
    method = entry.get("quant_method")
    if method == "awq":
        found = _awq(entry, path=path)
    elif method == "compressed-tensors":
        found = _packed(entry, path=path)
    else:
        raise _unsupported(path, f"quant_method {method!r}")
    check_group(shape, found.group, name=str(path))
    return replace(found, int4_head=bool(config.get(INT4_HEAD, False)))


def expected_tensors(shape: ModelShape, quantization: Quantization | None) -> dict[str, TensorSpec]:
    """Return name and shape of every tensor that a checkpoint holds."""
    expected: dict[str, TensorSpec] = {}
    for name, size in shape.tensors().items():
        if quantization is None or not name.endswith("_proj.weight"):
            expected[name] = TensorSpec(size)
        else:
            stem = name.removesuffix("weight")
            parts = quantization.parts(size)
            expected.update({stem + suffix: spec for suffix, spec in parts.items()})
    return expected


def check_group(shape: ModelShape, group: int, *, name: str) -> None:
    """Check that every quantised matrix has whole groups of columns.

    Raises:
        InputError: If one has not; the message names a group that fits, if any.
    """
    widths = {
        "hidden size": shape.hidden,
        "attention width": shape.heads * shape.head_dim,
        "intermediate size": shape.intermediate,
    }
    for what, width in widths.items():
        if width % group:
            fitting = [g for g in GROUPS if not any(w % g for w in widths.values())]
            advice = f"; groups of {fitting[-1]} would fit" if fitting else ""
            raise InputError(f"{name}: {what} {width} is no multiple of the group {group}{advice}")


def _awq(entry: dict[str, Any], *, path: Path) -> Quantization:
    _check_entry(entry, {"bits": 4, "zero_point": True}, path=path)
    version = str(entry.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unsupported(path, f"awq version {version!r}")
    _check_whole(entry.get("modules_to_not_convert"), path=path)
    return Quantization("awq", _group(entry.get("group_size"), path=path))


def _packed(entry: dict[str, Any], *, path: Path) -> Quantization:
    _check_entry(entry, {"format": "pack-quantized", "kv_cache_scheme": None}, path=path)
    _check_whole(entry.get("ignore"), path=path)
    groups = list((entry.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise _unsupported(path, "more than one kind of quantised layer")
    if groups[0].get("input_activations") is not None:
        raise _unsupported(path, "quantised activations")
    weights = groups[0].get("weights") or {}
    _check_entry(weights, {"num_bits": 4, "type": "int", "strategy": "group"}, path=path)
    if weights.get("actorder") not in (None, False, "static", "weight"):
        raise _unsupported(path, f"actorder {weights['actorder']!r}")
    symmetric = bool(weights.get("symmetric", True))
    group = _group(weights.get("group_size"), path=path)
    return Quantization("compressed-tensors", group, symmetric=symmetric)


def _check_entry(entry: dict[str, Any], wanted: dict[str, Any], *, path: Path) -> None:
    for key, value in wanted.items():
        if entry.get(key) != value:
            raise _unsupported(
                path, f"{entry.get('quant_method', 'weights')} with {key} = {entry.get(key)!r}"
            )


def _check_whole(left_out: list[str] | None, *, path: Path) -> None:
    """Only the head may stay as it is: layers run as joined maps, quantised alike."""
    others = [name for name in left_out or () if name != _HEAD]
    if others:
        raise _unsupported(path, f"unquantised {others[0]} among quantised layers")


def _group(value: Any, *, path: Path) -> int:
    if value not in GROUPS:
        raise _unsupported(path, f"groups of {value!r}")
    return int(value)


def _unsupported(path: Path, what: str) -> InputError:
    return InputError(
        f"{path}: {what} is not supported; supported are AWQ (gemm) and compressed-tensors "
        f"pack-quantized, int4 in groups of 32, 64 or 128. {_WAY_OUT}"
    )
