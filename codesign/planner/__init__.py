"""The search for the best plan: rough screen, simulation on the trace, ranking, nearest miss.

All candidates are simulated on the same requests with the same seeds, so that they see the same
luck and small differences count. Imports no torch; prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codesign.config import SLO
from codesign.errors import InfeasibleError
from codesign.plan import Candidate, ScoredCandidate
from codesign.planner.predict import (
    Outcome,
    check_fits,
    extrapolation_note,
    misses,
    score,
    simulate_outcome,
)
from codesign.planner.ranking import Entry, explain, find_ties, rank
from codesign.planner.screen import Screened, screen
from codesign.planner.search_cache import SearchCache
from codesign.planner.search_space import search_space
from codesign.policy.speculation import SpeculationSpec

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

Progress = Callable[[str, int, int], None]

DEFAULT_MAX_KV_TOKENS = 4096
NUM_SEEDS = 3
_NUM_SIMULATED = 20  # best of the screen
_NUM_FINALISTS = 6  # simulated with all seeds, besides the best of each family
_MAX_LIMITS = 2  # batch limits per policy and split among the best of the screen
COMPARED = (SpeculationSpec(), SpeculationSpec(kind="chain", max_depth=3))  # always in the table
_NUM_NEAREST = 3  # candidates whose sustainable rate is looked for if nothing fits
_MAX_HALVINGS = 10  # of the rate, until the machine counts as idle
_NUM_BISECTIONS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is asked of the planner.

    Attributes:
        requests: Prepared trace: arrival (s), prompt_tokens, output_tokens, category.
        fit: Step times and acceptance of the machine.
        slo: Targets.
        objective: "goodput": most requests per second that meet the SLO, then the shortest
            latency; "latency": lowest mean TPOT.
        workers: Workers of the machine.
        max_batch: Largest batch limit to try.
        policies: Labels that the search is restricted to; empty for all.
        max_kv_tokens: KV rows of all running requests together.
        seed: First seed.
        num_seeds: Simulations of each finalist.
    """

    requests: pd.DataFrame
    fit: Fit
    slo: SLO
    objective: str = "goodput"
    workers: int = 1
    max_batch: int = 8
    policies: tuple[str, ...] = ()
    max_kv_tokens: int = DEFAULT_MAX_KV_TOKENS
    seed: int = 0
    num_seeds: int = NUM_SEEDS


@dataclass(frozen=True, slots=True)
class Answer:
    """What the search found.

    Attributes:
        ranked: Finalists, best first; the first meets the SLO.
        ties: Labels of those that the prediction cannot tell from the first.
        reason: Why the first.
        notes: What a reader must know.
        num_candidates: Size of the search space.
        num_simulated: Candidates simulated on the trace.
        num_feasible: Those of them that meet the SLO.
    """

    ranked: tuple[ScoredCandidate, ...]
    ties: tuple[str, ...]
    reason: str
    notes: tuple[str, ...]
    num_candidates: int
    num_simulated: int
    num_feasible: int

    @property
    def chosen(self) -> ScoredCandidate:
        """The best plan."""
        return self.ranked[0]


def search(
    question: Question, *, cache: SearchCache | None = None, progress: Progress | None = None
) -> Answer:
    """Find the best plan.

    Args:
        question: What is asked.
        cache: Keeps finished simulations, so that an interrupted search can go on.
        progress: Called with (stage, done, total); stages "screen", "simulate", "repeat".

    Raises:
        InfeasibleError: If nothing meets the SLO; the message names the nearest miss, the target
            that binds, and what would fit.
        InputError: If the fit does not cover the machine or a request does not fit the KV limit.
    """
    cache = SearchCache("") if cache is None else cache  # an empty one is falsy
    candidates, notes = search_space(
        question.fit.costs,
        workers=question.workers,
        max_batch=question.max_batch,
        policies=question.policies,
    )
    most_rows = max(candidate.speculation.max_rows for candidate in candidates)
    check_fits(question.requests, question.max_kv_tokens, most_rows)
    screened = screen(
        candidates,
        question.requests,
        question.fit,
        objective=question.objective,
        seed=question.seed,
        progress=progress,
    )
    simulations = _Simulations(question, cache, progress)
    first = simulations.run("simulate", shortlist(screened), [question.seed])
    ordered = rank(first, question.objective)
    if not ordered[0].scored.is_feasible:
        raise InfeasibleError(simulations.nearest_miss(ordered))
    seeds = range(question.seed, question.seed + question.num_seeds)
    finalists = [entry.candidate for entry in _finalists(ordered)]
    ordered = rank(simulations.run("repeat", finalists, seeds), question.objective)
    best = ordered[0]
    if not best.scored.is_feasible:
        raise InfeasibleError(simulations.nearest_miss(ordered))
    note = extrapolation_note(best.candidate, best.outcomes, question.fit)
    return Answer(
        ranked=tuple(entry.scored for entry in ordered),
        ties=find_ties([entry.scored for entry in ordered], question.objective),
        reason=explain([entry.scored for entry in ordered], question.slo),
        notes=(*notes, *([note] if note else [])),
        num_candidates=len(candidates),
        num_simulated=len(first),
        num_feasible=sum(entry.scored.is_feasible for entry in first),
    )


