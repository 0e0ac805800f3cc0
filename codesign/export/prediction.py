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
    serving = replace(plan.serving, scheduling="fcfs")
    if exported == scored.candidate and serving == plan.serving:
        return Forecast(exported.label, planned, planned, plan.num_seeds, note)
    tokens = int(np.asarray(requests["output_tokens"], np.int64).sum())
    seeds = list(plan.simulation_seeds)[: 1 if tokens > _MANY_TOKENS else None]
    outcomes = []
    for seed in seeds:
        outcome, _ = simulate_outcome(
            requests, exported, fit, slo=plan.slo, serving=serving, seed=seed
        )
        outcomes.append(outcome)
        if progress:
            progress("simulate", len(outcomes), len(seeds))
    found = score(exported, outcomes, fit, plan.slo, output_tokens=requests["output_tokens"])
    return Forecast(exported.label, planned, _figures(found.predicted), len(seeds), note)


def _figures(predicted: Mapping[str, Interval]) -> dict[str, Interval]:
    return {name: predicted[name] for name in FIGURES if name in predicted}


def better_candidate(
    plan: Plan, found: Forecast, exported: ScoredCandidate, runs: Callable[[Candidate], bool]
) -> str:
    """Label of the plan's best candidate that the engine ``runs`` as is, if it beats the export.

    By the two figures that decide between plans: goodput alone is equal wherever all requests are
    served in time.
    """
    workers = exported.candidate.deployment.num_workers
    for other in plan.scored:
        if other.label == exported.label or other.candidate.deployment.num_workers > workers:
            continue
        if not runs(other.candidate):
            continue
        for name, more_is_better in CRITERIA[plan.objective][:2]:
            if name not in other.predicted or name not in found.exported:
                continue
            theirs, ours = other.predicted[name].value, found.exported[name].value
            gain = (theirs - ours if more_is_better else ours - theirs) / max(ours, 1e-12)
            if abs(gain) > NOTICEABLE:
                return other.label if gain > 0 else ""
        return ""
    return ""


def runs_as_is(candidate: Candidate, engine: Engine) -> bool:
    """Whether an engine runs a candidate's policy without a change; EAGLE needs a head."""
    spec = candidate.speculation
    if spec.is_async or spec.kind == "eagle":
        return False
    wish = wish_of(spec, batch=1)
    return wish.is_fixed or (spec.kind == "tree" and "draft" in engine.trees)
