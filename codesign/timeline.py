"""Runs as a Chrome trace: what each side did when, simulated and measured laid over each other.

A run is a process of the trace, all with the start of the run at 0. Each replica has three lanes:
the target (prefill, target), the draft (reroot, draft) and the messages (link_there, link_back).
Requests are asynchronous events, batch and KV rows are counters. Everything comes from the two
tables of a run. They hold how long the spans of a round are, not when they began: spans are laid
in the order of the protocol. Draft forwards that overlap the target's are only counted there, so
the draft's lane shows the drafting that the target waited for, no more.

Source:
    Trace Event Format: JSON object form, phases X, b, e, C and M; Perfetto reads it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codesign import __version__
from codesign.artifacts import replacing
from codesign.records import RequestRecord, RunRecords

Event = dict[str, Any]

# In the order of the protocol: span of a round, lane.
LANE_OF_SPAN = (
    ("prefill", "target"),
    ("link_there", "link"),
    ("reroot", "draft"),
    ("draft", "draft"),
    ("link_back", "link"),
    ("target", "target"),
)
LANES = ("target", "draft", "link")
_ARGS = {
    "prefill": ("prefill_tokens",),
    "draft": ("num_expansions", "draft_rows"),
    "target": ("batch", "rows", "context", "num_accepted_tokens", "num_emitted_tokens"),
}
_PHASES = ("queue", "prefill", "decode")  # of a request: until admitted, first token, the end
_NS = 1e9
_JITTER_NS = 1000  # two clock readings of one instant; a span never reaches into the next round
_REQUEST_LANE = 0


@dataclass(frozen=True, slots=True)
class TimelineRun:
    """A run to show.

    Attributes:
        name: What the viewer calls it.
        records: Its requests and rounds.
    """

    name: str
    records: RunRecords


def write_timeline(
    path: str | Path, runs: Sequence[TimelineRun], *, window: tuple[float, float] | None = None
) -> int:
    """Write the runs as JSON, compressed if the name ends in .gz; return the number of events.

    Args:
        path: The file.
        runs: In the order in which the viewer shows them.
        window: (start, duration) in seconds: only rounds that start in it and requests that are
            there in it. Times are not moved.

    Raises:
        InputError: If the path cannot be written.
    """
    path = Path(path)
    events = timeline_events(runs, window=window)
    with replacing(path) as temporary:
        if path.name.endswith(".gz"):
            with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=4) as file:
                return _write(file, events)
        with temporary.open("w", encoding="utf-8") as file:
            return _write(file, events)


def timeline_events(
    runs: Sequence[TimelineRun], *, window: tuple[float, float] | None = None
) -> Iterator[Event]:
    """The events of ``write_timeline``, times in microseconds."""
    for index, run in enumerate(runs):
        pid = index + 1
        yield _metadata(pid, "process_name", name=run.name)
        yield _metadata(pid, "process_sort_index", sort_index=pid)
        yield from _round_events(pid, run.records, window)
        yield from _request_events(pid, run.records, window)


def _write(file: TextIOWrapper, events: Iterable[Event]) -> int:
    head = {"displayTimeUnit": "ms", "otherData": {"made_by": f"codesign {__version__}"}}
    file.write(json.dumps(head)[:-1] + ', "traceEvents": [')
    count = 0
    for event in events:
        file.write((",\n" if count else "\n") + json.dumps(event, separators=(",", ":")))
        count += 1
    file.write("\n]}\n")
    return count


def _round_events(
    pid: int, records: RunRecords, window: tuple[float, float] | None
) -> Iterator[Event]:
    table = records.round_table()
    num_replicas = len(set(table["replica"]))
    if window is not None:
        table = table[(table["start"] >= window[0]) & (table["start"] < sum(window))]
    for replica, rounds in table.groupby("replica", sort=True):
        suffix = f" {replica}" if num_replicas > 1 else ""
        columns = {str(name): np.asarray(values) for name, values in rounds.items()}
        yield from _slices(pid, int(str(replica)), suffix, columns)
        yield from _counters(pid, suffix, columns)


def _slices(
    pid: int, replica: int, suffix: str, columns: dict[str, NDArray[Any]]
) -> Iterator[Event]:
    """One slice per span that took time; lanes that have none are not there."""
    edges = span_edges(columns)
    for lane in LANES:
        tid = _REQUEST_LANE + 1 + len(LANES) * replica + LANES.index(lane)
        used = False
        for span, of_lane in LANE_OF_SPAN:
            if of_lane != lane:
                continue
            begin, end = edges[span]
            for i in np.flatnonzero(end > begin).tolist():
                used = True
                yield {
                    "ph": "X",
                    "name": span,
                    "cat": "round",
                    "pid": pid,
                    "tid": tid,
                    "ts": begin[i] / 1e3,
                    "dur": (end[i] - begin[i]) / 1e3,
                    "args": _slice_args(span, columns, i),
                }
        if used:
            yield _metadata(pid, "thread_name", tid=tid, name=f"{lane}{suffix}")
            yield _metadata(pid, "thread_sort_index", tid=tid, sort_index=tid)


def span_edges(
    columns: dict[str, NDArray[Any]],
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(R,) begin and end of each span of a table of rounds, in whole nanoseconds."""
    at = columns["start"].astype(np.float64)
    following = np.append(np.rint(_NS * at[1:]), np.inf)
    edges = {}
    for span, _ in LANE_OF_SPAN:
        begin, at = at, at + columns[span]
        both = np.rint(_NS * np.stack([begin, at]))
        late = (both > following) & (both <= following + _JITTER_NS)
        both = np.where(late, following, both).astype(np.int64)
        edges[span] = both[0], both[1]
    return edges


