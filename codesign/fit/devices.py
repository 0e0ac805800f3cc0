"""GPUs by their data sheets: memory, arithmetic and links (data/devices.json, or a user's file).

Must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from codesign.artifacts import parse_json
from codesign.errors import InputError

Link = Literal["nvlink", "pcie"]
_FILE = Path(__file__).parents[1] / "data" / "devices.json"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; every figure stands in the source.

    Attributes:
        name: As the command line names it.
        gpu: Its full name.
        memory_bytes: Of one GPU.
        memory_bandwidth: Bytes per second.
        bf16_flops: Floating-point operations per second of dense bf16 matrix products.
        fp8_flops: The same for fp8; None where there is no such unit.
        link: How GPUs of one machine are joined.
        link_bandwidth: Bytes per second that a GPU sends to its peers, one way.
        source: Data sheet.
    """

    name: str
    gpu: str
    memory_bytes: float
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    link: Link
    link_bandwidth: float
    source: str


_KEYS = tuple(field.name for field in fields(Device) if field.name != "name")
_LEAST = {  # of any GPU; less is another unit
    "memory_bytes": (1e9, "bytes"),
    "memory_bandwidth": (1e10, "bytes per second"),
    "bf16_flops": (1e12, "operations per second"),
    "fp8_flops": (1e12, "operations per second"),
    "link_bandwidth": (1e9, "bytes per second"),
}


def devices() -> dict[str, Device]:
    """All devices that the package knows, by name."""
    return {name: _device(name, entry, _FILE) for name, entry in _read(_FILE).items()}


def load_device(name: str) -> Device:
    """The device of a name such as "h100", or of a JSON file, whose path becomes its name.

    Raises:
        InputError: If there is none, or the file holds no data sheet.
    """
    if name.endswith(".json"):
        return _device(name, _read(Path(name)), Path(name))
    known = devices()
    if name.lower() not in known:
        raise InputError(
            f"unknown device {name!r}; known are {', '.join(known)}. Another: --device FILE.json "
            "with its data sheet (docs/file-formats.md)"
        )
    return known[name.lower()]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise InputError(f"{path} cannot be read as JSON: {err}") from err
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object. Give it the keys {', '.join(_KEYS)}")
    return found


def _device(name: str, entry: dict[str, Any], path: Path) -> Device:
    missing, unknown = set(_KEYS) - {"fp8_flops"} - set(entry), set(entry) - set(_KEYS)
    if missing or unknown:
        found = f"lacks {sorted(missing)[0]}" if missing else f"has {sorted(unknown)[0]}"
        raise InputError(
            f"{path}: the data sheet of {name} {found}. Give it the keys {', '.join(_KEYS)}"
        )
    if entry["link"] not in get_args(Link):
        raise InputError(f"{path}: link is {entry['link']!r}; one of {', '.join(get_args(Link))}")
    for key, (least, unit) in _LEAST.items():
        value = entry.get(key)
        if (key, value) != ("fp8_flops", None) and not _is_number(value, least):
            raise InputError(f"{path}: {key} is {value!r}, not {least:g} {unit} or more")
    sheet: dict[str, Any] = {"fp8_flops": None} | entry
    return Device(name=name, **sheet)


def _is_number(value: object, least: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value < math.inf
