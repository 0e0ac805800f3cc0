"""A trace as the screen sees it: arrivals per stretch of time, lengths in a few numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.records import own_targets

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

_INSTANT = 1e-3  # seconds, the shortest trace
_BIN_REQUESTS = 250  # on average in a stretch of the trace: fewer would be luck, not load
_MAX_BINS = 64
_NUM_QUANTILES = 16  # of prompt lengths


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Arrivals and lengths of a trace.

    Attributes:
        duration: Seconds from the first to the last arrival.
        arrivals: (T,) requests that arrive in each of T equal stretches of it.
        variation: Squared coefficient of variation of the gaps between arrivals in a stretch.
        prompts: (Q,) prompt lengths at evenly spaced quantiles, cached prefixes taken off.
        output: Mean output tokens.
        per_decoded: Mean of 1 / tokens that are decoded, of the requests that decode any.
        output_variation: Squared coefficient of variation of output tokens.
        last_output: Output tokens of the longest tenth: what a run ends with.
        context: KV rows of a running request, averaged over requests and their lives.
        own_targets: (seconds per token, share of requests) of TPOT targets that requests have.
    """

    duration: float
    arrivals: Floats
    variation: float
    prompts: Floats
    output: float
    per_decoded: float
    output_variation: float
    last_output: float
    context: float
    own_targets: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, requests: pd.DataFrame, *, cached_share: float = 0.0) -> Workload:
        """Statistics of a prepared trace.

        Args:
            requests: arrival, prompt_tokens, output_tokens.
            cached_share: Share of prompt tokens whose KV rows a prefix cache holds.
        """
        arrival = np.asarray(requests["arrival"], np.float64)
        prompt = np.asarray(requests["prompt_tokens"], np.float64)
        output = np.asarray(requests["output_tokens"], np.float64)
        arrival = arrival - arrival.min()
        duration = max(float(arrival.max()), _INSTANT)
        num_bins = int(np.clip(len(arrival) // _BIN_REQUESTS, 1, _MAX_BINS))
        counts, _ = np.histogram(arrival, bins=num_bins, range=(0.0, duration))
        marks = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
        mean, decoded = float(output.mean()), output[output > 1.0] - 1.0
        return cls(
            duration=duration,
            arrivals=counts.astype(np.float64),
            variation=_gap_variation(np.sort(arrival), duration / num_bins),
            prompts=np.maximum(np.quantile(prompt, marks) * (1.0 - cached_share), 1.0),
            output=mean,
            per_decoded=float(np.mean(1.0 / decoded)) if len(decoded) else 0.0,
            output_variation=float(output.var()) / mean**2,
            last_output=float(np.quantile(output, 0.9)),
            # A request counts for as long as it runs, which is as long as its output.
            context=float(np.average(prompt + output / 2, weights=output)),
            own_targets=_own_targets(requests),
        )

    @property
    def decoded(self) -> float:
        """Mean tokens that are decoded: the first one comes with the prompt."""
        return max(self.output - 1.0, 1e-9)

    @property
    def num_requests(self) -> float:
        """Requests in all."""
        return float(self.arrivals.sum())


def _own_targets(requests: pd.DataFrame) -> tuple[tuple[float, float], ...]:
    """Targets to three digits, and how many of all requests ask for each."""
    asked = Counter(float(f"{own:.3g}") for own in own_targets(requests) if own is not None)
    return tuple((own, num / len(requests)) for own, num in sorted(asked.items()))


def _gap_variation(arrival: Floats, stretch: float) -> float:
    """Of gaps within stretches, so that what changes slowly is not counted twice."""
    if len(arrival) < 3:
        return 1.0
    gaps, stretches = np.diff(arrival), (arrival[1:] / stretch).astype(np.int64)
    counts = np.bincount(stretches)
    means = np.bincount(stretches, weights=gaps) / np.maximum(counts, 1)
    used = means[stretches] > 0
    relative = gaps[used] / means[stretches][used]
    return float(relative.var()) if len(relative) > 1 else 1.0


def cached_share(requests: pd.DataFrame, replicas: int) -> float:
    """Share of prompt tokens that a prefix cache without a limit would hold, requests in turn.

    As in the simulator: whole blocks, and one token of a prompt is always run.

    Args:
        requests: With ``hash_ids``; 0 without.
        replicas: Caches, each of which sees every replicas-th request.
    """
    if "hash_ids" not in requests:
        return 0.0
    seen: list[set[int]] = [set() for _ in range(replicas)]
    prompts = requests["prompt_tokens"].tolist()
    hits = 0
    for number, (prompt, ids) in enumerate(zip(prompts, requests["hash_ids"], strict=True)):
        cache, blocks = seen[number % replicas], list(ids)[: prompt // PREFIX_BLOCK]
        known = next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        hits += min(known * PREFIX_BLOCK, prompt - 1)
        cache.update(blocks)
    return hits / max(sum(prompts), 1)
