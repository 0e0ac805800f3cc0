"""Checks of trace columns: whole columns at once, the bad line is looked for only when one fails.

Every error is one line: file, line, reason, fix. Knows columns, not formats; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from codesign.errors import InputError

BLOCK_TOKENS = 512  # tokens of one prefix block in Mooncake's hash_ids; the last block is partial
FIX = "correct or delete that line, or fetch the file again (codesign trace list)"
MAX_TOKENS = 2**31 - 1
_LATEST = 1e11  # seconds since 1970 that nobody means
LONGEST = 1e10  # seconds, 300 years: of longer traces a float does not hold microseconds
_OFFSET = r":.*(?:Z|[+-]\d\d(?::?\d\d)?)$"  # of a date and time, from UTC


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a file are, to name the bad one; ``first`` as the user counts."""

    path: Path
    first: int
    word: str = "line"

    def error(self, index: Any, reason: str, fix: str = FIX) -> InputError:
        """Return the error of the row at ``index``, counted from 0."""
        number = self.first + int(index)
        return InputError(f"{self.path}, {self.word} {number}: {reason}. Fix: {fix}")


def dates_to_seconds(rows: Rows, column: pd.Series) -> NDArray[np.float64]:
    """Return seconds since the first date; exact to the 7th digit through integer nanoseconds."""
    if not pd.api.types.is_string_dtype(column.dtype):
        column = column.astype(str)
    dates = pd.to_datetime(column, format="ISO8601", utc=True, errors="coerce")
    if dates.isna().any():
        at = int(np.argmax(dates.isna().to_numpy()))
        raise rows.error(at, _not_a(column, at, "date such as 2023-11-16 18:17:03.9799600"))
    _check_offsets(rows, column)
    ticks = dates.dt.as_unit("ns").astype("int64").to_numpy()
    _check_order(rows, np.diff(ticks), column)
    return (ticks - ticks[0]) / 1e9


def _check_offsets(rows: Rows, column: pd.Series) -> None:
    """Refuse times of two kinds: hours lie between those with an offset from UTC and the others."""
    has_offset = column.str.contains(_OFFSET, regex=True).to_numpy(bool)
    if (has_offset != has_offset[0]).any():
        at = int(np.argmax(has_offset != has_offset[0]))
        found, first = ("an", "none") if has_offset[at] else ("no", "one")
        reason = f"{column.name} '{column.iloc[at]}' has {found} offset from UTC, the first {first}"
        raise rows.error(at, reason)


def seconds(rows: Rows, column: pd.Series) -> NDArray[np.float64]:
    """Return times in seconds; dates and milliseconds since 1970 are seen for what they are."""
    first = str(column.iloc[0])
    if "-" in first[1:] and pd.notna(pd.to_datetime(first, format="ISO8601", errors="coerce")):
        raise InputError(
            f"{rows.path}, {rows.word} {rows.first}: {column.name} is '{first[:40]}', a date, not "
            "seconds. Fix: rename the columns to TIMESTAMP,ContextTokens,GeneratedTokens, which "
            "take dates"
        )
    values = ascending(rows, column)
    if values[0] > _LATEST:
        reason = f"{column.name} is {values[0]:.15g}, which is no time in seconds"
        raise rows.error(0, reason, "divide milliseconds by 1000")
    if (late := values - values[0] > LONGEST).any():
        at = int(np.argmax(late))
        reason = f"{column.name} {column.iloc[at]} is {LONGEST:,.0f} s or more after the first"
        raise rows.error(_position(column, at), reason)
    return values


def ascending(rows: Rows, column: pd.Series) -> NDArray[np.float64]:
    """Return times that are numbers already and do not go back, in the unit they came in."""
    values = _numbers(rows, column, "number")
    _check_order(rows, np.diff(values), column)
    return values


def _check_order(rows: Rows, steps: NDArray[Any], column: pd.Series) -> None:
    if (steps < 0).any():
        at = int(np.argmax(steps < 0)) + 1
        reason = f"{column.name} {column.iloc[at]} is before {column.iloc[at - 1]}, the row above"
        reason += "; rows must be in order of arrival"
        raise rows.error(at, reason, f"sort the {rows.word}s by {column.name}, or {FIX}")


def _numbers(rows: Rows, column: pd.Series, what: str) -> NDArray[np.float64]:
    if column.dtype == object or pd.api.types.is_bool_dtype(column.dtype):
        column = column.map(lambda value: value if type(value) is not bool else str(value))
    coerced = cast("pd.Series", pd.to_numeric(column, errors="coerce"))
    values = coerced.to_numpy(np.float64, na_value=np.nan)
    bad = ~np.isfinite(values)
    if bad.any():
        at = int(np.argmax(bad))
        raise rows.error(_position(column, at), _not_a(column, at, what))
    return values


def whole_numbers(rows: Rows, column: pd.Series, *, least: int = 1) -> NDArray[np.int64]:
    """Return token counts of at least ``least``; the column's index is the row in the file."""
    if column.dtype == np.int64:
        values = column.to_numpy()
    else:
        values = _numbers(rows, column, "whole number")
        broken = values != np.floor(values)
        if broken.any():
            at = int(np.argmax(broken))
            raise rows.error(_position(column, at), _not_a(column, at, "whole number"))
    outside = (values < least) | (values > MAX_TOKENS)
    if outside.any():
        at = int(np.argmax(outside))
        reason = f"{column.name} is {column.iloc[at]}, not between {least} and {MAX_TOKENS}"
        if (more := int(outside.sum()) - 1) > 0:
            reason += f"; {more:,} more such {'row' if more == 1 else 'rows'}"
        raise rows.error(_position(column, at), reason)
    return values.astype(np.int64)


def _position(column: pd.Series, at: int) -> int:
    """Return the row in the file: the index keeps it when rows were dropped before."""
    return int(cast("int", column.index[at]))


def _not_a(column: pd.Series, at: int, what: str) -> str:
    value = column.iloc[at]
    if value is None or value != value or str(value) in ("", "nan", "NaT"):
        return f"{column.name} is missing (an empty or cut off line?)"
    return f"{column.name} is '{str(value)[:40]}', not a {what}"


def request_table(
    arrival: NDArray[np.float64], prompt: NDArray[np.int64], output: NDArray[np.int64]
) -> pd.DataFrame:
    """Return the columns of a trace, moved to start at 0, without categories."""
    columns = {"arrival": arrival - arrival[0], "prompt_tokens": prompt, "output_tokens": output}
    requests = pd.DataFrame(columns)
    requests["category"] = pd.Series([""] * len(requests), dtype=object)
    return requests


def add_blocks(rows: Rows, requests: pd.DataFrame, ids: list[list[int]]) -> None:
    """Add hash_ids once each prompt has one for each 512 tokens, the last block partial."""
    prompt = requests["prompt_tokens"].to_numpy()
    expected = -(-prompt // BLOCK_TOKENS)
    found = np.fromiter(map(len, ids), np.int64, len(ids))
    if (found != expected).any():
        at = int(np.argmax(found != expected))
        reason = f"{found[at]} hash_ids for {prompt[at]} prompt tokens, expected {expected[at]}"
        raise rows.error(at, f"{reason} (one for each {BLOCK_TOKENS} tokens)")
    requests["hash_ids"] = pd.Series(ids, dtype=object)
