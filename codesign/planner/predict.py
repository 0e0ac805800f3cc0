"""The prediction for one candidate: simulations with several seeds, and an interval per figure.

Planner and validation both predict with these functions, so that a plan's figures can be had again
from the plan file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from codesign import Progress
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Serving
from codesign.metrics import Metrics, summarise
from codesign.planner.saturation import STABLE, saturation, worst
from codesign.planner.slo_figures import Times, slo_figures, times_of
from codesign.planner.uncertainty import (
    acceptance_error,
    bounds_of,
    hull,
    interval_over_seeds,
    offered,
    time_error,
)
from codesign.records import SPANS, RunRecords

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

TIMES = (
    "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "tpot_mean", "tpot_p50", "tpot_p90",
    "tpot_p99", "latency_mean", "ttft_slo", "tpot_slo", "throughput", "seconds",
    "mean_batch", "mean_running",  # as many requests arrive in the time of one as that takes
)  # fmt: skip
COUNTS = ("acceptance_length", "acceptance_rate")
SHARES = ("slo_attainment", "goodput")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one simulation.

    Attributes:
        label: Of the candidate.
        seed: Of the simulation.
        figures: Those of ``Metrics`` that are defined, "ttft_slo" and "tpot_slo" (infinite if too
            few requests finished), for each of SHARES its value if all latencies were longer
            ("..._worse") or shorter ("..._better") by the fit's error, and ``offered``.
        spans: Mean seconds per round.
        max_rows: Most rows of a target forward.
        max_draft_rows: Most rows of a draft forward, prompts that it reads not counted.
        saturation: How the queue grew, one of ``saturation.VERDICTS``.
        num_requests: Of the trace's stretch that was simulated.
        times: When each request had its first token, and its last; see ``times_of``.
    """

    label: str
    seed: int
    figures: dict[str, float]
    spans: dict[str, float]
    max_rows: int
    max_draft_rows: int = 0
    saturation: str = STABLE
    num_requests: int = 0
    times: Times = ()


def simulate_outcome(
    requests: pd.DataFrame,
    candidate: Candidate,
    fit: Fit,
    *,
    slo: SLO,
    serving: Serving,
    seed: int,
    progress: Progress | None = None,
) -> tuple[Outcome, RunRecords]:
    """Simulate a candidate once.

    Args:
        requests: Prepared trace: arrival, prompt_tokens, output_tokens, category.
        candidate: What serves them.
        fit: Step times and acceptance.
        slo: Targets.
        serving: How memory and steps are shared.
        seed: Of the acceptance draws; the same for every candidate, so that they see the same luck.
        progress: As of ``codesign.sim.simulate``.
    """
    from codesign.sim import simulate

    records = simulate(
        requests, candidate, fit, slo=slo, serving=serving, seed=seed, progress=progress
    )
    return outcome_of(records, candidate, fit, slo=slo, seed=seed), records


def outcome_of(
    records: RunRecords, candidate: Candidate, fit: Fit, *, slo: SLO, seed: int
) -> Outcome:
    """Figures of a simulation's records.

    Args:
        records: Of one simulation.
        candidate: That was simulated.
        fit: Its errors say how far attainment may be off.
        slo: Targets.
        seed: Of the simulation.
    """
    metrics = summarise(records, slo)
    spans = {name: value for name, value in metrics.spans.items() if value is not None}
    error = time_error(fit, candidate, spans, [r.output_tokens for r in records.requests])
    figures = _figures(metrics) | offered(records.requests)
    figures |= slo_figures(records.requests, records.seconds, slo, error)
    return Outcome(
        candidate.label,
        seed,
        figures,
        spans,
        max_rows=int(records.rounds.column("rows").max(initial=0)),
        max_draft_rows=records.rounds.most_draft_rows,
        saturation=saturation(records.requests, records.queued),
        num_requests=len(records.requests),
        times=times_of(records.requests),
    )


def score(
    candidate: Candidate,
    outcomes: Sequence[Outcome],
    fit: Fit,
    slo: SLO,
    *,
    output_tokens: ArrayLike,
    spread: Mapping[str, float] | None = None,
) -> ScoredCandidate:
    """Combine simulations of one candidate into a prediction.

    The value of a figure is its mean over the seeds. Its interval is where 90 % of further runs lie
    if the seeds' values are normal (Student's t; with a few seeds their quantiles would be far too
    narrow), its half width combined in quadrature with the value times a relative error: for times
    ``time_error``, for counts of tokens ``acceptance_error``. Throughput is divided by 1 +
    ``time_error`` at worst. Attainment and goodput are instead computed again with all latencies
    longer and shorter by ``time_error``. No rate is above that at which the trace comes, and no run
    shorter. What queueing makes of a step-time error is not in it: near saturation the interval of
    TTFT is a lower bound.

    Args:
        candidate: What was simulated.
        outcomes: At least one, of different seeds.
        fit: As simulated with.
        slo: Targets; the mean over the seeds must meet them.
        output_tokens: (R,) of each request; late parts of answers are known less well.
        spread: What other candidates' seeds differ by (``spread_over_seeds``); stands in where
            this one was simulated once.
    """
    stand_in = spread or {}
    spans = {
        name: float(np.mean([o.spans[name] for o in outcomes]))
        for name in SPANS
        if all(name in o.spans for o in outcomes)
    }
    errors: dict[str, float] = dict.fromkeys(
        TIMES, time_error(fit, candidate, spans, output_tokens)
    )
    errors |= dict.fromkeys(COUNTS, acceptance_error(fit, candidate, output_tokens))
    return ScoredCandidate(
        candidate,
        _with_errors(outcomes, errors, stand_in, candidate.max_batch) | _shares(outcomes, stand_in),
        spans,
        fit.origin_of(candidate.deployment),
        is_feasible=max(misses(outcomes, slo).values()) <= 1,
        saturation=worst([o.saturation for o in outcomes]),
        num_seeds=len(outcomes),
    )


