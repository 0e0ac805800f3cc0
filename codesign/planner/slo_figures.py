"""Figures of a simulation that depend on its targets, and the same for other targets.

Targets only steer a simulation where policies or scheduling look at them. All others need not be
made again for another SLO: it is enough to know when each request had its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from codesign.candidate import Candidate
from codesign.config import SLO, Serving
from codesign.metrics import meets_slo, slo_values
from codesign.planner.uncertainty import time_error
from codesign.records import RequestRecord, own_targets

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit
    from codesign.planner.predict import Outcome

_MOST_REQUESTS = 20_000  # of a simulation whose times are kept, two numbers each

Times = tuple[tuple[float, ...], ...]


def is_steered(candidate: Candidate, serving: Serving) -> bool:
    """Whether a simulation with another SLO is another simulation."""
    return serving.scheduling == "slo" or candidate.speculation.needs_step_times


def times_of(requests: Sequence[RequestRecord]) -> Times:
    """When each request had its first token, and its last; () if some never had, or of too many."""
    firsts = [r.first_token for r in requests if r.first_token is not None]
    lasts = [r.finish for r in requests if r.finish is not None]
    if not len(firsts) == len(lasts) == len(requests) <= _MOST_REQUESTS:
        return ()
    return tuple(map(float, firsts)), tuple(map(float, lasts))


def slo_figures(
    requests: Sequence[RequestRecord], seconds: float, slo: SLO, error: float
) -> dict[str, float]:
    """Values at the SLO's percentile, attainment and goodput, these also if times are off.

    Args:
        requests: Of one simulation.
        seconds: That it took.
        slo: Targets.
        error: Relative, of the step times.
    """
    values = slo_values(requests, slo).items()
    figures = {f"{name}_slo": value for name, value in values if value is not None}
    for side, factor in (("", 1.0), ("_worse", 1.0 / (1.0 + error)), ("_better", 1.0 + error)):
        num_good = sum(meets_slo(r, slo, factor) for r in requests)
        figures[f"slo_attainment{side}"] = num_good / max(len(requests), 1)
        if seconds > 0:
            figures[f"goodput{side}"] = num_good / seconds
    return figures


def outcome_for(
    outcome: Outcome, requests: pd.DataFrame, candidate: Candidate, fit: Fit, slo: SLO
) -> Outcome:
    """What a simulation that no target steers gives for other targets.

    Args:
        outcome: With the times of its requests.
        requests: That were simulated.
        candidate: That served them.
        fit: As simulated with.
        slo: The other targets.
    """
    error = time_error(fit, candidate, outcome.spans, requests["output_tokens"])
    records = _records(requests, outcome.times)
    others = slo_figures(records, outcome.figures["seconds"], slo, error)
    return replace(outcome, figures=outcome.figures | others)


def _records(requests: pd.DataFrame, times: Times) -> list[RequestRecord]:
    """Records of requests, as far as targets ask for them."""
    columns = (
        np.asarray(requests["arrival"], np.float64).tolist(),
        np.asarray(requests["prompt_tokens"], np.int64).tolist(),
        np.asarray(requests["output_tokens"], np.int64).tolist(),
        *times,
        own_targets(requests),
    )
    return [
        RequestRecord(n, "", at, prompt, output, first_token=first, finish=last, slo_tpot=own)
        for n, (at, prompt, output, first, last, own) in enumerate(zip(*columns, strict=True))
    ]