class _Simulations:
    """Simulates candidates of one question, each seed once."""

    def __init__(self, question: Question, cache: SearchCache, progress: Progress | None) -> None:
        self._question = question
        self._cache = cache
        self._progress = progress

    def run(self, stage: str, candidates: Sequence[Candidate], seeds: Iterable[int]) -> list[Entry]:
        """Entries of all candidates."""
        entries = []
        for done, candidate in enumerate(candidates, start=1):
            entries.append(self.entry(candidate, [self._outcome(candidate, s) for s in seeds]))
            if self._progress:
                self._progress(stage, done, len(candidates))
        return entries

    def entry(self, candidate: Candidate, outcomes: Sequence[Outcome]) -> Entry:
        """Combine the outcomes of one candidate."""
        question = self._question
        scored = score(candidate, outcomes, question.fit, question.slo)
        miss = max(misses(outcomes, question.slo).values())
        return Entry(candidate, tuple(outcomes), scored, miss)

    def _outcome(self, candidate: Candidate, seed: int) -> Outcome:
        outcome = self._cache.get(candidate, seed)
        if outcome is None:
            outcome = self.simulate(candidate, self._question.requests, seed)
            self._cache.put(outcome)
        return outcome

    def simulate(self, candidate: Candidate, requests: pd.DataFrame, seed: int) -> Outcome:
        """One simulation."""
        return simulate_outcome(
            requests,
            candidate,
            self._question.fit,
            slo=self._question.slo,
            max_kv_tokens=self._question.max_kv_tokens,
            seed=seed,
        )[0]

    def nearest_miss(self, ordered: Sequence[Entry]) -> str:
        """One line: which candidate comes nearest, what binds, what would fit."""
        nearest = min(ordered, key=lambda entry: entry.miss)
        slo = self._question.slo
        by_target = misses(nearest.outcomes, slo)
        target = max(by_target, key=by_target.__getitem__)
        line = (
            f"none of {len(ordered)} simulated plans meets the SLO. Nearest miss: "
            f"{nearest.candidate.label}: {_shown(target, slo, by_target[target])}"
        )
        likely = {entry.candidate.label: entry for entry in (nearest, *ordered[:_NUM_NEAREST])}
        rates = [(self._sustained_rate(entry), entry) for entry in likely.values()]
        rate, fitting = max(rates, key=lambda pair: pair[0])
        if rate > 0:
            plan = "it" if fitting is nearest else fitting.candidate.label
            return f"{line}. At {rate:.2g} times this arrival rate {plan} fits (--rate-scale)"
        idle = misses([self._at_rate(nearest.candidate, 0.5**_MAX_HALVINGS)], slo)
        flags = [
            f"--slo-{name}-ms {math.ceil(1050 * ratio * (getattr(slo, name) or 0.0))}"
            for name, ratio in idle.items()
            if 1 < ratio < math.inf
        ]
        if not flags:
            return f"{line}. An idle machine never reaches it. Shorter answers may: --max-output N"
        return f"{line}. An idle machine misses it too; it would meet {' '.join(flags)}"

    def _at_rate(self, candidate: Candidate, factor: float) -> Outcome:
        requests = self._question.requests
        slower = requests.assign(arrival=requests["arrival"] / factor)
        return self.simulate(candidate, slower, self._question.seed)

    def _sustained_rate(self, entry: Entry) -> float:
        """Largest share of the trace's rate at which a candidate meets the SLO, 0 if none."""

        def fits(factor: float) -> bool:
            outcome = self._at_rate(entry.candidate, factor)
            return max(misses([outcome], self._question.slo).values()) <= 1

        low = next((0.5**i for i in range(1, _MAX_HALVINGS + 1) if fits(0.5**i)), 0.0)
        high = 2 * low
        for _ in range(_NUM_BISECTIONS if low else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return _rounded_down(low)


def shortlist(screened: Sequence[Screened]) -> list[Candidate]:
    """Candidates worth simulating: the best of the screen, and what every table must show.

    That is the best of each family and of the policies that are always compared.
    """
    chosen: dict[str, Candidate] = {}
    limits: dict[tuple[str, str], int] = {}
    for entry in screened:
        candidate = entry.candidate
        kind = candidate.speculation.label, candidate.deployment.label
        limits[kind] = limits.get(kind, 0) + 1
        if len(chosen) < _NUM_SIMULATED and limits[kind] <= _MAX_LIMITS:
            chosen[candidate.label] = candidate
    for candidate in _representatives([entry.candidate for entry in screened]):
        chosen.setdefault(candidate.label, candidate)
    return list(chosen.values())


def _finalists(ordered: Sequence[Entry]) -> list[Entry]:
    """The first few, the best of each family and of the policies that are always compared.

    Of a policy on a split, only its best batch limit.
    """
    best: dict[tuple[str, str], Entry] = {}
    for entry in ordered:
        candidate = entry.candidate
        best.setdefault((candidate.speculation.label, candidate.deployment.label), entry)
    first = [entry.candidate.label for entry in list(best.values())[:_NUM_FINALISTS]]
    wanted = {*first, *(c.label for c in _representatives([e.candidate for e in ordered]))}
    return [entry for entry in ordered if entry.candidate.label in wanted]


def _representatives(ordered: Sequence[Candidate]) -> list[Candidate]:
    """The first of each family and of each policy in COMPARED."""
    found: dict[object, Candidate] = {}
    for candidate in ordered:
        found.setdefault(candidate.family, candidate)
        if candidate.speculation in COMPARED:
            found.setdefault(candidate.speculation, candidate)
    return list(found.values())


def _rounded_down(rate: float) -> float:
    """To the two digits that are printed, never up: the printed rate must fit as well."""
    if rate <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.floor(rate / step) * step


def _shown(target: str, slo: SLO, ratio: float) -> str:
    limit = getattr(slo, target)
    name = f"{target.upper()} p{slo.percentile:g}"
    if not math.isfinite(ratio):
        return f"{name} is never reached, target {1000 * limit:g} ms"
    return (
        f"{name} {1000 * limit * ratio:,.0f} ms, target {1000 * limit:g} ms ({ratio - 1:.0%} over)"
    )
