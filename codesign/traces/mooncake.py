"""Mooncake JSON Lines, which other simulators and load generators replay, read and written.

One object a line: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one for
each 512 prompt tokens). Ours may add ``category``; readers skip keys that they do not know.

Source:
    The format of the traces published with Mooncake, arXiv:2407.00079.
"""

from __future__ import annotations

import itertools
import json
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from codesign.artifacts import parse_json, write_text
from codesign.traces.checks import (
    BLOCK_TOKENS,
    Rows,
    add_blocks,
    ascending,
    request_table,
    whole_numbers,
)

if TYPE_CHECKING:
    from codesign.traces import Trace


def read_mooncake(path: Path, text: str) -> pd.DataFrame:
    """Return the checked requests of a file; errors name its path.

    Raises:
        InputError: If a line cannot be used.
    """
    lines = text.split("\n")
    if not lines[-1].strip():
        lines.pop()
    rows = Rows(path, 1)
    records = _json_records(rows, lines)
    arrival = ascending(rows, _json_numbers(rows, records, "timestamp")) / 1e3
    prompt = whole_numbers(rows, _json_numbers(rows, records, "input_length"))
    output = whole_numbers(rows, _json_numbers(rows, records, "output_length"))
    requests = request_table(arrival, prompt, output)
    if any("hash_ids" in record for record in records):
        add_blocks(rows, requests, _json_blocks(rows, records))
    if any("category" in record for record in records):
        names = ["" if name is None else str(name) for name in _column(rows, records, "category")]
        requests["category"] = pd.Series(names, dtype=object)
    return requests


def _json_blocks(rows: Rows, records: list[dict[str, Any]]) -> list[list[int]]:
    ids = _column(rows, records, "hash_ids")
    for at, blocks in enumerate(ids):
        if type(blocks) is not list:
            raise rows.error(at, f"hash_ids is {json.dumps(blocks)[:40]}, not a list")
    if set(map(type, itertools.chain.from_iterable(ids))) - {int}:
        at = next(i for i, blocks in enumerate(ids) if set(map(type, blocks)) - {int})
        raise rows.error(at, "hash_ids holds something that is not a whole number")
    return ids


def _json_records(rows: Rows, lines: list[str]) -> list[dict[str, Any]]:
    try:
        # One call of the parser for the whole file; a line that is not one object shows here
        # or in the count.
        records = parse_json(f"[{','.join(lines)}]")
        if len(records) == len(lines) and all(type(record) is dict for record in records):
            return records
    except ValueError:
        pass
    for at, line in enumerate(lines):
        try:
            record = parse_json(line)
        except ValueError as err:
            reason = "the line is empty"
            if line.strip():
                detail = getattr(err, "msg", err)
                reason = f"the line is not JSON, or cut off ({detail})"
            raise rows.error(at, reason) from err
        if type(record) is not dict:
            raise rows.error(at, "the line is not a JSON object")
    raise AssertionError("lines that parse one by one parse together")


def _column(rows: Rows, records: list[dict[str, Any]], key: str) -> list[Any]:
    try:
        return list(map(itemgetter(key), records))
    except KeyError as err:
        at = next(i for i, record in enumerate(records) if key not in record)
        raise rows.error(at, f"'{key}' is missing") from err


def _json_numbers(rows: Rows, records: list[dict[str, Any]], key: str) -> pd.Series:
    values = _column(rows, records, key)
    if set(map(type, values)) - {int, float}:
        at = next(i for i, value in enumerate(values) if type(value) not in (int, float))
        raise rows.error(at, f"{key} is {json.dumps(values[at])[:40]}, not a number")
    return pd.Series(values, name=key)


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
