"""Trace files: load a published file, one of ours or a bundled twin by name; write our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from codesign.artifacts import SCHEMA_VERSION, draft_table, header, sha256, write_table, write_text
from codesign.errors import InputError
from codesign.records import own_targets
from codesign.traces.catalog import bundled_path, cached_path, find_published, find_twin
from codesign.traces.formats import CSV_MARK, read_requests
from codesign.traces.trace import FIELD_BREAKS, Trace


def load_trace(path_or_name: str | Path) -> Trace:
    """Return the trace in a file, a bundled twin by name, or a fetched file by name.

    Args:
        path_or_name: A file in any known format; else ``conv-twin``, ``code-twin``,
            ``mooncake-twin`` (or their presets ``steady``, ``bursty``, ``low``), or the name of a
            published trace in the user's cache.

    Raises:
        InputError: If there is no such trace, or a row of it cannot be used.
    """
    path = _locate(path_or_name)
    parsed = read_requests(path)
    return Trace(_short_name(path), parsed.requests, str(path), parsed.notes, sha256(path))


def _locate(path_or_name: str | Path) -> Path:
    path, name = Path(path_or_name), str(path_or_name)
    if path.is_file() or len(path.parts) != 1:
        return path
    twin = find_twin(name)
    if twin is not None:
        return bundled_path(twin)
    published = find_published(name)
    if published is not None:
        cached = cached_path(published)
        if not cached.is_file():
            raise InputError(f"{name} is not on this machine. Fix: codesign trace fetch {name}")
        return cached
    if path.exists() or path.suffix:
        return path
    raise InputError(f"no file and no trace is named '{name}'. Fix: codesign trace list")


def _short_name(path: Path) -> str:
    published = find_published(path.name.removesuffix(".gz"))
    return published.name if published else path.name.split(".")[0]


def write_parquet(trace: Trace, path: str | Path) -> None:
    """Write the trace as Parquet with its source, notes and checksum; ``load_trace`` reads it.

    Raises:
        InputError: If the path cannot be written.
    """
    write_table(path, trace.requests, _meta(trace))


def draft_parquet(trace: Trace, draft: Path) -> None:
    """Write the trace of a plan to a file that ``replacing`` yielded: equal traces, equal bytes.

    When, by which command and on which machine is left empty; the plan says so.

    Raises:
        OSError: If it cannot be written; ``replacing`` says of which file.
    """
    unsaid = {"command": "", "created": "", "hardware": {}}
    draft_table(draft, trace.requests, {**_meta(trace), **unsaid})


def _meta(trace: Trace) -> dict[str, Any]:
    origin = {"name": trace.name, "source": trace.source, "sha256": trace.sha256}
    return {**header("trace", seed=None), **origin, "notes": list(trace.notes)}


def write_csv(trace: Trace, path: str | Path) -> None:
    """Write the trace as CSV, the same bytes for the same rows and notes on every machine.

    Arrivals are rounded to a microsecond, so only a trace that already is comes back the same.

    Raises:
        InputError: If the path cannot be written, or a category would break its line.
    """
    write_text(path, csv_text(trace))


def csv_text(trace: Trace) -> str:
    """Return the text that ``write_csv`` writes.

    Raises:
        InputError: If a category would break its line.
    """
    for name in trace.requests["category"].unique():
        if FIELD_BREAKS & set(name):
            raise InputError(f"category {name!r} cannot stand in a CSV. Fix: --out FILE.parquet")
    meta = {"schema_version": SCHEMA_VERSION, "source": trace.source, "notes": list(trace.notes)}
    requests = trace.requests
    columns = [
        [f"{value:.6f}" for value in requests["arrival"]],
        map(str, requests["prompt_tokens"]),
        map(str, requests["output_tokens"]),
        requests["category"],
    ]
    names = ["arrival", "prompt_tokens", "output_tokens", "category"]
    if "hash_ids" in requests:
        names.append("hash_ids")
        columns.append([" ".join(map(str, ids)) for ids in requests["hash_ids"]])
    if "speculates" in requests:
        names.append("speculates")
        columns.append(["1" if wants else "0" for wants in requests["speculates"]])
    if "slo_tpot" in requests:
        names.append("slo_tpot")
        columns.append(["" if own is None else f"{own:.6g}" for own in own_targets(requests)])
    lines = map(",".join, zip(*columns, strict=True))
    return "\n".join([f"{CSV_MARK}{json.dumps(meta)}", ",".join(names), *lines, ""])
