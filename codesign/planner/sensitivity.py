"""Which uncertain term of the fit would change the answer, and so what to profile next.

Each term is moved by its own error, all else kept. The screen's arithmetic finds the terms that
may change the choice, and the plans that may be better then; near saturation its queues grow far
faster than simulated ones. So by how much the choice would be worse is simulated, relative to the
same simulation without the change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign import Progress
from codesign.plan import Doubt
from codesign.planner.behaviour import Behaviour, token_shares
from codesign.planner.executor import Job, Task, run_job
from codesign.planner.ranking import CRITERIA, NOTICEABLE, Entry, may_be_best
from codesign.planner.saturation import OVERLOADED
from codesign.planner.screen import behaviours_of, screen
from codesign.planner.uncertainty import tokens_error
from codesign.policy.cost import RoundCost
from codesign.policy.speculation import SpeculationSpec

if TYPE_CHECKING:
    from codesign.fit import Fit
    from codesign.planner.question import Question

_MOST_PLANS = 16  # the best, that are weighed against each other
_MOST_TERMS = 4  # that are simulated, the worst by arithmetic
_MOST_RIVALS = 3  # of each term, one after another until a simulation agrees, the best first
_MOST_TOKENS = 200_000  # output tokens of the stretch that is simulated for them
_OPS = {"target": "target step", "draft": "draft step", "prefill": "prompt step"}
_TOKENS = "tokens per round"
_SCREENED = {"goodput": "goodput", "latency_mean": "latency", "tpot_mean": "tpot"}
Behaviours = Mapping[SpeculationSpec, tuple[Behaviour, ...]]
Figures = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class _Case:
    """A fit and behaviours with one term moved."""

    term: str
    change: float
    fit: Fit
    behaviours: Behaviours


@dataclass(frozen=True, slots=True)
class _Rival:
    """A plan by its place, by how much the best one would be worse, and in which figure."""

    index: int
    regret: float
    figure: str


def find_doubts(
    ranked: Sequence[Entry], question: Question, *, progress: Progress | None = None
) -> tuple[Doubt, ...]:
    """Terms whose error would make another plan noticeably better, the worst first.

    Args:
        ranked: What was simulated on the whole trace, best first.
        question: What was asked.
        progress: Called with ("check doubts", done, total), in terms.
    """
    criteria = [name for name, _ in CRITERIA[question.objective][:2]]
    best = ranked[0]
    plans = [
        entry
        for entry in ranked
        if entry.scored.is_feasible
        and may_be_best(entry.scored, question.objective)
        and all(best.beside(entry, name) for name in criteria)
    ]
    plans = plans[:_MOST_PLANS]
    if len(plans) < 2 or plans[0] is not best or best.scored.saturation == OVERLOADED:
        return ()  # of an endless queue the screen's arithmetic knows nothing
    shares = token_shares(question.requests, question.fit.answers)
    specs = list(dict.fromkeys(entry.candidate.speculation for entry in plans))
    behaviours = behaviours_of(specs, question.fit, shares)
    before = _figures(plans, question, question.fit, behaviours)
    doubts: dict[str, tuple[float, list[Entry], _Case]] = {}
    of_tokens = tokens_error(question.fit, question.requests["output_tokens"])
    for case in _cases(plans, question.fit, behaviours, of_tokens):
        after = _figures(plans, question, case.fit, case.behaviours)
        rivals = _rivals(plans, question.objective, before, after)
        if rivals and rivals[0].regret > doubts.get(case.term, (0.0,))[0]:
            doubts[case.term] = rivals[0].regret, [plans[r.index] for r in rivals], case
    worst = sorted(doubts.values(), key=lambda doubt: -doubt[0])[:_MOST_TERMS]
    found = []
    for number, (_, rivals, case) in enumerate(worst, 1):
        simulated = (_simulated(best, rival, case, question) for rival in rivals[:_MOST_RIVALS])
        if (doubt := next((d for d in simulated if d is not None), None)) is not None:
            found.append(doubt)
        if progress is not None:
            progress("check doubts", number, len(worst))
    return tuple(sorted(found, key=lambda doubt: -doubt.regret))


def _simulated(best: Entry, rival: Entry, case: _Case, question: Question) -> Doubt | None:
    """What a case does to the best plan beside its rival; None if nothing that is noticeable."""
    pair = best, rival
    before = [_simulation(entry, question, question.fit) for entry in pair]
    after = [_simulation(entry, question, _moved(entry, case)) for entry in pair]
    columns = [
        {name: np.array([figures[name] for figures in both]) for name in _SCREENED}
        for both in (before, after)
        if all(name in figures for figures in both for name in _SCREENED)
    ]
    if len(columns) < 2:
        return None
    rivals = _rivals(pair, question.objective, *columns)
    if not rivals:
        return None
    return Doubt(case.term, case.change, rival.candidate.label, rivals[0].regret, rivals[0].figure)


def _simulation(entry: Entry, question: Question, fit: Fit) -> dict[str, float]:
    """Figures of a plan on the first stretch of the trace."""
    tokens = np.cumsum(question.requests["output_tokens"])
    end = max(int(np.searchsorted(tokens, _MOST_TOKENS, side="right")), 1)
    task = Task(question.requests, fit, question.slo, question.serving)
    return run_job(task, Job(entry.candidate, question.seed, 0, end)).figures


def _moved(entry: Entry, case: _Case) -> Fit:
    """A case's fit; where rounds emit more or fewer tokens, with shorter or longer rounds."""
    if case.term != _TOKENS or not entry.candidate.speculation.has_draft:
        return case.fit
    lengths = entry.values("acceptance_length").values()
    length = sum(lengths) / max(len(lengths), 1) or 1.0
    factor = length / max(length * (1.0 + case.change), 1.0)
    costs = {
        label: _scaled(_scaled(cost, "target", factor), "draft", factor)
        for label, cost in case.fit.costs.items()
    }
    return replace(case.fit, costs=costs)


