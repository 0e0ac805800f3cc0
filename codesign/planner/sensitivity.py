"""Which uncertain term of the fit would change the answer, and so what to profile next.

Each term is moved by its own error, all else kept. What that does to a plan is taken from the
screen's arithmetic, relative to what the screen says without it, so that the simulated figures
stand and only their change is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.plan import Doubt
from codesign.planner.behaviour import Behaviour, token_shares
from codesign.planner.ranking import CRITERIA, NOTICEABLE, Entry
from codesign.planner.saturation import OVERLOADED
from codesign.planner.screen import behaviours_of, screen
from codesign.planner.uncertainty import tokens_error
from codesign.policy.speculation import SpeculationSpec

if TYPE_CHECKING:
    from codesign.fit import Fit
    from codesign.planner.question import Question

_MOST_PLANS = 16  # the best, that are weighed against each other
_OPS = {"target": "target step", "draft": "draft step", "prefill": "prompt step"}
_SCREENED = {"goodput": "goodput", "latency_mean": "latency", "tpot_mean": "tpot"}
Behaviours = Mapping[SpeculationSpec, tuple[Behaviour, ...]]


@dataclass(frozen=True, slots=True)
class _Case:
    """A fit and behaviours with one term moved."""

    term: str
    change: float
    fit: Fit
    behaviours: Behaviours


def find_doubts(ranked: Sequence[Entry], question: Question) -> tuple[Doubt, ...]:
    """Terms whose error would make another plan noticeably better, the worst first.

    Args:
        ranked: What was simulated on the whole trace, best first.
        question: What was asked.
    """
    criteria = [name for name, _ in CRITERIA[question.objective][:2]]
    best = ranked[0]
    plans = [
        entry
        for entry in ranked
        if entry.scored.is_feasible and all(best.beside(entry, name) for name in criteria)
    ]
    plans = plans[:_MOST_PLANS]
    if len(plans) < 2 or plans[0] is not best or best.scored.saturation == OVERLOADED:
        return ()  # of an endless queue the screen's arithmetic knows nothing
    shares = token_shares(question.requests, question.fit.answers)
    specs = list(dict.fromkeys(entry.candidate.speculation for entry in plans))
    behaviours = behaviours_of(specs, question.fit, shares)
    before = _figures(plans, question, question.fit, behaviours)
    doubts: dict[str, Doubt] = {}
    of_tokens = tokens_error(question.fit, question.requests["output_tokens"])
    for case in _cases(plans, question.fit, behaviours, of_tokens):
        after = _figures(plans, question, case.fit, case.behaviours)
        rival, regret = _best_rival(plans, question.objective, before, after)
        known = doubts.get(case.term)
        if regret > NOTICEABLE and (known is None or regret > known.regret):
            label = plans[rival].candidate.label
            doubts[case.term] = Doubt(case.term, case.change, label, regret)
    return tuple(sorted(doubts.values(), key=lambda doubt: -doubt.regret))


def _figures(
    plans: Sequence[Entry], question: Question, fit: Fit, behaviours: Behaviours
) -> dict[str, NDArray[np.float64]]:
    """Per figure that decides, the screen's score of each plan."""
    screened = screen(
        [entry.candidate for entry in plans],
        question.requests,
        fit,
        slo=question.slo,
        serving=question.serving,
        behaviours=behaviours,
    )
    return {name: getattr(screened, column) for name, column in _SCREENED.items()}


def _cases(
    plans: Sequence[Entry], fit: Fit, behaviours: Behaviours, of_tokens: float
) -> Iterator[_Case]:
    """Every term that has an error, moved up and down by it."""
    deployments = [entry.candidate.deployment for entry in plans]
    labels = [d.unit.label for d in deployments]
    labels += [str(d.prefill_workers) for d in deployments if d.prefill_workers]
    for label in dict.fromkeys(labels):
        for op, words in _OPS.items():
            error = fit.errors.get(f"{label}/{op}", 0.0)
            for change in (error, -error) if error else ():
                cost = fit.costs[label]
                cost = replace(cost, **{op: getattr(cost, op).scaled(1.0 + change)})
                moved = replace(fit, costs={**fit.costs, label: cost})
                yield _Case(f"{words} of {label}", change, moved, behaviours)
    for change in (of_tokens, -of_tokens) if of_tokens else ():
        moved = {
            spec: tuple(replace(b, emitted=_emitted(b, change)) for b in options)
            for spec, options in behaviours.items()
        }
        yield _Case("tokens per round", change, fit, moved)


def _emitted(behaviour: Behaviour, change: float) -> float:
    """Tokens per round with an error; plain decoding has none."""
    if behaviour.rows <= 1.0:
        return behaviour.emitted
    return max(behaviour.emitted * (1.0 + change), 1.0)


def _best_rival(
    plans: Sequence[Entry],
    objective: str,
    before: Mapping[str, NDArray[np.float64]],
    after: Mapping[str, NDArray[np.float64]],
) -> tuple[int, float]:
    """The plan that the first one loses most to, and by how much; (0, 0.0) if to none."""

    def moved(index: int, figure: str) -> float:
        return float(after[figure][index] / max(float(before[figure][index]), 1e-12))

    found = 0, 0.0
    for index in range(1, len(plans)):
        for figure, more_is_better in CRITERIA[objective][:2]:
            pair = plans[0].beside(plans[index], figure)
            assert pair is not None, "find_doubts leaves others out"
            ours, theirs = pair[0] * moved(0, figure), pair[1] * moved(index, figure)
            worse = (theirs - ours if more_is_better else ours - theirs) / max(abs(ours), 1e-12)
            if abs(worse) > NOTICEABLE:
                found = max(found, (index, worse), key=lambda pair: pair[1])
                break
    return found
