"""Requests in order of arrival, and every change that can be made to them.

Each change returns a new trace with a note that says what was done.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codesign.errors import InputError, counted
from codesign.traces.checks import BLOCK_TOKENS, LONGEST, MAX_TOKENS
from codesign.traces.summary import arrival_rate

if TYPE_CHECKING:
    import pandas as pd

FIELD_BREAKS = frozenset(",\r\n")  # end a field of a CSV without quotes


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: Short name, such as ``azure-conv``.
        requests: One row a request: arrival (float64 seconds, first is 0), prompt_tokens and
            output_tokens (int64, at least 1), category (text, empty if unknown) and, for some,
            hash_ids (a list with one id for each block of 512 prompt tokens), speculates (false:
            never drafted for) and slo_tpot (float64 seconds per token, NaN for the run's target).
            Read-only.
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
        """Return the trace with ``factor`` times as many requests a second.

        Raises:
            InputError: If the factor is not positive, or so small that the trace lasts centuries.
        """
        _check_factor("rate", factor)
        if factor == 1:
            return self
        if self.duration > LONGEST * factor:
            raise InputError(
                f"at {factor:g} times the rate {self.name} would last {LONGEST:,.0f} s or more. "
                "Fix: a larger --rate-scale"
            )
        requests = self.requests.assign(arrival=self.requests["arrival"] / factor)
        old, new = arrival_rate(self.requests), arrival_rate(requests)
        rates = f": {old:.3g} became {new:.3g} requests/s" if self.duration else ""
        note = f"arrival rate times {factor:g}{rates}"
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
        if any(FIELD_BREAKS & set(name) for name in names):
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
        return self._changed(
            requests, f"{column} of {counted(num_cut, 'request')} cut to {limit:,}"
        )

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


def _check_factor(name: str, factor: float) -> None:
    if not (factor > 0 and math.isfinite(factor)):
        raise InputError(f"the scale of {name} must be a positive number, not {factor:g}")
