"""Request traces: when each request arrives, how long its prompt and its answer are.

    trace      the requests, and what can be done to them
    files      a trace from a file or by name, and back into a file
    catalog    names of published traces and of their bundled twins
    fetch      published files from their source
    formats    published formats and ours, read row by row; Mooncake's: mooncake; bytes: opening
    csv_header which of the formats the columns of a CSV are of
    checks     what a row may hold
    summary    what a trace looks like in numbers
    synth      synthetic twins, from published statistics (presets) and arrivals

Every change to a trace returns a new one with a note, so that no result is shown without what was
done to its input. Imports no torch; prints nothing.
"""

from __future__ import annotations

from codesign.traces.files import draft_parquet, load_trace, write_csv, write_parquet
from codesign.traces.summary import LengthSummary, TraceSummary, summarise
from codesign.traces.trace import Trace

__all__ = [
    "LengthSummary",
    "Trace",
    "TraceSummary",
    "draft_parquet",
    "load_trace",
    "summarise",
    "write_csv",
    "write_parquet",
]
