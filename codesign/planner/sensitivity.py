"""Which uncertain term of the fit would change the answer, and so what to profile next.

Each term is moved by its own error, all else kept. The screen's arithmetic finds the terms that
may change the choice, and the plans that may be better then; near saturation its queues grow far
faster than simulated ones. So by how much the choice would be worse is simulated, relative to the
same simulation without the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.plan import Doubt
from codesign.planner.behaviour import Behaviour, request_shares, token_shares
from codesign.planner.executor import Job
from codesign.planner.predict import Outcome
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
Simulate = Callable[[Sequence[Job]], Sequence[Outcome]]  # outcomes of jobs, in their order
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
class _Suspect:
    """A case, and the plans that would be better in it by arithmetic, the best first."""

    case: _Case
    rivals: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class _Rival:
    """A plan by its place, by how much the best one would be worse, and in which figure."""

    index: int
    regret: float
    figure: str


def find_doubts(
    ranked: Sequence[Entry], question: Question, simulate: Simulate
) -> tuple[Doubt, ...]:
    """Terms whose error would make another plan noticeably better, the worst first.

    Args:
        ranked: What was simulated on the whole trace, best first.
        question: What was asked.
        simulate: Outcomes of jobs.
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
    suspected = _suspected(plans, question)
    return _confirmed(best, suspected, question, simulate)


def requests_of_doubts(question: Question) -> int:
    """Requests to simulate for doubts: more only where a simulation clears a term's first rival."""
    return _MOST_TERMS * 2 * _end_of(question)


def _suspected(plans: Sequence[Entry], question: Question) -> list[_Suspect]:
    """The terms that are worst by arithmetic."""
    requests, recorded = question.requests, question.fit.answers
    shares, each = token_shares(requests, recorded), request_shares(requests, recorded)
    specs = list(dict.fromkeys(entry.candidate.speculation for entry in plans))
    behaviours = behaviours_of(specs, question.fit, shares, each)
    before = _figures(plans, question, question.fit, behaviours)
    found: dict[str, tuple[float, _Suspect]] = {}
    of_tokens = tokens_error(question.fit, question.requests["output_tokens"])
    for case in _cases(plans, question.fit, behaviours, of_tokens):
        after = _figures(plans, question, case.fit, case.behaviours)
        rivals = _rivals(plans, question.objective, before, after)
        if rivals and rivals[0].regret > found.get(case.term, (0.0,))[0]:
            named = [plans[rival.index] for rival in rivals[:_MOST_RIVALS]]
            found[case.term] = rivals[0].regret, _Suspect(case, named)
    worst = sorted(found.values(), key=lambda pair: -pair[0])[:_MOST_TERMS]
    return [suspect for _, suspect in worst]


def _confirmed(
    best: Entry, suspects: Sequence[_Suspect], question: Question, simulate: Simulate
) -> tuple[Doubt, ...]:
    """Doubts that a simulation agrees with: all terms at once, with one rival after another."""
    tried = _Tried(question, simulate)
    found: list[Doubt] = []
    left = list(suspects)
    for turn in range(_MOST_RIVALS):
        left = [suspect for suspect in left if turn < len(suspect.rivals)]
        pairs = [(e, s.case) for s in left for e in (best, s.rivals[turn])]
        tried.run([(e, case) for e, own in pairs for case in (None, own)])
        agreed = [_doubt(best, s.rivals[turn], s.case, question, tried) for s in left]
        found += [doubt for doubt in agreed if doubt is not None]
        left = [s for s, doubt in zip(left, agreed, strict=True) if doubt is None]
    return tuple(sorted(found, key=lambda doubt: -doubt.regret))


def _doubt(
    best: Entry, rival: Entry, case: _Case, question: Question, tried: _Tried
) -> Doubt | None:
    """What a case does to the best plan beside its rival; None if nothing that is noticeable."""
    pair = best, rival
    columns = [
        {name: np.array([figures[name] for figures in both]) for name in _SCREENED}
        for both in ([tried.figures(e, moved) for e in pair] for moved in (None, case))
        if all(name in figures for figures in both for name in _SCREENED)
    ]
    if len(columns) < 2:
        return None
    rivals = _rivals(pair, question.objective, *columns)
    if not rivals:
        return None
    return Doubt(case.term, case.change, rival.candidate.label, rivals[0].regret, rivals[0].figure)


class _Tried:
    """Simulations of plans as the fit has them and with terms moved, each made once."""

    def __init__(self, question: Question, simulate: Simulate) -> None:
        self._question, self._simulate = question, simulate
        self._end = _end_of(question)
        self._found: dict[tuple[str, str], Mapping[str, float]] = {}

    def figures(self, entry: Entry, case: _Case | None) -> Mapping[str, float]:
        """Of one that was run."""
        return self._found[_name(entry, case)]

    def run(self, wanted: Sequence[tuple[Entry, _Case | None]]) -> None:
        """Simulate those that are not known."""
        jobs: dict[tuple[str, str], Job] = {}
        for entry, case in wanted:
            if (name := _name(entry, case)) in self._found:
                continue
            if case is None and (known := self._known(entry)):
                self._found[name] = known
                continue
            costs = None if case is None else _moved(entry, case).costs
            jobs[name] = Job(entry.candidate, self._question.seed, 0, self._end, costs=costs)
        outcomes = self._simulate(list(jobs.values()))
        self._found |= {name: outcome.figures for name, outcome in zip(jobs, outcomes, strict=True)}

    def _known(self, entry: Entry) -> Mapping[str, float]:
        """Of the very simulation that the search has made, if the stretch is all of the trace."""
        question = self._question
        is_whole = self._end == len(question.requests)
        made = (o for o in entry.outcomes if is_whole and o.num_requests == self._end)
        return next((o.figures for o in made if o.seed == question.seed), {})


def _name(entry: Entry, case: _Case | None) -> tuple[str, str]:
    return entry.candidate.label, "" if case is None else case.term


def _end_of(question: Question) -> int:
    """Requests of the stretch that is simulated, the first of the trace."""
    tokens = np.cumsum(question.requests["output_tokens"])
    return max(int(np.searchsorted(tokens, _MOST_TOKENS, side="right")), 1)


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
