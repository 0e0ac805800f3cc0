"""Tables for the charts of one prediction, from the records of its simulations.

Every table has the mean over seeds and the range that the seeds and the error of the fit span. Must
not import streamlit or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from codesign.metrics import tpot, ttft
from codesign.records import SPANS

if TYPE_CHECKING:
    from codesign.config import Deployment
    from codesign.policy.cost import RoundCost
    from codesign.records import RequestRecord, RoundLog, RunRecords

Floats = NDArray[np.float64]

_LEVELS = np.concatenate([np.linspace(1, 90, 60), np.linspace(91, 100, 10)])  # percent of requests
_NUM_BINS = 90
BOTH = "both"  # target and draft on the same workers


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """Tables of one simulation, or of several.

    Attributes:
        latency: figure ("ttft" or "tpot"), percent, value, low, high; seconds.
        over_time: time (s), series, value, low, high. Series: "running" requests, tokens "drafted"
            and "emitted" per request and round, and the names of ``busy`` for utilisation.
        spans: span, value, low, high; mean seconds of a round.
        busy: Share of the run in which each group computes.
    """

    latency: pd.DataFrame
    over_time: pd.DataFrame
    spans: pd.DataFrame
    busy: dict[str, float]

    @classmethod
    def over_seeds(cls, each: Sequence[Frames], error: float) -> Frames:
        """Means, and ranges over seeds, widened by the relative error of a time."""
        times = 1.0 + error
        return cls(
            latency=_spread([f.latency for f in each], ["figure", "percent"], times),
            over_time=_spread([f.over_time for f in each], ["series", "bin"], 1.0),
            spans=_spread([f.spans for f in each], ["span"], times),
            busy=each[0].busy,
        )


def frames_of(records: RunRecords, deployment: Deployment, cost: RoundCost) -> Frames:
    """Tables of one simulation; step times of one replica tell how long the draft worked."""
    work = _work_of(records.rounds, deployment, cost)
    return Frames(
        latency=_latency(records.requests),
        over_time=_over_time(records.rounds, records.seconds, work, deployment),
        spans=_spans(records.rounds),
        busy={
            name: float(min(seconds.sum() / (records.seconds * deployment.replicas), 1.0))
            for name, seconds in work.items()
        }
        if records.seconds > 0
        else dict.fromkeys(work, 0.0),
    )


def _latency(requests: Sequence[RequestRecord]) -> pd.DataFrame:
    parts = []
    for name, figure in (("ttft", ttft), ("tpot", tpot)):
        values = [value for value in map(figure, requests) if value is not None]
        if values:
            at = np.percentile(values, _LEVELS, method="inverted_cdf")
            parts.append(pd.DataFrame({"figure": name, "percent": _LEVELS, "value": at}))
    columns = ["figure", "percent", "value"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def _spans(rounds: RoundLog) -> pd.DataFrame:
    batch = rounds.column("batch")
    num = max(int(np.count_nonzero(batch)), 1)
    names = [*SPANS, "prefill"]
    seconds = [float(rounds.column(name).sum()) / num for name in names]
    return pd.DataFrame({"span": names, "value": seconds})


def _work_of(rounds: RoundLog, deployment: Deployment, cost: RoundCost) -> dict[str, Floats]:
    """Per round the seconds in which each group computes; one group where both share workers.

    Forwards of the draft beside the verification are not in a round's spans: they are priced again
    from their number and rows, all of a round alike.
    """
    target = rounds.column("target") + rounds.column("prefill")
    if not deployment.draft_workers:
        both = target + rounds.column("draft") + rounds.column("reroot")
        return {BOTH: both}
    number, rows = rounds.column("num_expansions"), rounds.column("draft_rows")
    running = np.maximum(rounds.column("running"), 1.0)
    each = rows / np.maximum(number, 1.0)
    forward = cost.draft.of_arrays(each, rounds.column("context"), running)
    prompts = rounds.column("prefill_tokens")
    prompt_seconds = cost.draft_prompt.of_arrays(prompts, 0.0, 1.0)
    drafting = np.where(number > 0, number * forward, 0.0)
    drafting += np.where(prompts > 0, prompt_seconds, 0.0)
    return {"target": target, "draft": drafting}


def _over_time(
    rounds: RoundLog, seconds: float, work: dict[str, Floats], deployment: Deployment
) -> pd.DataFrame:
    """Means in equal stretches of the run; a round counts where it starts."""
    width = max(seconds, 1e-9) / _NUM_BINS
    where = np.clip((rounds.column("start") / width).astype(np.int64), 0, _NUM_BINS - 1)

    def total(values: Floats) -> Floats:
        return np.bincount(where, weights=values, minlength=_NUM_BINS).astype(np.float64)

    batch = rounds.column("batch")
    lasting = rounds.column("seconds") + rounds.column("prefill")
    turns = total(batch)
    with np.errstate(invalid="ignore", divide="ignore"):
        series = {
            "running": total(rounds.column("running") * lasting) / width,
            "drafted": total(rounds.column("num_draft_tokens")) / turns,
            "emitted": total(rounds.column("num_emitted_tokens")) / turns,
        }
    for name, busy in work.items():
        series[name] = np.minimum(total(busy) / (width * deployment.replicas), 1.0)
    middle = (np.arange(_NUM_BINS) + 0.5) * width
    parts = [
        pd.DataFrame({"series": name, "bin": np.arange(_NUM_BINS), "time": middle, "value": values})
        for name, values in series.items()
    ]
    return pd.concat(parts, ignore_index=True).dropna()


def _spread(tables: Sequence[pd.DataFrame], keys: list[str], factor: float) -> pd.DataFrame:
    """Mean, least and largest value by key; the range widened by a factor."""
    both = pd.concat(tables, ignore_index=True)
    others = [name for name in both.columns if name not in (*keys, "value")]
    groups = both.groupby(keys, sort=False)
    ranges = groups["value"].agg(value="mean", low="min", high="max")
    ranges["low"] /= factor
    ranges["high"] *= factor
    means = {name: groups[name].mean() for name in others}
    return ranges.assign(**means).reset_index()


def column(table: pd.DataFrame, name: str) -> Floats:
    """Values of a column of numbers."""
    return np.asarray(table[name], np.float64)
