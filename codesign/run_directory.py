"""What a run leaves on disk, simulated or measured, in one form.

    run.json          header, origin, candidate, metrics, notes, seconds, and whatever else was said
    requests.parquet  one row per request (records.RequestRecord)
    rounds.parquet    one row per round (records.RoundRecord)
    outputs.jsonl     emitted tokens per request; the engine's runs only

``run.json`` is written last, so that a folder with it is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from errno import EACCES
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import numpy as np

from codesign.artifacts import (
    header,
    parse_json,
    read_json,
    read_table,
    write_json,
    write_table,
    write_text,
)
from codesign.artifacts.fields import check, why
from codesign.errors import InputError
from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords

if TYPE_CHECKING:
    import pandas as pd

Origin = Literal["simulated", "measured"]

_MOST_SECONDS = 2**30  # a run's times fit whole nanoseconds
_AGAIN = "Make it again: codesign run --plan PLAN"
_SUMMARY = {  # what readers rely on in run.json
    "origin": Origin,
    "seconds": float,
    "notes": list[str],
    "label": str,
    "candidate": dict[str, Any],
    "refused": dict[str, str],
    "calibration": dict[str, float],
}


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as read from its folder.

    Attributes:
        summary: All of run.json, header included.
        records: Requests and rounds.
        outputs: Emitted tokens by request number; None for a simulation.
    """

    summary: dict[str, Any]
    records: RunRecords
    outputs: dict[int, list[int]] | None

    @property
    def origin(self) -> Origin:
        """Whether the engine or the simulator wrote it."""
        return self.summary["origin"]


def write_run(
    directory: str | Path,
    records: RunRecords,
    *,
    origin: Origin,
    summary: Mapping[str, Any],
    seed: int | None,
    inputs: Mapping[str, Path] | None = None,
    outputs: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Write a run into ``directory``, over the run that may be there.

    Args:
        directory: Made if it is missing.
        records: Requests, rounds, seconds and notes.
        origin: "simulated" or "measured".
        summary: More for run.json: candidate, metrics, SLO, and what else describes the run.
        seed: Of the run.
        inputs: Files that it was made from, by role; each is hashed.
        outputs: Emitted tokens by request number.

    Raises:
        InputError: If an input cannot be read or the folder not be written.
    """
    folder = Path(directory)
    run_header = header("run", seed=seed, inputs=inputs)
    _clear(folder)
    for kind, frame in (
        ("requests", records.request_table()),
        ("rounds", records.round_table()),
    ):
        write_table(folder / f"{kind}.parquet", frame, {**run_header, "kind": kind})
    if outputs is not None:
        lines = [
            json.dumps({"request_id": request_id, "tokens": list(tokens)}) + "\n"
            for request_id, tokens in sorted(outputs.items())
        ]
        write_text(folder / "outputs.jsonl", "".join(lines))
    body = {"origin": origin, "seconds": records.seconds, "notes": records.notes, **summary}
    told = {"refused": records.refused, "calibration": records.calibration}
    body |= {name: values for name, values in told.items() if values}
    write_json(folder / "run.json", {**run_header, **body})


def read_run(directory: str | Path) -> StoredRun:
    """Read the run in ``directory``.

    Raises:
        InputError: If a file is missing or is not what ``write_run`` writes.
    """
    folder = Path(directory)
    summary = _read_summary(folder)
    requests, _ = read_table(folder / "requests.parquet", kind="requests")
    rounds, _ = read_table(folder / "rounds.parquet", kind="rounds")
    records = RunRecords(
        _read_requests(requests, folder),
        _read_rounds(rounds, folder),
        summary["seconds"],
        summary["notes"],
        refused=summary["refused"],
        calibration=summary["calibration"],
    )
    return StoredRun(summary, records, _read_outputs(folder / "outputs.jsonl"))


def make_folder(folder: Path) -> None:
    """Make a folder for runs, if it is missing, before anything is measured.

    Raises:
        InputError: If that cannot be, or nothing can be written into it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as err:
        raise InputError(
            f"cannot write into {folder}: {err.strerror or err}. Name another: --out FOLDER"
        ) from err


def _read_summary(folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    inner = [] if file.exists() else sorted(path.parent for path in folder.glob("*/run.json"))
    if inner:
        raise InputError(f"{folder} is a folder of runs. Name one, as {inner[0]}, or {folder}/*")
    summary = read_json(file, kind="run")
    told = {"label": "", "candidate": {}, "refused": {}, "calibration": {}, **summary}
    try:
        for name, wanted in _SUMMARY.items():
            check(told[name], wanted, name)
        refused = {int(number): reason for number, reason in told["refused"].items()}
    except (KeyError, ValueError) as err:
        raise InputError(f"{file} is damaged ({why(err)}). {_AGAIN}") from err
    return {**summary, "refused": refused, "calibration": told["calibration"]}


def _clear(folder: Path) -> None:
    """Make the folder; a run that is there is no longer whole."""
    make_folder(folder)
    try:
        for name in ("run.json", "outputs.jsonl"):
            (folder / name).unlink(missing_ok=True)
    except OSError as err:
        raise InputError(f"cannot write into {folder}: {err.strerror or err}") from err


def _read_requests(frame: pd.DataFrame, folder: Path) -> list[RequestRecord]:
    if "slo_tpot" not in frame:  # from before requests had targets of their own
        frame = frame.assign(slo_tpot=None)
    names = _checked_names(frame, RequestRecord, folder)
    if frame["request_id"].duplicated().any():
        raise InputError(f"a request stands twice in {folder / 'requests.parquet'}. {_AGAIN}")
    columns = [frame[name].astype(object).where(frame[name].notna(), None) for name in names]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [RequestRecord(*row) for row in rows]


def _read_rounds(frame: pd.DataFrame, folder: Path) -> RoundLog:
    if "running" not in frame and "batch" in frame:  # from before requests took turns
        frame = frame.assign(running=frame["batch"])
    _checked_names(frame, RoundRecord, folder)
    return RoundLog.from_table(frame)


def _checked_names(frame: pd.DataFrame, row_type: type, folder: Path) -> list[str]:
    """Names of the fields, each of which has a column of what it is annotated with."""
    hints = get_type_hints(row_type)
    missing = [name for name in hints if name not in frame]
    if missing:
        raise InputError(f"a table in {folder} lacks {', '.join(missing)}. {_AGAIN}")
    damaged = [name for name, wanted in hints.items() if not _holds(frame[name], wanted)]
    if damaged:
        raise InputError(
            f"a table in {folder} holds something else for {', '.join(damaged)}. {_AGAIN}"
        )
    return list(hints)


def _holds(column: Any, wanted: Any) -> bool:
    """Whether a column is of texts, of counts, of times, or of times of which some are missing."""
    if wanted is str:
        return all(isinstance(text, str) for text in column.unique())
    if wanted not in (int, float):  # a time, or None
        column = column.dropna()
    if len(column) == 0:
        return True
    if wanted is int:
        return column.dtype.kind in "iu" and bool((column >= 0).all())
    return column.dtype.kind in "iuf" and bool((np.abs(column) < _MOST_SECONDS).all())


def _read_outputs(path: Path) -> dict[int, list[int]] | None:
    if not path.exists():
        return None
    try:
        lines = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = {line["request_id"]: line["tokens"] for line in lines}
        check(found, dict[int, list[int]], "tokens")
        check([*found], list[int], "request_id")
    except (ValueError, KeyError, TypeError) as err:
        raise InputError(f"{path} is damaged ({why(err)}). {_AGAIN}") from err
    return found