def _figures(
    plans: Sequence[Entry], question: Question, fit: Fit, behaviours: Behaviours
) -> Figures:
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
                cost = _scaled(fit.costs[label], op, 1.0 + change)
                moved = replace(fit, costs={**fit.costs, label: cost})
                yield _Case(f"{words} of {label}", change, moved, behaviours)
    for change in (of_tokens, -of_tokens) if of_tokens else ():
        moved = {
            spec: tuple(replace(b, emitted=_emitted(b, change)) for b in options)
            for spec, options in behaviours.items()
        }
        yield _Case(_TOKENS, change, fit, moved)


def _scaled(cost: RoundCost, op: str, factor: float) -> RoundCost:
    """A cost with longer or shorter forwards of one kind, a draft's with its rows' children."""
    child = cost.child * factor if op == "draft" else cost.child
    return replace(cost, **{op: getattr(cost, op).scaled(factor)}, child=child)


def _emitted(behaviour: Behaviour, change: float) -> float:
    """Tokens per round with an error; plain decoding has none."""
    if behaviour.rows <= 1.0:
        return behaviour.emitted
    return max(behaviour.emitted * (1.0 + change), 1.0)


def _rivals(
    plans: Sequence[Entry],
    objective: str,
    before: Figures,
    after: Figures,
) -> list[_Rival]:
    """The plans that the first one noticeably loses to, the one that it loses most to first."""

    def moved(index: int, figure: str) -> float:
        return float(after[figure][index] / max(float(before[figure][index]), 1e-12))

    found = []
    for index in range(1, len(plans)):
        for figure, more_is_better in CRITERIA[objective][:2]:
            pair = plans[0].beside(plans[index], figure)
            assert pair is not None, "find_doubts leaves others out"
            ours, theirs = pair[0] * moved(0, figure), pair[1] * moved(index, figure)
            worse = (theirs - ours if more_is_better else ours - theirs) / max(abs(ours), 1e-12)
            if abs(worse) > NOTICEABLE:
                found += [_Rival(index, worse, figure)] if worse > 0.0 else []
                break
    return sorted(found, key=lambda rival: -rival.regret)
