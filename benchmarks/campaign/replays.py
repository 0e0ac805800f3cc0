"""What a replay is predicted to be: simulations whose steps are as unsure as the fit's are.

Whether a request comes before or after a round ends turns on fractions of a millisecond, and with
it who waits for whom: of 28 to 200 requests P90 and P99 jump by 5 to 15 % where all steps take 1 %
more. One simulation with the fit's own steps is one draw of that, the engine's run another. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from benchmarks.campaign.intervals import MEDIAN
from codesign.fit import Fit
from codesign.plan import Plan
from codesign.planner.predict import simulate_outcome
from codesign.policy.cost import RoundCost
from codesign.validate import RunComparison

NUM_DRAWS = 24
STEPS = ("target", "draft", "prefill", "draft_prefill")


def unsure_cost(fit: Fit, label: str, generator: np.random.Generator) -> RoundCost:
    """A deployment's costs, each kind of step wrong by a draw of its held-out error."""
    cost, steps = fit.costs[label], {}
    for name in STEPS:
        sigma = fit.errors.get(f"{label}/{name}", 0.0) / MEDIAN
        steps[name] = getattr(cost, name).scaled(float(np.exp(sigma * generator.normal())))
    return replace(cost, **steps)


def replay_draws(
    plan: Plan, run: RunComparison, fit: Fit, requests: pd.DataFrame
) -> dict[str, list[float]]:
    """Figures of the same requests with other luck and other steps; the same ones for each plan."""
    label, generator = run.candidate.deployment.unit.label, np.random.default_rng(plan.seed)
    found: dict[str, list[float]] = {}
    for draw in range(NUM_DRAWS):
        drawn = replace(fit, costs={label: unsure_cost(fit, label, generator)})
        outcome, _ = simulate_outcome(
            requests.iloc[: len(run.requests)],
            run.candidate,
            drawn,
            slo=plan.slo,
            serving=plan.serving,
            seed=plan.seed + draw,
        )
        for name, value in outcome.figures.items():
            found.setdefault(name, []).append(value)
    return found