def _slice_args(span: str, columns: dict[str, NDArray[Any]], i: int) -> dict[str, int]:
    return {name: int(columns[name][i]) for name in ("round", *_ARGS.get(span, ()))}


def _counters(pid: int, suffix: str, columns: dict[str, NDArray[Any]]) -> Iterator[Event]:
    """Requests and KV rows at the start of each round, and 0 where the replica waits for work."""
    begin = np.rint(_NS * columns["start"]).astype(np.int64)
    end = span_edges(columns)["target"][1]
    idle = np.append(begin[1:] > end[:-1] + _JITTER_NS, True) if len(begin) else np.zeros(0, bool)
    for name, column in (("batch", "batch"), ("KV rows", "context")):
        for at, until, value, is_idle in zip(begin, end, columns[column], idle, strict=True):
            yield _counter(pid, f"{name}{suffix}", at, int(value))
            if is_idle:
                yield _counter(pid, f"{name}{suffix}", until, 0)


def _counter(pid: int, name: str, at: int, value: int) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": at / 1e3, "args": {"value": value}}


def _request_events(
    pid: int, records: RunRecords, window: tuple[float, float] | None
) -> Iterator[Event]:
    for request in records.requests:
        end = records.seconds if request.finish is None else request.finish
        if window is not None and (request.arrival >= sum(window) or end < window[0]):
            continue
        yield from _lifetime(pid, request, max(end, request.arrival))


def _lifetime(pid: int, request: RequestRecord, end: float) -> Iterator[Event]:
    """The request from arrival to its last token, with its phases below it."""
    common = {"cat": "request", "id": f"{pid}.{request.request_id}", "pid": pid}
    common["tid"] = _REQUEST_LANE
    args = {
        "request": request.request_id,
        "category": request.category,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "is_finished": request.finish is not None,
    }
    yield {"ph": "b", "name": "request", "ts": _us(request.arrival), "args": args, **common}
    moments = (request.arrival, request.admitted, request.first_token, end)
    for name, begin, until in zip(_PHASES, moments, moments[1:], strict=False):
        until = end if until is None else until
        if begin is not None and until > begin:
            yield {"ph": "b", "name": name, "ts": _us(begin), **common}
            yield {"ph": "e", "name": name, "ts": _us(until), **common}
    yield {"ph": "e", "name": "request", "ts": _us(end), **common}


def _us(seconds: float) -> float:
    return round(_NS * seconds) / 1e3


def _metadata(pid: int, kind: str, *, tid: int = _REQUEST_LANE, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
