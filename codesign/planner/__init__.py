"""The search for the best plan: rough screen, simulation on the trace, ranking, nearest miss.

All candidates are simulated on the same requests with the same seeds, so that they see the same
luck and small differences count. Imports no torch; prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import SLO, Serving
from codesign.errors import InfeasibleError
from codesign.plan import Doubt, Economics
from codesign.planner.economics import weigh_speculation
from codesign.planner.executor import Executor, Job, LocalExecutor, Task
from codesign.planner.halving import (
    COMPARED,
    NUM_CLIMBS,
    Rung,
    entering,
    finalists,
    neighbours,
    rungs,
    survivors,
)
from codesign.planner.nearest_miss import nearest_miss
from codesign.planner.predict import (
    Outcome,
    extrapolation_note,
    misses,
    prompt_note,
    score,
    spread_over_seeds,
)
from codesign.planner.ranking import Entry, explain, explain_runner_up, find_ties, rank
from codesign.planner.screen import screen
from codesign.planner.search_cache import SearchCache
from codesign.planner.search_space import search_space
from codesign.planner.sensitivity import find_doubts

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

__all__ = ["COMPARED", "NUM_SEEDS", "Answer", "Question", "search", "task_of"]

Progress = Callable[[str, int, int], None]

NUM_SEEDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is asked of the planner.

    Attributes:
        requests: Prepared trace: arrival (s), prompt_tokens, output_tokens, category.
        fit: Step times and acceptance of the machine.
        slo: Targets.
        serving: How memory and steps are shared; without a limit of KV rows the fit must say.
        objective: "goodput": most requests per second that meet the SLO, then the shortest
            latency; "latency": lowest mean TPOT; "fewest": as goodput, for ``fewest``.
        workers: Workers of the machine.
        max_batch: Largest batch limit of a replica to try.
        policies: Labels that the search is restricted to; empty for all.
        seed: First seed.
        num_seeds: Simulations of each finalist.
    """

    requests: pd.DataFrame
    fit: Fit
    slo: SLO
    serving: Serving
    objective: str = "goodput"
    workers: int = 1
    max_batch: int = 8
    policies: tuple[str, ...] = ()
    seed: int = 0
    num_seeds: int = NUM_SEEDS


@dataclass(frozen=True, slots=True)
class Answer:
    """What the search found.

    Attributes:
        ranked: What was simulated on the whole trace, best first; the first meets the SLO.
        ties: Labels of those that the prediction cannot tell from the first.
        reason: Why the first.
        runner_up: Why the second one lost.
        economics: Whether speculation pays; None if nothing could be compared.
        doubts: Terms of the fit whose error would change the choice.
        notes: What a reader must know.
        num_candidates: Size of the search space.
        num_simulated: Candidates simulated on the trace or a stretch of it.
        num_feasible: Those of ``ranked`` that meet the SLO.
        screen_seconds: Wall time of the screen; no part of the answer's equality.
    """

    ranked: tuple[ScoredCandidate, ...]
    ties: tuple[str, ...]
    reason: str
    runner_up: str
    economics: Economics | None
    doubts: tuple[Doubt, ...]
    notes: tuple[str, ...]
    num_candidates: int
    num_simulated: int
    num_feasible: int
    screen_seconds: float = field(default=0.0, compare=False)

    @property
    def chosen(self) -> ScoredCandidate:
        """The best plan."""
        return self.ranked[0]


def task_of(question: Question) -> Task:
    """What an executor has to know of a question."""
    return Task(question.requests, question.fit, question.slo, question.serving)


def search(
    question: Question,
    *,
    executor: Executor | None = None,
    cache: SearchCache | None = None,
    progress: Progress | None = None,
    least_attained: float = 0.0,
) -> Answer:
    """Find the best plan. The same question gets the same answer, whatever executes it.

    Args:
        question: What is asked.
        executor: Runs the simulations (see ``open_executor``), entered by the caller; in this
            process by default.
        cache: Keeps finished simulations, so that an interrupted search can go on.
        progress: Called with (stage, done, total): "screen", in candidates, and "simulate", in
            requests.
        least_attained: Share of requests within the SLO that the screen must find of some
            candidate, for any to be simulated.

    Raises:
        InfeasibleError: If nothing meets the SLO; the message names the nearest miss, the target
            that binds, and what would fit.
        InputError: If the fit does not cover the machine or a request does not fit the KV limit.
    """
    requests = question.requests
    start = time.monotonic()
    space = search_space(
        question.fit.costs,
        workers=question.workers,
        max_batch=question.max_batch,
        policies=question.policies,
        serving=question.serving,
        requests=requests,
        origin=question.fit.origin,
    )
    screened = screen(
        space.candidates,
        requests,
        question.fit,
        slo=question.slo,
        serving=question.serving,
        progress=progress,
    )
    if screened.attained.max() < least_attained:
        raise InfeasibleError("no plan is worth simulating: the screen finds all too far off")
    first = [
        space.candidates[index]
        for index in entering(screened, question.objective, question.slo.percentile, len(requests))
    ]
    screen_seconds = time.monotonic() - start
    if executor is None:
        executor = LocalExecutor(task_of(question))  # of one process: nothing to close
    if cache is None:
        cache = SearchCache("")
    simulations = _Simulations(question, executor, cache, progress)
    ordered = simulations.halve(first, space.candidates)
    best = ordered[0]
    if not best.scored.is_feasible:
        raise InfeasibleError(nearest_miss(ordered, question.slo, simulations.at_rates))
    ranked = tuple(entry.scored for entry in ordered)
    beyond = (
        extrapolation_note(best.candidate, best.outcomes, question.fit),
        prompt_note(question.fit, requests),
    )
    return Answer(
        ranked=ranked,
        ties=find_ties(ranked, question.objective),
        reason=explain(ranked, question.slo),
        runner_up=explain_runner_up(ranked, question.objective),
        economics=weigh_speculation(ranked, question),
        doubts=find_doubts(ranked, question),
        notes=(*space.notes, *filter(None, beyond)),
        num_candidates=len(space.candidates),
        num_simulated=simulations.num_simulated,
        num_feasible=sum(scored.is_feasible for scored in ranked),
        screen_seconds=screen_seconds,
    )


