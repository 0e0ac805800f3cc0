"""The files between two stages: who made them, from what, on which machine.

JSON for small results, Parquet for tables. Each carries the same header: kind, schema
version, codesign version, command line, time, seed, sha256 of the inputs, hardware. Files
are written whole or not at all. Knows nothing of what is inside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codesign import __version__
from codesign.artifacts.fields import check
from codesign.artifacts.machine import hardware
from codesign.artifacts.places import alone, beside, cache_dir, elsewhere, replacing
from codesign.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

# fmt: off
__all__ = [
    "SCHEMA_VERSION", "alone", "beside", "cache_dir", "command_line", "draft_table", "elsewhere",
    "header", "parse_json", "read_json", "read_table", "replacing", "sha256", "to_json",
    "write_json", "write_table", "write_text",
]
# fmt: on

# One number for every kind of file: stages are rerun together. Raise it when a reader of the
# new version would misread a file of the old one.
SCHEMA_VERSION = 1

# What readers rely on, of what ``header`` returns.
_HEADER = {
    "created": str,
    "inputs": dict[str, dict[str, str]],
    "hardware": dict[str, Any],
}
_MADE_BY = {
    "trace": "codesign trace synth PRESET --out FILE",
    "profile": "codesign profile --out profile",
    "fit": "codesign fit profile",
    "plan": "codesign plan --trace TRACE",
    "report": "codesign validate --plan PLAN --run RUNDIR",
}
_RUN_COMMAND = "codesign run --plan PLAN"  # kinds of a run: the summary and its tables


def header(
    kind: str, *, seed: int | None, inputs: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    """Return the keys that every file starts with.

    Args:
        kind: What the file is: trace, profile, fit, plan, run, requests, rounds, report.
        seed: Seed of everything random in it, None if nothing is.
        inputs: Files it was made from, by role; each is hashed now.

    Raises:
        InputError: If an input cannot be read.
    """
    return {
        "kind": kind,
        "schema_version": SCHEMA_VERSION,
        "codesign_version": __version__,
        "command": command_line(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "inputs": {
            role: {"path": str(path), "sha256": sha256(path)}
            for role, path in (inputs or {}).items()
        },
        "hardware": hardware(),
    }


def to_json(payload: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return strict JSON: NumPy values, paths, dataclasses converted; NaN, infinity are null."""
    return json.dumps(_plain(payload), indent=indent, allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: If it is none, or nested deeper than Python's parser goes.
    """
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err


def write_json(path: str | Path, payload: Mapping[str, Any]) -> None:
    """Write ``payload``, which starts with a ``header``, as JSON; atomic.

    Raises:
        InputError: If the path cannot be written.
    """
    write_text(path, to_json(payload, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, its folder too if it is missing; atomic.

    Raises:
        InputError: If the path cannot be written.
    """
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: str | Path, *, kind: str) -> dict[str, Any]:
    """Return the payload of a JSON file that ``write_json`` wrote.

    Raises:
        InputError: If it is missing, not JSON, of another kind or another schema version.
    """
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        payload = parse_json(text)
    except OSError as err:
        raise _unreadable(path, kind, err) from err
    except ValueError as err:
        if not isinstance(err, UnicodeDecodeError) and not text.strip():
            raise InputError(f"{path} is empty. {_make_one(kind)}") from err
        raise InputError(f"{path} is not JSON ({err}). {_make_one(kind)}") from err
    _check_header(path, payload, kind)
    return payload


def write_table(path: str | Path, frame: pd.DataFrame, meta: Mapping[str, Any]) -> None:
    """Write a table as Parquet with ``meta``, which starts with a ``header``; atomic.

    The index of the frame is not kept.

    Raises:
        InputError: If the path cannot be written.
    """
    with replacing(Path(path)) as temporary:
        draft_table(temporary, frame, meta)


def draft_table(draft: Path, frame: pd.DataFrame, meta: Mapping[str, Any]) -> None:
    """Write a table as ``write_table`` does, to a file that ``replacing`` yielded.

    Raises:
        OSError: If it cannot be written; ``replacing`` says of which file.
    """
    from codesign.artifacts import parquet

    parquet.write(draft, frame, to_json(meta))


def read_table(path: str | Path, *, kind: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the rows and the meta of a Parquet file that ``write_table`` wrote.

    Raises:
        InputError: If it is missing, not Parquet, of another kind or another schema version.
    """
    from codesign.artifacts import parquet

    try:
        frame, text = parquet.read(Path(path))
    except OSError as err:
        raise _unreadable(path, kind, err) from err
    except ValueError as err:
        raise InputError(f"{path} is not a Parquet file. {_make_one(kind)}") from err
    try:
        meta = parse_json(text or "null")
    except ValueError as err:
        raise InputError(f"{path} has a damaged header ({err}). {_make_one(kind)}") from err
    _check_header(path, meta, kind)
    return frame, meta


def sha256(path: str | Path) -> str:
    """Return the checksum of a file in hexadecimal.

    Raises:
        InputError: If the file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        raise InputError(f"cannot read {path}: {err.strerror}") from err


def command_line() -> str:
    """Return what started this process, as one types it."""
    program = [Path(sys.argv[0]).name]
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m MODULE
    if spec and program != ["codesign"]:
        module = spec.name.removesuffix(".__main__")
        program = ["codesign"] if module == "codesign" else ["python", "-m", module]
    return shlex.join([*program, *sys.argv[1:]])


def _plain(value: Any) -> Any:
    """Return what the json module can write strictly."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    tolist = getattr(value, "tolist", None)
    if tolist is not None:  # NumPy arrays and scalars, without importing NumPy
        return _plain(tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _check_header(path: str | Path, payload: Any, kind: str) -> None:
    if not isinstance(payload, dict) or "schema_version" not in payload:
        raise InputError(f"{path} was not written by codesign. {_make_one(kind)}")
    if payload.get("kind") != kind:
        found = payload.get("kind")
        raise InputError(f"{path} is a {found} file, not a {kind} file. {_make_one(kind)}")
    if payload["schema_version"] != SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema version {payload['schema_version']}, this codesign reads "
            f"{SCHEMA_VERSION}. {_make_one(kind)}"
        )
    try:
        for name, wanted in _HEADER.items():
            if name in payload:
                check(payload[name], wanted, name)
    except ValueError as err:
        raise InputError(f"{path} has a damaged header ({err}). {_make_one(kind)}") from err


def _unreadable(path: str | Path, kind: str, err: OSError) -> InputError:
    if isinstance(err, FileNotFoundError):
        return InputError(f"{path} does not exist. {_make_one(kind)}")
    if isinstance(err, NotADirectoryError):
        folder = Path(path).parent
        return InputError(f"{folder} is not a folder, as a {kind} is. {_make_one(kind)}")
    fix = f". {_make_one(kind)}" if isinstance(err, IsADirectoryError) else ""
    return InputError(f"cannot read {path}: {err.strerror or err}{fix}")


def _make_one(kind: str) -> str:
    return f"Make one: {_MADE_BY.get(kind, _RUN_COMMAND)} (see its --help)"
