"""What a replay is predicted to be: simulations whose steps are as unsure as the fit's are.

Whether a request comes before or after a round ends turns on fractions of a millisecond, and with
it who waits for whom: of 28 to 200 requests P90 and P99 jump by 5 to 15 % where all steps take 1 %
more. One simulation with the fit's own steps is one draw of that, the engine's run another. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from codesign.fit import Fit
from codesign.fit.round_costs import FORWARDS, PROMPTS
from codesign.plan import Plan
from codesign.planner.predict import simulate_outcome
from codesign.policy.cost import RoundCost, StepTime
from codesign.validate import RunComparison

NUM_DRAWS = 24
MOST_REQUESTS = 8  # more of them are as wrong as these


@dataclass(frozen=True, slots=True)
class UnsureStep(StepTime):
    """A step that takes another factor of its time with each number of requests.

    Attributes:
        factors: Of one request, of two, and so on; the last one of more.
    """

    factors: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, step: StepTime, factors: Sequence[float]) -> UnsureStep:
        """A step with these factors."""
        own = {each.name: getattr(step, each.name) for each in fields(StepTime)}
        return cls(**own, factors=tuple(factors))

    def of_arrays(
        self, rows: ArrayLike, context: ArrayLike, requests: ArrayLike = 1.0
    ) -> NDArray[np.float64]:
        """See StepTime."""
        number = np.minimum(np.asarray(requests, np.int64), len(self.factors)) - 1
        return StepTime.of_arrays(self, rows, context, requests) * np.array(self.factors)[number]

    def __call__(self, rows: float, context: float = 0.0, requests: float = 1.0) -> float:
        """See StepTime."""
        factor = self.factors[min(int(requests), len(self.factors)) - 1]
        return StepTime.__call__(self, rows, context, requests) * factor


def unsure_cost(
    fit: Fit, label: str, generator: np.random.Generator, *, seconds: float, drift: float
) -> RoundCost:
    """A deployment's costs, each kind of step wrong by draws of its error.

    How wrong a form is, is another matter with each number of requests: these are other shapes.
    What a machine does after its profile is ``drift`` standard deviations for all of a round, which
    takes ``seconds``.
    """
    cost, steps = fit.costs[label], {}
    numbers = range(1, MOST_REQUESTS + 1)
    drifts = np.array([fit.drift(label, seconds, requests=number) for number in numbers])
    drifted = np.exp(drifts * drift)
    for name in FORWARDS:
        step, most = getattr(cost, name), 1 if name in PROMPTS else MOST_REQUESTS
        sigmas = [fit.standard_error(f"{label}/{name}", requests=n + 1) for n in range(most)]
        own = np.exp(np.array(sigmas) * generator.normal(size=most))
        factors = (own if name in PROMPTS else own * drifted).tolist()
        steps[name] = step.scaled(factors[0]) if most == 1 else UnsureStep.of(step, factors)
    return replace(cost, **steps)


def replay_draws(
    plan: Plan, run: RunComparison, fit: Fit, requests: pd.DataFrame
) -> dict[str, list[float]]:
    """Figures of the same requests with other luck and other steps; the same ones for each plan."""
    label, generator = run.candidate.deployment.unit.label, np.random.default_rng(plan.seed)
    found: dict[str, list[float]] = {}
    seconds = sum(c.predicted.value for c in run.spans if c.name in ("target", "draft"))
    # Evenly spread, as their mean would move the prediction.
    drifts = [NormalDist().inv_cdf((draw + 0.5) / NUM_DRAWS) for draw in range(NUM_DRAWS)]
    for draw, drift in enumerate(generator.permutation(drifts).tolist()):
        cost = unsure_cost(fit, label, generator, seconds=seconds, drift=drift)
        drawn = replace(fit, costs={label: cost})
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
