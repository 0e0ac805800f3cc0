"""The header of a CSV trace: which published format it is of, or what is wrong with it.

Knows names of columns, not rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codesign.artifacts import SCHEMA_VERSION, parse_json
from codesign.errors import InputError
from codesign.traces.checks import FIX

CSV_MARK = "# codesign trace "  # first line of our CSV, followed by one JSON object


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """A published format by the names of its three columns.

    Attributes:
        label: In messages.
        arrival: Name of the column with times, ``prompt`` and ``output`` of those with tokens.
        clock: What the times are.
        zero_output_is_failure: As documented by who published it.
    """

    label: str
    arrival: str
    prompt: str
    output: str
    clock: Literal["dates", "seconds"]
    zero_output_is_failure: bool = False

    @property
    def columns(self) -> tuple[str, str, str]:
        """The names, in the order of a hand-written file."""
        return self.arrival, self.prompt, self.output


OURS = CsvFormat("codesign", "arrival", "prompt_tokens", "output_tokens", "seconds")
_CSV_FORMATS = (
    CsvFormat("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "dates"),
    CsvFormat("BurstGPT", "Timestamp", "Request tokens", "Response tokens", "seconds", True),
    OURS,
)


def csv_format(path: Path, columns: list[str], line: int) -> CsvFormat:
    """Return the format that has these columns, and perhaps others.

    Args:
        path: For errors, as ``line``.
        columns: Names of the header.
        line: Its number, as the user counts.

    Raises:
        InputError: If there is none: what to do about it.
    """
    form = max(_CSV_FORMATS, key=lambda known: len(set(known.columns) & set(columns)))
    missing = [name for name in form.columns if name not in columns]
    if len(set(columns)) < len(columns):
        raise InputError(f"{path}, line {line}: a column occurs twice. Fix: remove one")
    if missing and any('"' in name for name in columns):
        raise InputError(
            f"{path}, line {line}: the columns are quoted. Fix: write the file without quotation "
            "marks"
        )
    if len(missing) == len(form.columns):
        _check_separator(path, columns, line)
        known = "; ".join(",".join(f.columns) for f in _CSV_FORMATS)
        shown = ",".join(columns)[:80]
        raise InputError(
            f"{path}, line {line}: '{shown}' is not the header of a known trace ({known}; or "
            "Mooncake JSON Lines). Fix: rename the columns; TIMESTAMP takes dates, the others take "
            "seconds"
        )
    if missing:
        raise InputError(
            f"{path}, line {line}: column '{missing[0]}' of the {form.label} format is missing. "
            f"Fix: add it, or fetch the file again (codesign trace list)"
        )
    return form


def _check_separator(path: Path, columns: list[str], line: int) -> None:
    """Name what stands between the columns of a known header, if that is not a comma."""
    for mark, name in ((";", "';'"), ("\t", "tabs")):
        found = ",".join(columns).split(mark)
        if any(set(form.columns) <= set(found) for form in _CSV_FORMATS):
            raise InputError(
                f"{path}, line {line}: the columns are separated by {name}. "
                "Fix: separate them by commas"
            )


def own_meta(path: Path, line: str) -> dict[str, Any]:
    """Return what the first line of our CSV says.

    Raises:
        InputError: If it is damaged, or of another version.
    """
    try:
        meta = parse_json(line[len(CSV_MARK) :])
        found = meta["schema_version"]
    except (ValueError, KeyError, TypeError) as err:
        raise InputError(
            f"{path}, line 1: the text after '{CSV_MARK}' is damaged. Fix: {FIX}"
        ) from err
    if found != SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema version {found}, this codesign reads {SCHEMA_VERSION}. "
            "Fix: make it again (codesign trace synth PRESET --out FILE)"
        )
    return meta
