"""Files of traces as bytes and tables: gzip or not, with errors of one line that say what to do.

What the columns mean is in ``traces.formats``.
"""

from __future__ import annotations

import csv
import gzip
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import pandas as pd

from codesign.errors import InputError
from codesign.traces.checks import FIX, Rows


def open_file(path: Path, is_gzip: bool) -> IO[bytes]:
    """The bytes of a file, unpacked."""
    return cast("IO[bytes]", gzip.open(path, "rb")) if is_gzip else path.open("rb")


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """What goes wrong while a file is read, as an InputError."""
    again = "Fix: fetch it again (codesign trace list)"
    try:
        yield
    except UnicodeDecodeError as err:
        # Where it is, pandas knows within a field only.
        kind = "is not UTF-8 text. Fix: save it as that, or fetch it again (codesign trace list)"
        if path.suffix == ".parquet":
            kind = f"is not a Parquet file, or damaged. {again}"
        raise InputError(f"{path} {kind}") from err
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise InputError(f"{path} is a damaged gzip file ({err}). {again}") from err
    except PermissionError as err:
        raise InputError(f"cannot read {path}: {err.strerror}. Fix: chmod u+r {path}") from err
    except OSError as err:
        raise InputError(f"cannot read {path}: {err.strerror or err}. {again}") from err


def load_csv(path: Path, is_gzip: bool, skipped: int) -> pd.DataFrame:
    """The table; blank lines become rows, so that row numbers stay line numbers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(
                path,
                header=skipped,
                compression="gzip" if is_gzip else None,
                encoding="utf-8",  # pandas drops a byte order mark itself
                skip_blank_lines=False,
                index_col=False,
                low_memory=False,
                quoting=csv.QUOTE_NONE,
                dtype={"category": str, "hash_ids": str},
            )
    except (pd.errors.ParserError, pd.errors.ParserWarning) as err:
        raise _wrong_field_count(path, is_gzip, skipped, err) from err


def _wrong_field_count(path: Path, is_gzip: bool, skipped: int, err: Exception) -> InputError:
    with open_file(path, is_gzip) as file:
        lines = file.read().split(b"\n")[skipped:]
    expected = lines[0].count(b",") + 1
    for index, line in enumerate(lines):
        if line.count(b",") + 1 > expected:
            reason = f"{line.count(b',') + 1} fields, the header has {expected}"
            return Rows(path, skipped + 1).error(index, reason)
    return InputError(f"{path} cannot be read as CSV ({' '.join(str(err).split())}). Fix: {FIX}")
