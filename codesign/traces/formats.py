"""Readers of published request traces: every row is checked, none is guessed or skipped silently.

Formats, told apart by content and not by file name; gzip is accepted for all but Parquet:

- Azure 2023 and 2024: CSV ``TIMESTAMP,ContextTokens,GeneratedTokens``; 2023 has seven fractional
  digits and CRLF, 2024 an offset (``+00:00``) and whole seconds without a fraction.
- BurstGPT: CSV ``Timestamp`` (seconds), ``Request tokens``, ``Response tokens``, other columns
  ignored. Failed requests have 0 response tokens (its README); they are dropped with a note.
- Mooncake: JSON Lines (``traces.mooncake``).
- Ours: Parquet, and CSV ``arrival,prompt_tokens,output_tokens`` with any of ``category``,
  ``hash_ids``, ``speculates`` and ``slo_tpot``.

The checks are in ``traces.checks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from codesign.artifacts import read_table
from codesign.errors import InputError
from codesign.records import has_own_targets
from codesign.traces.checks import (
    Rows,
    add_blocks,
    dates_to_seconds,
    request_table,
    seconds,
    whole_numbers,
)
from codesign.traces.csv_header import CSV_MARK, OURS, csv_format, own_meta
from codesign.traces.mooncake import read_mooncake
from codesign.traces.opening import load_csv, one_line_errors, open_file

_MAX_HEADER = 2**16
_OPTIONAL = ("category", "hash_ids", "speculates", "slo_tpot")  # columns of ours
_OWN_TARGETS = (
    "requests have TPOT targets of their own (slo_tpot) and are held to these; what the SLO's "
    "percentile is taken of is TPOT / target: each TPOT over its own target, or the common one"
)
_SLOWEST = 5.0  # seconds a token: a target above is one in milliseconds


@dataclass(frozen=True, slots=True)
class Parsed:
    """The checked rows of one file.

    Attributes:
        requests: Columns arrival (s, first is 0), prompt_tokens, output_tokens, category and,
            if the file has them, hash_ids.
        notes: What was done to the rows, one sentence each.
    """

    requests: pd.DataFrame
    notes: tuple[str, ...] = ()


def read_requests(path: Path) -> Parsed:
    """Return the checked rows of a trace file in any known format.

    Raises:
        InputError: If the file or one of its rows cannot be used: file, line, reason.
    """
    if path.is_dir():
        raise InputError(f"{path} is a directory. Fix: name a trace file (codesign trace list)")
    if not path.exists():
        raise InputError(f"{path} does not exist. Which there are: codesign trace list")
    if not path.is_file():  # a pipe, as of <(command): it would wait for what was read already
        raise InputError(
            f"{path} is no regular file, and a trace is read more than once. "
            "Fix: write it to a file first"
        )
    with one_line_errors(path):
        with path.open("rb") as raw:
            magic = raw.read(4)
        if magic == b"PAR1":
            return _read_parquet(path)
        is_gzip = magic[:2] == b"\x1f\x8b"
        with open_file(path, is_gzip) as file:
            first = file.readline(_MAX_HEADER).decode("utf-8-sig")
            second = file.readline(_MAX_HEADER).decode("utf-8")
        if not first.strip():
            raise InputError(f"{path} is empty. Fix: fetch it again (codesign trace list)")
        if first.lstrip().startswith("{"):
            with open_file(path, is_gzip) as file:
                return Parsed(read_mooncake(path, file.read().decode("utf-8-sig")))
        return _read_csv(path, is_gzip, first, second)


def _read_csv(path: Path, is_gzip: bool, first: str, second: str) -> Parsed:
    meta: dict[str, Any] = {}
    header, skipped = first, 0
    if first.startswith(CSV_MARK):
        meta, header, skipped = own_meta(path, first), second, 1
    form = csv_format(path, header.rstrip("\r\n").split(","), skipped + 1)
    frame = load_csv(path, is_gzip, skipped)
    rows = Rows(path, skipped + 2)
    if frame.empty:
        raise InputError(
            f"{path} has a header but no request. Fix: fetch it again (codesign trace list)"
        )
    clock = dates_to_seconds if form.clock == "dates" else seconds
    arrival = clock(rows, _series(frame, form.arrival))
    least = 0 if form.zero_output_is_failure else 1
    output = whole_numbers(rows, _series(frame, form.output), least=least)
    prompt, notes = _series(frame, form.prompt), _own_notes(meta)
    if form.zero_output_is_failure:
        # A failed request may have 0 prompt tokens too, so it is judged by its output alone.
        answered = output > 0
        if not answered.any():
            raise InputError(
                f"{path} has only failed requests (0 {form.output}). "
                "Fix: another file (codesign trace list)"
            )
        notes += _failure_note(len(output) - int(answered.sum()), form.output)
        arrival, output, prompt = arrival[answered], output[answered], prompt.loc[answered]
    parsed = request_table(arrival, whole_numbers(rows, prompt), output)
    if form is OURS:
        # We write microseconds; neither pandas 2 nor the subtraction returns the nearest float.
        parsed["arrival"] = parsed["arrival"].round(6)
        _add_own_columns(rows, parsed, frame)
        notes += (*_stray_note(frame), *_targets_note(parsed))
    return Parsed(parsed, notes)


def _failure_note(failed: int, column: str) -> tuple[str, ...]:
    if failed == 0:
        return ()
    return (f"{failed:,} failed requests (0 {column}, as the dataset documents) were dropped",)


def _stray_note(frame: pd.DataFrame) -> tuple[str, ...]:
    """Columns of a file of ours that mean nothing here, perhaps by a slip."""
    stray = [str(name) for name in frame if name not in (*OURS.columns, *_OPTIONAL)]
    return (f"columns not used: {', '.join(stray)[:80]}",) if stray else ()


def _add_own_columns(rows: Rows, requests: pd.DataFrame, frame: pd.DataFrame) -> None:
    _add_wishes(rows, requests, frame)
    if "hash_ids" in frame:
        ids = []
        for at, text in enumerate(_series(frame, "hash_ids").fillna("")):
            try:
                ids.append([int(word) for word in text.split()])
            except ValueError as err:
                reason = f"hash_ids '{text[:40]}' are not whole numbers"
                raise rows.error(at, reason) from err
        add_blocks(rows, requests, ids)


def _add_wishes(rows: Rows, requests: pd.DataFrame, frame: pd.DataFrame) -> None:
    """Kind of prompt, whether a request may be drafted for, and its own target."""
    if "category" in frame:
        requests["category"] = _series(frame, "category").fillna("").map(str).astype(object)
    if "speculates" in frame:
        values = _series(frame, "speculates").fillna(1)
        # A single word makes pandas read every number of the column as text.
        words = values.map(lambda value: {"True": 1, "False": 0}.get(str(value), value))
        numbers = cast("pd.Series", pd.to_numeric(words, errors="coerce"))
        wrong = np.flatnonzero(~numbers.isin([0, 1]).to_numpy())
        if len(wrong):
            at = int(wrong[0])
            raise rows.error(at, f"speculates is {str(values.iloc[at])[:40]}, not 0 or 1")
        requests["speculates"] = numbers.astype(bool)
    if "slo_tpot" in frame:
        values = _series(frame, "slo_tpot").replace("", np.nan)
        words = values.map(lambda value: str(value) if isinstance(value, bool) else value)
        numbers = cast("pd.Series", pd.to_numeric(words, errors="coerce"))
        wrong = np.flatnonzero((values.notna() & ~numbers.between(0, _SLOWEST, "right")).to_numpy())
        if len(wrong):
            at = int(wrong[0])
            raise rows.error(
                at,
                f"slo_tpot is {str(values.iloc[at])[:40]}, not seconds a token above 0 and up to "
                f"{_SLOWEST:g}",
                "divide milliseconds by 1000; leave it empty for the target of the run",
            )
        requests["slo_tpot"] = numbers.astype(np.float64)


def _series(frame: pd.DataFrame, name: str) -> pd.Series:
    return cast("pd.Series", frame[name])  # header checks leave no column twice


def _read_parquet(path: Path) -> Parsed:
    frame, meta = read_table(path, kind="trace")
    rows = Rows(path, 1, "row")
    for name in OURS.columns:
        if name not in frame:
            raise InputError(
                f"{path}: column '{name}' is missing. Fix: codesign trace synth PRESET --out FILE"
            )
    if frame.empty:
        raise InputError(f"{path} has no request. Fix: codesign trace synth PRESET --out FILE")
    requests = request_table(
        seconds(rows, _series(frame, "arrival")),
        whole_numbers(rows, _series(frame, "prompt_tokens")),
        whole_numbers(rows, _series(frame, "output_tokens")),
    )
    _add_wishes(rows, requests, frame)
    if "hash_ids" in frame:
        add_blocks(rows, requests, [list(map(int, blocks)) for blocks in frame["hash_ids"]])
    return Parsed(requests, (*_own_notes(meta), *_targets_note(requests)))


def _own_notes(meta: dict[str, Any]) -> tuple[str, ...]:
    """Return the notes of a file of ours; a file made from another says which."""
    source = str(meta.get("source", "synthetic:"))
    made_from = () if source.startswith("synthetic:") else (f"made from {source}",)
    notes = (note for note in meta.get("notes", ()) if note != _OWN_TARGETS)
    return (*made_from, *map(str, notes))


def _targets_note(requests: pd.DataFrame) -> tuple[str, ...]:
    """What a TPOT means where requests have targets of their own."""
    return (_OWN_TARGETS,) if has_own_targets(requests) else ()
