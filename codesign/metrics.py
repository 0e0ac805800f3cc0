"""What a run achieved, from its records: one definition of each figure, for simulator and engine.

Times are seconds. A figure without anything to compute it from is None, never NaN. Percentiles are
values that some request really had (the smallest that covers the share), so "the p90 meets the
target" and "90 % of requests meet the target" are the same statement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from codesign.config import SLO
from codesign.records import SPANS, RequestRecord, RoundLog, RunRecords


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one run.

    Attributes:
        num_requests: Requests of the trace.
        num_finished: Those with their last token.
        seconds: Length of the run.
        ttft_mean: Time to first token, over requests that have one; likewise p50, p90, p99.
        tpot_mean: Time per later token, over finished requests with two or more tokens.
        latency_mean: Arrival to last token, over finished requests.
        throughput: Output tokens per second of the run, unfinished requests included.
        acceptance_length: Tokens emitted per request and round, bonus token included; tokens that
            come from prefill, one more after each eviction, are not counted. 1 for plain decoding.
        acceptance_rate: Draft tokens accepted over draft tokens verified.
        slo_attainment: Share of all requests that finished and met every target.
        goodput: Such requests per second.
        mean_batch: Requests that take part in a round; steps that only run prompts are not counted.
        mean_running: Requests that decode during such a round, those that sit it out among them.
        spans: Mean seconds per round of each span (records.SPANS).
        calibration_error: Expected calibration error of the draft's chances by category, and of
            "all"; None where nothing was drafted, or where rounds were played back from tapes.
    """

    num_requests: int
    num_finished: int
    seconds: float
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    tpot_mean: float | None
    tpot_p50: float | None
    tpot_p90: float | None
    tpot_p99: float | None
    latency_mean: float | None
    throughput: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    slo_attainment: float | None
    goodput: float | None
    mean_batch: float | None
    mean_running: float | None
    spans: dict[str, float | None]
    calibration_error: dict[str, float] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for run.json and ``--json``."""
        return asdict(self)


def ttft(request: RequestRecord) -> float | None:
    """Seconds from arrival to the first output token; None while there is none."""
    return None if request.first_token is None else request.first_token - request.arrival


def tpot(request: RequestRecord) -> float | None:
    """Seconds per token after the first; None if unfinished or with a single token."""
    if request.first_token is None or request.finish is None or request.output_tokens < 2:
        return None
    return (request.finish - request.first_token) / (request.output_tokens - 1)


def meets_slo(request: RequestRecord, slo: SLO, scale: float = 1.0) -> bool:
    """Whether a request finished and met every target; one token is never too slow a TPOT.

    Args:
        request: One that has a TPOT target of its own is held to that.
        slo: Targets of the others.
        scale: Times each target.
    """
    if request.finish is None:
        return False
    own = slo.tpot if request.slo_tpot is None else request.slo_tpot
    return all(
        target is None or value is None or value <= scale * target
        for target, value in ((slo.ttft, ttft(request)), (own, tpot(request)))
    )


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Smallest of ``values`` that at least ``percent`` percent of them do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return None
    # The tolerance keeps 90 % of 10 values at the 9th, whatever 0.9 * 10 rounds to.
    rank = math.ceil(percent / 100.0 * len(ordered) - 1e-9)
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def slo_values(requests: Sequence[RequestRecord], slo: SLO) -> dict[str, float | None]:
    """TTFT and TPOT at the SLO's percentile: what must not exceed the targets.

    A request with a TPOT target of its own counts as if its TPOT were by as much nearer to, or
    further from, the common one.

    Returns:
        "ttft" and "tpot" in seconds. Requests that never came so far count as infinitely slow;
        None if no request has such a figure.
    """
    late = [math.inf] * sum(r.finish is None for r in requests)
    waiting = [math.inf] * sum(r.first_token is None for r in requests)
    return {
        "ttft": percentile(_defined(map(ttft, requests)) + waiting, slo.percentile),
        "tpot": percentile(_defined(_on_common(r, slo) for r in requests) + late, slo.percentile),
    }


def _on_common(request: RequestRecord, slo: SLO) -> float | None:
    """A request's TPOT, on the scale of the common target."""
    value = tpot(request)
    if value is None or request.slo_tpot is None or slo.tpot is None:
        return value
    return value * slo.tpot / request.slo_tpot


def summarise(records: RunRecords, slo: SLO | None = None) -> Metrics:
    """Figures of a run.

    Args:
        records: Simulated or measured.
        slo: Targets for ``slo_attainment`` and ``goodput``; without any, finishing is enough.
    """
    requests, batch = records.requests, records.rounds.column("batch")
    running = records.rounds.column("running")
    num_rounds = sum(r.num_rounds for r in requests)  # of each request, added up
    num_accepted = sum(r.num_accepted_tokens for r in requests)
    ttfts, tpots = _defined(map(ttft, requests)), _defined(map(tpot, requests))
    num_good = sum(meets_slo(request, slo or SLO()) for request in requests)
    return Metrics(
        num_requests=len(requests),
        num_finished=sum(request.finish is not None for request in requests),
        seconds=records.seconds,
        ttft_mean=_mean(ttfts),
        ttft_p50=percentile(ttfts, 50),
        ttft_p90=percentile(ttfts, 90),
        ttft_p99=percentile(ttfts, 99),
        tpot_mean=_mean(tpots),
        tpot_p50=percentile(tpots, 50),
        tpot_p90=percentile(tpots, 90),
        tpot_p99=percentile(tpots, 99),
        latency_mean=_mean([r.finish - r.arrival for r in requests if r.finish is not None]),
        throughput=_ratio(sum(r.output_tokens for r in requests), records.seconds),
        acceptance_length=_ratio(num_rounds + num_accepted, num_rounds),
        acceptance_rate=_ratio(num_accepted, sum(r.num_draft_tokens for r in requests)),
        slo_attainment=_ratio(num_good, len(requests)),
        goodput=_ratio(num_good, records.seconds),
        mean_batch=_ratio(batch.sum(), int(np.count_nonzero(batch))),
        mean_running=_ratio(running.sum(), int(np.count_nonzero(batch))),
        spans=mean_spans(records.rounds),
        calibration_error=dict(records.calibration) or None,
    )


def mean_spans(rounds: RoundLog) -> dict[str, float | None]:
    """Mean seconds per round of each span; None without rounds. Prompt-only steps do not count."""
    num_rounds = int(np.count_nonzero(rounds.column("batch")))
    return {span: _ratio(rounds.column(span).sum(), num_rounds) for span in SPANS}


def _defined(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return _ratio(math.fsum(values), len(values))


def _ratio(total: float, count: float) -> float | None:
    return float(total) / float(count) if count > 0 else None
