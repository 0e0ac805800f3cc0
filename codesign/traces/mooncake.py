"""Writes a trace as Mooncake JSON Lines, which other simulators and load generators replay.

One object a line: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one for
each 512 prompt tokens), and ``category`` where the trace has one; readers skip keys that they do
not know. ``traces.formats`` reads it back. Imports no torch.

Source:
    The format of the traces published with Mooncake, arXiv:2407.00079.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.artifacts import write_text
from codesign.traces.checks import BLOCK_TOKENS

if TYPE_CHECKING:
    import pandas as pd

    from codesign.traces import Trace


def write_mooncake(trace: Trace, path: str | Path) -> None:
    """Write the trace; ``load_trace`` reads the same requests back, arrivals to a nanosecond.

    A trace without prefix blocks gets ids that no other request has, so that a prefix cache finds
    as much as before: nothing. Notes and source are not kept, the format has no place for them.

    Raises:
        InputError: If the path cannot be written.
    """
    requests = trace.requests
    columns = {
        "timestamp": _milliseconds(requests["arrival"].to_numpy(np.float64)),
        "input_length": requests["prompt_tokens"].tolist(),
        "output_length": requests["output_tokens"].tolist(),
        "hash_ids": _hash_ids(requests),
    }
    if any(requests["category"]):
        columns["category"] = requests["category"].tolist()
    rows = zip(*columns.values(), strict=True)
    lines = [json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows]
    write_text(path, "".join(lines))


def _hash_ids(requests: pd.DataFrame) -> list[list[int]]:
    if "hash_ids" in requests:
        return [list(map(int, ids)) for ids in requests["hash_ids"]]
    num_blocks = -(-requests["prompt_tokens"].to_numpy() // BLOCK_TOKENS)
    ends = itertools.accumulate(num_blocks.tolist())
    return [list(range(end - count, end)) for end, count in zip(ends, num_blocks, strict=True)]


def _milliseconds(arrival: NDArray[np.float64]) -> list[float | int]:
    """Time stamps that read back as the same seconds, short ones where there is a choice."""
    exact = 1e3 * arrival
    chosen = exact
    for candidate in (np.nextafter(exact, np.inf), np.nextafter(exact, 0.0), np.round(exact, 6)):
        chosen = np.where(candidate / 1e3 == arrival, candidate, chosen)
    return [int(value) if value == int(value) else value for value in chosen.tolist()]
