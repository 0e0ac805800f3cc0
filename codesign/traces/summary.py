"""What a trace asks of a deployment: rate, burstiness, lengths, shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from codesign.records import own_targets

if TYPE_CHECKING:
    import pandas as pd

    from codesign.traces import Trace


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Tokens of one kind over all requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int
    total: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace asks of a deployment.

    Attributes:
        num_requests: Requests.
        duration: Seconds from the first arrival to the last.
        rate: Requests a second, 1 / mean gap between arrivals; 0 for a single instant.
        interarrival_cv: Standard deviation of the gaps over their mean; 1 for a Poisson process.
        peak_requests: Most requests in one second, seconds counted from the first arrival.
        prompt: Prompt tokens.
        output: Output tokens.
        prefix_hit_rate: Share of prompt blocks that an infinite prefix cache has already seen
            from the prompt's start; None without hash_ids.
        categories: Requests of each category.
        own_targets: How many requests have a TPOT target of their own.
        tightest_target: The least of these, in seconds per token; None without any.
    """

    num_requests: int
    duration: float
    rate: float
    interarrival_cv: float
    peak_requests: int
    prompt: LengthSummary
    output: LengthSummary
    prefix_hit_rate: float | None
    categories: dict[str, int]
    own_targets: int
    tightest_target: float | None


def summarise(trace: Trace) -> TraceSummary:
    """Return the figures of a trace that matter for a deployment."""
    requests = trace.requests
    arrival = requests["arrival"].to_numpy()
    has_blocks = "hash_ids" in requests
    gaps = np.diff(arrival)
    mean_gap = gaps.mean() if len(gaps) else 0.0
    counts = requests["category"].value_counts().sort_index()
    targets = [own for own in own_targets(requests) if own is not None]
    return TraceSummary(
        num_requests=len(requests),
        duration=trace.duration,
        rate=arrival_rate(requests),
        interarrival_cv=float(gaps.std() / mean_gap) if mean_gap > 0 else 0.0,
        # unique, not bincount: a trace may last for months
        peak_requests=int(np.unique(np.floor(arrival), return_counts=True)[1].max()),
        prompt=_lengths(requests, "prompt_tokens"),
        output=_lengths(requests, "output_tokens"),
        prefix_hit_rate=prefix_hit_rate(list(requests["hash_ids"])) if has_blocks else None,
        categories={str(name): int(count) for name, count in counts.items() if name},
        own_targets=len(targets),
        tightest_target=min(targets, default=None),
    )


def prefix_hit_rate(hash_ids: Sequence[Sequence[int]]) -> float:
    """Return the share of blocks that earlier prompts have left in an infinite prefix cache."""
    seen: set[int] = set()
    num_hits = num_blocks = 0
    for ids in hash_ids:
        num_hits += next((at for at, block in enumerate(ids) if block not in seen), len(ids))
        num_blocks += len(ids)
        seen.update(ids)
    return num_hits / num_blocks


def arrival_rate(requests: pd.DataFrame) -> float:
    """Return requests a second, 1 / mean gap; 0 for a single instant."""
    duration = float(requests["arrival"].iloc[-1])
    return (len(requests) - 1) / duration if duration > 0 else 0.0


def _lengths(requests: pd.DataFrame, name: str) -> LengthSummary:
    tokens = requests[name].to_numpy()
    p50, p90, p99 = (float(value) for value in np.percentile(tokens, [50, 90, 99]))
    return LengthSummary(float(tokens.mean()), p50, p90, p99, int(tokens.max()), int(tokens.sum()))
