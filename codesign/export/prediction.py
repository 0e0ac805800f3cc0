"""What our model predicts for an exported configuration, beside the plan's own candidate.

The same simulations with the same seeds as in the plan: of the policy and the split that were
exported, on the plan's machine, by this engine's rules for memory and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from codesign import Progress
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import Serving
from codesign.export.setup import Engine
from codesign.export.wishes import wish_of
from codesign.planner.predict import score, simulate_outcome
from codesign.planner.ranking import CRITERIA, NOTICEABLE

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit
    from codesign.plan import Plan


FIGURES = (
    "tpot_mean", "ttft_mean", "latency_mean", "throughput", "goodput", "acceptance_length",
)  # fmt: skip
_MANY_TOKENS = 500_000  # of the answers: with more, one seed has to do


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predictions of the plan's candidate and of what was exported.

    Attributes:
        label: Of the candidate that stands for the export.
        planned: Figures of the plan's candidate.
        exported: Figures of the export.
        num_seeds: Simulations of the export.
        note: How the stand-in differs from the export; "" if it does not.
    """

    label: str
    planned: Mapping[str, Interval]
    exported: Mapping[str, Interval]
    num_seeds: int
    note: str = ""

    @property
    def slower(self) -> float | None:
        """Share by which a token takes longer than planned; below 0 if it is faster."""
        if "tpot_mean" not in self.planned or "tpot_mean" not in self.exported:
            return None
        return self.exported["tpot_mean"].value / self.planned["tpot_mean"].value - 1.0


def forecast(
    plan: Plan,
    scored: ScoredCandidate,
    exported: Candidate,
    fit: Fit,
    requests: pd.DataFrame,
    *,
    note: str = "",
    progress: Progress | None = None,
) -> Forecast:
    """Simulate the export as the plan was simulated, unless it is the plan's own candidate.

    No engine lets requests join by their targets: the export serves first come, first served.

    Args:
        plan: Names targets, limits and seeds.
        scored: The plan's candidate.
        exported: What stands for the export.
        fit: The plan's.
        requests: The plan's.
        note: See ``Forecast``.
        progress: Called with ("simulate", done, total).
    """
    planned = _figures(scored.predicted)
    if exported == scored.candidate and plan.serving == _served(plan):
        return Forecast(exported.label, planned, planned, scored.num_seeds, note)
    tokens = int(np.asarray(requests["output_tokens"], np.int64).sum())
    num_seeds = 1 if tokens > _MANY_TOKENS else plan.num_seeds
    found = _simulated(plan, exported, fit, requests, num_seeds, progress)
    return Forecast(exported.label, planned, found, num_seeds, note)


def _served(plan: Plan) -> Serving:
    """How any of these engines serves a plan."""
    return replace(plan.serving, scheduling="fcfs")


def _simulated(
    plan: Plan,
    candidate: Candidate,
    fit: Fit,
    requests: pd.DataFrame,
    num_seeds: int,
    progress: Progress | None,
    *,
    stage: str = "simulate",
) -> dict[str, Interval]:
    """Figures of a candidate as an engine serves it, with the first of the plan's seeds."""
    outcomes, slo = [], plan.slo
    for seed in plan.simulation_seeds[:num_seeds]:
        outcome, _ = simulate_outcome(
            requests, candidate, fit, slo=slo, serving=_served(plan), seed=seed
        )
        outcomes.append(outcome)
        if progress:
            progress(stage, len(outcomes), num_seeds)
    found = score(candidate, outcomes, fit, slo, output_tokens=requests["output_tokens"])
    return _figures(found.predicted)


def _figures(predicted: Mapping[str, Interval]) -> dict[str, Interval]:
    return {name: predicted[name] for name in FIGURES if name in predicted}


def better_candidate(
    plan: Plan,
    found: Forecast,
    exported: ScoredCandidate,
    fit: Fit,
    requests: pd.DataFrame,
    *,
    runs: Callable[[ScoredCandidate], bool],
    progress: Progress | None = None,
) -> str:
    """Label of the plan's best candidate that the engine ``runs`` as is, if it beats the export.

    By the two figures that decide between plans: goodput alone is equal wherever all requests are
    served in time. Both are of simulations as the engine serves, with the same seeds: what the plan
    says of a candidate only counts if it was simulated so.
    """
    workers = exported.candidate.deployment.num_workers
    others = (
        other
        for other in plan.scored
        if other.label != exported.label
        and other.candidate.deployment.num_workers <= workers
        and runs(other)
    )
    if (other := next(others, None)) is None:
        return ""
    theirs: Mapping[str, Interval] = other.predicted
    if plan.serving != _served(plan) or other.num_seeds != found.num_seeds:
        num = found.num_seeds
        theirs = _simulated(
            plan, other.candidate, fit, requests, num, progress, stage="simulate another candidate"
        )
    return other.label if _is_better(theirs, found.exported, plan.objective) else ""


def _is_better(
    theirs: Mapping[str, Interval], ours: Mapping[str, Interval], objective: str
) -> bool:
    """Whether the first figure that differs noticeably is better, of the two that decide."""
    for name, more_is_better in CRITERIA[objective][:2]:
        if name not in theirs or name not in ours:
            continue
        one, other = theirs[name].value, ours[name].value
        gain = (one - other if more_is_better else other - one) / max(other, 1e-12)
        if abs(gain) > NOTICEABLE:
            return gain > 0
    return False


def runs_as_is(candidate: Candidate, engine: Engine) -> bool:
    """Whether an engine may run a candidate's policy without a change; EAGLE needs a head."""
    spec = candidate.speculation
    if spec.is_async or spec.kind == "eagle":
        return False
    wish = wish_of(spec, batch=1)
    is_wide = wish.shape is not None and wish.shape[1] > 1
    return wish.is_fixed or (spec.kind == "tree" and is_wide and "draft" in engine.trees)