class _Simulations:
    """Simulates candidates of one question, each seed and stretch once."""

    def __init__(
        self,
        question: Question,
        executor: Executor,
        cache: SearchCache,
        progress: Progress | None,
    ) -> None:
        self._question = question
        self._executor = executor
        self._cache = cache
        self._progress = progress
        self._rungs = rungs(question.requests)
        self.num_simulated = 0  # candidates
        self._done = 0  # requests simulated
        self._total = 0  # requests to simulate, as far as is known

    def halve(self, candidates: Sequence[Candidate], space: Sequence[Candidate]) -> list[Entry]:
        """Candidates that came to the whole trace, best first.

        Args:
            candidates: What is simulated first.
            space: Where their neighbours are found.
        """
        question = self._question
        left, ordered = list(candidates), []
        self.num_simulated = len(left)
        for number, rung in enumerate(self._rungs):
            self._expect(rung, len(left))
            ordered = self._ranked(left, rung, [question.seed])
            if number == 0:
                ordered = self._climbed(ordered, rung, space)
            left = survivors(ordered, rung.num_kept)
        left = finalists(ordered, len(question.requests))
        seeds = range(question.seed, question.seed + question.num_seeds)
        repeated = {e.candidate: e for e in self._ranked(left, self._rungs[-1], seeds)}
        return self._judged([(e.candidate, repeated.get(e.candidate, e).outcomes) for e in ordered])

    def _climbed(self, ordered: list[Entry], rung: Rung, space: Sequence[Candidate]) -> list[Entry]:
        """With the neighbours of the best few, and theirs if these are better."""
        for _ in range(NUM_CLIMBS):
            added = neighbours(ordered, space)
            if not added:
                break
            self._total += len(added) * (rung.end - rung.first)
            jobs = [Job(c, self._question.seed, rung.first, rung.end) for c in added]
            outcomes = [(outcome,) for outcome in self._run(jobs)]
            known = [(entry.candidate, entry.outcomes) for entry in ordered]
            ordered = self._judged([*known, *zip(added, outcomes, strict=True)])
            self.num_simulated += len(added)
        return ordered

    def at_rates(self, rates: Sequence[tuple[Candidate, float]]) -> list[list[Outcome]]:
        """Outcomes by seed at other arrival rates; of a long trace, on its first stretch, once."""
        rung, seed = self._rungs[0], self._question.seed
        num = self._question.num_seeds if len(self._rungs) == 1 else 1
        outcomes = self._run(
            [
                Job(candidate, seed + i, rung.first, rung.end, rate)
                for candidate, rate in rates
                for i in range(num)
            ]
        )
        return [outcomes[i * num : (i + 1) * num] for i in range(len(rates))]

    def _ranked(
        self, candidates: Sequence[Candidate], rung: Rung, seeds: Sequence[int]
    ) -> list[Entry]:
        outcomes = self._run(
            [Job(c, seed, rung.first, rung.end) for c in candidates for seed in seeds]
        )
        num = len(seeds)
        return self._judged(
            [(c, outcomes[i * num : (i + 1) * num]) for i, c in enumerate(candidates)]
        )

    def _judged(self, simulated: Sequence[tuple[Candidate, Sequence[Outcome]]]) -> list[Entry]:
        """Entries in order; what was simulated once has the spread of what was repeated."""
        question = self._question
        spread = spread_over_seeds([outcomes for _, outcomes in simulated])
        entries = [
            Entry(
                candidate,
                tuple(outcomes),
                score(candidate, outcomes, question.fit, question.slo, spread=spread),
                max(misses(outcomes, question.slo).values()),
            )
            for candidate, outcomes in simulated
        ]
        return rank(entries, question.objective)

    def _run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Outcomes of jobs, in their order; from the cache where it has them."""
        outcomes = {index: self._cache.get(job) for index, job in enumerate(jobs)}
        missing = [index for index, outcome in outcomes.items() if outcome is None]
        self._report(sum(job.num_requests for job in jobs) - _size(jobs, missing))
        for number, outcome in self._executor.run([jobs[index] for index in missing]):
            job = jobs[missing[number]]
            outcomes[missing[number]] = outcome
            self._cache.put(job, outcome)
            self._report(job.num_requests)
        return [outcome for outcome in outcomes.values() if outcome is not None]

    def _expect(self, rung: Rung, num_candidates: int) -> None:
        """Count the requests to simulate from a stretch on, as far as is known."""
        left = self._rungs[self._rungs.index(rung) :]
        sizes = [r.end - r.first for r in left]
        kept = [num_candidates, *(r.num_kept for r in left)]
        repeats = (self._question.num_seeds - 1) * kept[-1] * sizes[-1]
        expected = sum(size * count for size, count in zip(sizes, kept[:-1], strict=True))
        self._total = self._done + expected + repeats

    def _report(self, num_requests: int) -> None:
        self._done += num_requests
        if self._progress and num_requests:
            self._progress("simulate", self._done, max(self._total, self._done))


def _size(jobs: Sequence[Job], indices: Sequence[int]) -> int:
    return sum(jobs[index].num_requests for index in indices)
