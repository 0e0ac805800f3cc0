"""Request traces: when each request arrives, how long its prompt and its answer are.

``load_trace`` reads a published file (see ``traces.formats``), one of ours, or a bundled twin by
name. Every change to a trace returns a new one with a note, so that no result is shown without
what was done to its input. Imports no torch; prints nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codesign.artifacts import SCHEMA_VERSION, header, sha256, write_table, write_text
from codesign.errors import InputError
from codesign.traces.catalog import bundled_path, cached_path, find_published, find_twin
from codesign.traces.checks import BLOCK_TOKENS, MAX_TOKENS
from codesign.traces.formats import CSV_MARK, read_requests
from codesign.traces.summary import LengthSummary, TraceSummary, arrival_rate, summarise

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CATEGORIES",
    "LengthSummary",
    "Trace",
    "TraceSummary",
    "csv_text",
    "load_trace",
    "summarise",
    "write_csv",
    "write_parquet",
]

_BREAKS = ",\r\n"  # a field of a CSV without quotes
CATEGORIES = ("chat", "code", "mathematics", "translation", "summary", "retrieval")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: Short name, such as ``azure-conv``.
        requests: One row a request: arrival (float64 seconds, first is 0), prompt_tokens and
            output_tokens (int64, at least 1), category (text, empty if unknown) and, for some,
            hash_ids (a list with one id for each block of 512 prompt tokens) and speculates (false:
            never drafted for). Read-only.
        source: The file, or ``synthetic:<preset>``.
        notes: Everything that was done to the rows, one sentence each; always show them.
        sha256: Of the file; for a synthetic trace, of the CSV that ``write_csv`` writes.
    """

    name: str
    requests: pd.DataFrame
    source: str
    notes: tuple[str, ...]
    sha256: str

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.requests["arrival"].iloc[-1])

    def slice(self, start: float, duration: float) -> Trace:
        """Return the requests that arrive in [start, start + duration) s, moved to start at 0.

        Raises:
            InputError: If no request arrives then.
        """
        arrival = self.requests["arrival"]
        kept = self.requests.loc[(arrival >= start) & (arrival < start + duration)]
        if kept.empty:
            raise InputError(
                f"no request of {self.name} arrives from {start:g} s for {duration:g} s; it lasts "
                f"{self.duration:.1f} s. Fix: another --slice START:DURATION"
            )
        note = (
            f"only the {len(kept):,} of {len(self):,} requests from {start:g} s for {duration:g} s,"
            " moved to start at 0"
        )
        return self._changed(kept, note)

    def head(self, n: int) -> Trace:
        """Return the first ``n`` requests.

        Raises:
            InputError: If ``n`` is below 1.
        """
        if n < 1:
            raise InputError(f"a trace needs at least 1 request, not {n}")
        if n >= len(self):
            return self
        return self._changed(
            self.requests.iloc[:n], f"only the first {n:,} of {len(self):,} requests"
        )

    def scale_rate(self, factor: float) -> Trace:
        """Return the trace with ``factor`` times as many requests a second."""
        _check_factor("rate", factor)
        if factor == 1:
            return self
        requests = self.requests.assign(arrival=self.requests["arrival"] / factor)
        old, new = arrival_rate(self.requests), arrival_rate(requests)
        note = f"arrival rate times {factor:g}: {old:.3g} became {new:.3g} requests/s"
        return self._changed(requests, note)

    def scale_lengths(
        self,
        *,
        prompt: float = 1.0,
        output: float = 1.0,
        max_prompt: int | None = None,
        max_output: int | None = None,
    ) -> Trace:
        """Return the trace with lengths times a factor, then cut to a maximum, never below 1.

        A rescaled prompt no longer has its prefix blocks, so ``prompt`` other than 1 drops
        hash_ids; ``max_prompt`` keeps the blocks that remain.

        Raises:
            InputError: If a factor is not positive or too large, or a maximum is below 1.
        """
        trace = self
        for column, factor, limit in (
            ("prompt_tokens", prompt, max_prompt),
            ("output_tokens", output, max_output),
        ):
            _check_factor(column, factor)
            trace = trace._scale_column(column, factor)._limit_column(column, limit)
        return trace

    def with_categories(self, names: Sequence[str], weights: Sequence[float], seed: int) -> Trace:
        """Return the trace with a category drawn for each request by weight.

        Raises:
            InputError: If names and weights do not match or no weight is positive.
        """
        if any(mark in name for name in names for mark in _BREAKS):
            raise InputError(f"a category must not hold a comma or a line break: {names}")
        shares = np.asarray(weights, np.float64)
        if len(names) != len(shares) or not len(shares) or (shares < 0).any() or shares.sum() <= 0:
            raise InputError(f"need one weight >= 0 for each category, got {names} and {weights}")
        category = draw_names(names, shares, len(self), np.random.default_rng(seed))
        shown = ", ".join(f"{n} {s:.0%}" for n, s in zip(names, shares / shares.sum(), strict=True))
        note = f"categories drawn with seed {seed}, the trace has none: {shown}"
        return self._changed(self.requests.assign(category=category), note)

    def spread_ticks(self, seed: int) -> Trace:
        """Return the trace with requests of one time stamp spread until the next tick.

        Mooncake stamps in ticks of about 3 s, BurstGPT in whole seconds: replayed as they are,
        every tick is a burst. The order of the file is kept.
        """
        arrival = self.requests["arrival"].to_numpy()
        steps = np.diff(np.unique(arrival))
        if len(steps) == 0 or len(steps) == len(arrival) - 1:
            return self
        tick = float(steps.min())
        drawn = arrival + tick * np.random.default_rng(seed).random(len(arrival))
        # Ticks do not overlap, so sorting moves no request into another tick.
        requests = self.requests.assign(arrival=np.sort(drawn))
        note = f"requests with equal time stamps spread over {tick:.3g} s with seed {seed}"
        return self._changed(requests, note)

    def _scale_column(self, column: str, factor: float) -> Trace:
        if factor == 1:
            return self
        scaled = np.maximum(np.rint(self.requests[column] * factor), 1)
        if scaled.max() > MAX_TOKENS:
            raise InputError(f"{column} times {factor:g} would be above {MAX_TOKENS:,} tokens")
        scaled = scaled.astype(np.int64)
        requests = self.requests.assign(**{column: scaled})
        old, new = self.requests[column].mean(), scaled.mean()
        note = f"{column} times {factor:g}: mean {old:,.1f} became {new:,.1f}"
        if column == "prompt_tokens" and "hash_ids" in requests:
            requests = requests.drop(columns="hash_ids")
            note += "; prefix hashes dropped, they describe the original lengths"
        return self._changed(requests, note)

    def _limit_column(self, column: str, limit: int | None) -> Trace:
        if limit is None:
            return self
        if limit < 1:
            raise InputError(f"the maximum of {column} must be at least 1, not {limit}")
        num_cut = int(np.count_nonzero(self.requests[column] > limit))
        if num_cut == 0:
            return self
        requests = self.requests.assign(**{column: self.requests[column].clip(upper=limit)})
        if column == "prompt_tokens" and "hash_ids" in requests:
            blocks = math.ceil(limit / BLOCK_TOKENS)
            requests["hash_ids"] = [ids[:blocks] for ids in requests["hash_ids"]]
        return self._changed(requests, f"{column} of {num_cut:,} requests cut to {limit:,}")

    def _changed(self, requests: pd.DataFrame, note: str) -> Trace:
        requests = requests.reset_index(drop=True)
        requests["arrival"] = requests["arrival"] - requests["arrival"].iloc[0]
        return dataclasses.replace(self, requests=requests, notes=(*self.notes, note))


def draw_names(
    names: Sequence[str], weights: ArrayLike, count: int, rng: np.random.Generator
) -> NDArray[np.object_]:
    """Return (count,) names drawn by weight."""
    limits = np.cumsum(weights) / np.sum(weights)
    drawn = np.searchsorted(limits, rng.random(count), side="right")
    return np.asarray(names, dtype=object)[np.minimum(drawn, len(names) - 1)]


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
    meta = header("trace", seed=None)
    origin = {"name": trace.name, "source": trace.source, "sha256": trace.sha256}
    write_table(path, trace.requests, {**meta, **origin, "notes": list(trace.notes)})


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
        if set(name) & set(_BREAKS):
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
    lines = map(",".join, zip(*columns, strict=True))
    return "\n".join([f"{CSV_MARK}{json.dumps(meta)}", ",".join(names), *lines, ""])


def _check_factor(name: str, factor: float) -> None:
    if not (factor > 0 and math.isfinite(factor)):
        raise InputError(f"the scale of {name} must be a positive number, not {factor:g}")
