"""Frozen simulations: a change of the simulator or a policy shows as changed numbers.

Rewrite them with ``pytest tests/golden --update-golden`` and review the difference.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import SLO, Deployment, Serving
from codesign.metrics import summarise
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.sim import simulate

CASES = {
    "specserve": ("specserve-5", Deployment(2)),
    "tree": ("tree-8x4x2", Deployment(2)),
    "async-tree": ("async-tree-8x4x2", Deployment(1, 1)),
    "batch-tree": ("batch-tree-8x2x4", Deployment(2)),
    "async-batch-tree": ("async-batch-tree-8x2x4", Deployment(1, 1)),
}
CHANCES = [0.5, 0.14, 0.07, 0.04, 0.03, 0.02, 0.01, 0.005]
METRICS = (
    "num_finished", "seconds", "ttft_mean", "tpot_mean", "throughput", "acceptance_length",
    "acceptance_rate", "slo_attainment", "goodput", "mean_batch", "spans",
)  # fmt: skip
REQUEST_FIELDS = (
    "admitted", "first_token", "finish", "num_rounds", "num_draft_tokens", "num_accepted_tokens",
)  # fmt: skip


def make_fit() -> Any:
    cost = RoundCost(
        target=StepTime(alpha=2e-6, rows=(1, 8, 32), seconds=(0.02, 0.03, 0.08)),
        draft=StepTime.linear(alpha=1e-7, gamma=1e-4, delta=0.002),
        prefill=StepTime.linear(alpha=0.0, gamma=5e-4, delta=0.02),
        draft_prefill=StepTime.linear(alpha=0.0, gamma=5e-5, delta=0.002),
        reroot=2e-4,
        link=3e-4,
        slowdown=0.15,
    )
    profile = AcceptanceProfile.independent(CHANCES, num_tokens=500, seed=9)
    costs = {"2": replace(cost, link=0.0), "1+1": cost}
    return SimpleNamespace(
        costs=costs, calibration=Calibration(0.9, 0.1), acceptance=profile, answers=profile
    )


def make_trace() -> pd.DataFrame:
    numbers = range(10)
    return pd.DataFrame(
        {
            "arrival": [0.15 * n if n < 6 else 4.0 for n in numbers],
            "prompt_tokens": [12 + 17 * n % 90 for n in numbers],
            "output_tokens": [1 + 11 * n % 37 for n in numbers],
            "category": "",
        }
    )


def rounded(value: Any) -> Any:
    """Nine digits: what another platform's logarithm may change is not worth a difference."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.mark.parametrize("name", CASES)
def test_a_frozen_simulation_is_unchanged(name, frozen):
    policy, deployment = CASES[name]
    slo = SLO(ttft=0.5, tpot=0.06)
    candidate = Candidate(deployment, parse_policy(policy), max_batch=3)
    records = simulate(
        make_trace(), candidate, make_fit(), slo=slo, serving=Serving(max_kv_tokens=330), seed=12
    )
    requests = {
        field: " ".join(f"{getattr(r, field):.9g}" for r in records.requests)
        for field in REQUEST_FIELDS
    }
    metrics = summarise(records, slo)
    found = {
        "metrics": {name: rounded(getattr(metrics, name)) for name in METRICS},
        "last_round": rounded(asdict(records.rounds[-1])),
        "requests": requests,
    }
    assert found == frozen(name, found)