def _with_errors(
    outcomes: Sequence[Outcome],
    errors: Mapping[str, float],
    stand_in: Mapping[str, float],
    max_batch: int,
) -> dict[str, Interval]:
    """Intervals of the figures that have a relative error; none of one that is not finite."""
    bounds = bounds_of([outcome.figures for outcome in outcomes], max_batch)
    predicted = {}
    for name, error in errors.items():
        values = _values(outcomes, name)
        if values and all(map(math.isfinite, values)):
            predicted[name] = interval_over_seeds(
                values,
                error,
                stand_in.get(name, 0.0),
                bounds=bounds.get(name, (0.0, math.inf)),
                is_rate=name == "throughput",
            )
    return predicted


def _shares(outcomes: Sequence[Outcome], stand_in: Mapping[str, float]) -> dict[str, Interval]:
    """Intervals of SHARES: as far as longer and shorter latencies reach."""
    most = _values(outcomes, "goodput_most")
    top = {"slo_attainment": 1.0, "goodput": min(most, default=math.inf)}
    predicted = {}
    for name in SHARES:
        values, worse = _values(outcomes, name), _values(outcomes, f"{name}_worse")
        better = _values(outcomes, f"{name}_better")
        if values:
            own = interval_over_seeds(values, 0.0, stand_in.get(name, 0.0))
            predicted[name] = hull(own, [*worse, *better], top[name])
    return predicted


def misses(outcomes: Sequence[Outcome], slo: SLO) -> dict[str, float]:
    """Mean value at the SLO's percentile over its target, for "ttft" and "tpot"; 0 if no target."""
    found = {}
    for name, target in (("ttft", slo.ttft), ("tpot", slo.tpot)):
        values = _values(outcomes, f"{name}_slo")
        found[name] = math.fsum(values) / len(values) / target if target and values else 0.0
    return found


def extrapolation_note(candidate: Candidate, outcomes: Iterable[Outcome], fit: Fit) -> str:
    """One line if the simulation left the range of rows that was measured; else "".

    Args:
        candidate: That was simulated.
        outcomes: One per seed.
        fit: Whose steps were measured up to some number of rows.
    """
    made, label = list(outcomes), candidate.deployment.unit.label
    verified = max((o.max_rows for o in made), default=0)
    drafted = max((o.max_draft_rows for o in made), default=0)
    measured = fit.costs[label].target.rows
    timed = fit.steps[f"{label}/draft"].most_rows if f"{label}/draft" in fit.steps else 0
    beyond = []
    if len(measured) > 1 and verified > measured[-1]:
        beyond.append(f"verifies up to {verified} rows at once, but steps were measured up to "
                      f"{measured[-1]}")  # fmt: skip
    if 0 < timed < drafted:
        beyond.append(f"drafts up to {drafted} rows at once, but steps were measured up to {timed}")
    return f"{candidate.label}: {'; '.join(beyond)}; its times are extrapolated" if beyond else ""


def prompt_note(fit: Fit, requests: pd.DataFrame) -> str:
    """One line if a trace has longer prompts than were measured; else ""."""
    longest = int(np.max(requests["prompt_tokens"].to_numpy(), initial=0))
    known = [step.most_rows for name, step in fit.steps.items() if name.endswith("/prefill")]
    if not known or not 0 < min(known) < longest:
        return ""
    return (
        f"prompts have up to {longest:,} tokens, but were measured up to {min(known):,}; the "
        "times of longer ones are extrapolated"
    )


def _figures(metrics: Metrics) -> dict[str, float]:
    values = {name: getattr(metrics, name, None) for name in (*TIMES, *COUNTS, *SHARES)}
    return {name: value for name, value in values.items() if value is not None}


def _values(outcomes: Iterable[Outcome], name: str) -> list[float]:
    return [o.figures[name] for o in outcomes if name in o.figures]


def spread_over_seeds(groups: Iterable[Sequence[Outcome]]) -> dict[str, float]:
    """Relative standard deviation of each figure over seeds, on average over candidates.

    Args:
        groups: Outcomes by candidate; those of a single seed say nothing.
    """
    found: dict[str, list[float]] = {}
    for outcomes in groups:
        for name in (*TIMES, *COUNTS, *SHARES):
            values = _values(outcomes, name)
            if len(values) > 1 and all(map(math.isfinite, values)) and np.mean(values):
                found.setdefault(name, []).append(float(np.std(values, ddof=1) / np.mean(values)))
    return {name: math.sqrt(float(np.mean(np.square(v)))) for name, v in found.items()}
