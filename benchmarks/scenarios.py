"""What the scripts that check the papers and answer their questions simulate alike."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.fit.what_if import dialled_acceptance
from codesign.metrics import Metrics, summarise
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.records import RunRecords
from codesign.sim import simulate

SEED = 1
_APART = 1e4  # seconds between requests that shall never meet


@dataclass(frozen=True)
class Speed:
    """Decoding of one request at a time: tokens per round, tokens per second, mean spans."""

    compression: float
    tokens_per_second: float
    spans: dict[str, float]


@functools.cache
def recorded() -> AcceptanceProfile:
    """The recordings that ship with the package."""
    return Fit.load(DEFAULT_FIT).acceptance


@functools.lru_cache(maxsize=32)
def dialled(rate: float) -> AcceptanceProfile:
    """Made-up acceptance in runs: ``rate`` of first draft tokens is taken."""
    return dialled_acceptance(recorded(), rate)


def constant(milliseconds: float) -> StepTime:
    """A forward whose time does not depend on its rows, as papers print them."""
    return StepTime.linear(alpha=0.0, gamma=0.0, delta=milliseconds / 1e3)


def fit_of(costs: dict[str, RoundCost], acceptance: AcceptanceProfile) -> Fit:
    """A fit of given costs."""
    return Fit(
        target="",
        draft="",
        temperature=0.0,
        costs=costs,
        calibration=Calibration(),
        acceptance=acceptance,
        errors={},
        origin="made up",
    )


def serve(
    requests: pd.DataFrame, fit: Fit, policy: str, deployment: str, *, max_batch: int
) -> tuple[Metrics, RunRecords]:
    """Simulate one candidate."""
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), max_batch)
    serving = Serving(max_kv_tokens=None if _knows_memory(fit, deployment) else 10_000_000)
    records = simulate(requests, candidate, fit, slo=SLO(), serving=serving, seed=SEED)
    return summarise(records, SLO()), records


def _knows_memory(fit: Fit, deployment: str) -> bool:
    return fit.costs[parse_deployment(deployment).unit.label].kv_tokens is not None


def decode_alone(fit: Fit, policy: str, deployment: str, *, requests: int) -> Speed:
    """Serve requests one at a time, as a latency benchmark at batch 1 does."""
    frame = pd.DataFrame(
        {
            "arrival": np.arange(requests) * _APART,
            "prompt_tokens": 100,
            "output_tokens": 400,
            "category": "",
        }
    )
    metrics, _ = serve(frame, fit, policy, deployment, max_batch=1)
    assert metrics.tpot_mean is not None
    spans = {name: value for name, value in metrics.spans.items() if value is not None}
    return Speed(metrics.acceptance_length or 1.0, 1.0 / metrics.tpot_mean, spans)


def closed_batch(batch: int, *, waves: int, output: int) -> pd.DataFrame:
    """Requests that keep a batch of one size full: all there at once, ``waves`` times as many."""
    count = batch * waves
    return pd.DataFrame(
        {
            "arrival": np.zeros(count),
            "prompt_tokens": 512,
            "output_tokens": output,
            "category": "",
        }
    )


def bisect_rate(reach: Any, wanted: float, *, steps: int) -> float | None:
    """Dialled acceptance at which ``reach(rate)``, rising, is ``wanted``; None if it never is."""
    low, high = 0.30, 0.985
    if reach(high) < wanted:
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if reach(middle) < wanted else (low, middle)
    return (low + high) / 2
