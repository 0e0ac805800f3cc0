"""The simulations of one search, each seed and stretch once, in the order of successive halving."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codesign import Progress
from codesign.candidate import Candidate
from codesign.planner.executor import Executor, Job
from codesign.planner.halving import (
    MOST_NEIGHBOURS,
    NEAR,
    NUM_CLIMBS,
    Rung,
    finalists,
    neighbours,
    representatives,
    rungs,
    survivors,
)
from codesign.planner.predict import Outcome, misses, score, spread_over_seeds
from codesign.planner.question import Question
from codesign.planner.ranking import Entry, may_be_best, rank
from codesign.planner.search_cache import SearchCache
from codesign.planner.sensitivity import requests_of_doubts
from codesign.planner.tally import Tally


class Simulations:
    """Simulates candidates of one question, each seed and stretch once.

    Args:
        question: What is asked.
        executor: Where simulations run.
        cache: Of those that an interrupted search has finished.
        progress: Called as ``progress(stage, requests done, requests in all)``: "simulate", and
            "simulate more" once the first were not good enough.

    Attributes:
        num_simulated: Candidates.
    """

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
        self._rungs = rungs(question.requests)
        self._tally = Tally(progress, "simulate")
        self._num_shown = 0  # of those that every table must show
        self._later = 0  # requests to simulate after this rung, as far as is known
        self._spare = 0  # and on this rung for neighbours
        self.num_simulated = 0  # candidates

    def halve(
        self,
        candidates: Sequence[Candidate],
        space: Sequence[Candidate],
        more: Callable[[], Sequence[Candidate]] = list,
    ) -> list[Entry]:
        """Candidates that came to the whole trace, best first.

        Args:
            candidates: What is simulated first.
            space: Where their neighbours are found.
            more: What is simulated as well if all of these miss the SLO by little, or do not bear
                the load that they must.
        """
        question = self._question
        left, ordered = list(candidates), []
        self.num_simulated = len(left)
        self._num_shown = len(representatives(left)) - 1  # the best is one of them
        for number, rung in enumerate(self._rungs):
            self._expect(number, len(left))
            ordered = self._ranked(left, rung, [question.seed])
            if number == 0:
                ordered = self._climbed(ordered, rung, space)
                if self._is_worth_more(ordered[0]):
                    self._tally.begin("simulate more")
                    self._spare = MOST_NEIGHBOURS * _size(rung)
                    ordered = self._climbed(self._joined(ordered, more(), rung), rung, space)
            left = survivors(ordered, rung.num_kept)
        return self._repeated(ordered)

    def _repeated(self, ordered: list[Entry]) -> list[Entry]:
        """In the order that several seeds give, of which the best have all."""
        question = self._question
        left = finalists(ordered, len(question.requests))
        seeds = range(question.seed, question.seed + question.num_seeds)
        repeated: dict[Candidate, tuple[Outcome, ...]] = {}
        while left:
            doubts = requests_of_doubts(question)
            self._tally.expect(len(left) * len(seeds) * len(question.requests) + doubts)
            again = self._ranked(left, self._rungs[-1], seeds)
            repeated |= {entry.candidate: entry.outcomes for entry in again}
            ordered = self._judged(
                [(e.candidate, repeated.get(e.candidate, e.outcomes)) for e in ordered]
            )
            # The first may owe its place to a single seed.
            left = [e.candidate for e in ordered[:1] if e.candidate not in repeated]
        return ordered

    def apart(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Outcomes of jobs at other step times or on another stretch; none is kept."""
        self._tally.expect(sum(job.num_requests for job in jobs))
        return self._run(jobs, is_kept=False)

    def end(self) -> None:
        """Nothing more will be simulated of the trace at its own rate."""
        self._tally.end()

    def _is_worth_more(self, best: Entry) -> bool:
        """Whether what the screen thought less of may be what is asked for."""
        if best.scored.is_feasible:
            return not may_be_best(best.scored, self._question.objective)
        return best.miss <= NEAR

    def _climbed(self, ordered: list[Entry], rung: Rung, space: Sequence[Candidate]) -> list[Entry]:
        """With the neighbours of the best few, and theirs if these are better."""
        for _ in range(NUM_CLIMBS):
            added = neighbours(ordered, space)
            if not added:
                break
            ordered = self._joined(ordered, added, rung)
        return ordered

    def _joined(
        self, ordered: list[Entry], candidates: Sequence[Candidate], rung: Rung
    ) -> list[Entry]:
        """With others, those of them that were not simulated before."""
        known = {entry.candidate for entry in ordered}
        added = [candidate for candidate in candidates if candidate not in known]
        self._tally.expect(max(len(added) * _size(rung), self._spare) + self._later)
        self._spare = max(self._spare - len(added) * _size(rung), 0)
        jobs = [Job(c, self._question.seed, rung.first, rung.end) for c in added]
        outcomes = [(outcome,) for outcome in self._run(jobs)]
        self.num_simulated += len(added)
        simulated = [(entry.candidate, entry.outcomes) for entry in ordered]
        return self._judged([*simulated, *zip(added, outcomes, strict=True)])

    @property
    def is_short(self) -> bool:
        """Whether every simulation is of the whole trace."""
        return len(self._rungs) == 1

    def at_rates(self, rates: Sequence[tuple[Candidate, float]]) -> list[list[Outcome]]:
        """Outcomes by seed at other arrival rates; of a long trace, on its first stretch, once.

        Not counted in the progress: what asks for them knows how far it has come.
        """
        return self._at_rates(rates, self._rungs[0])

    def at_rates_of_all(self, rates: Sequence[tuple[Candidate, float]]) -> list[list[Outcome]]:
        """The same on the whole trace."""
        return self._at_rates(rates, self._rungs[-1])

    def _at_rates(
        self, rates: Sequence[tuple[Candidate, float]], rung: Rung
    ) -> list[list[Outcome]]:
        seed, num = self._question.seed, self._question.num_seeds if self.is_short else 1
        outcomes = self._run(
            [
                Job(candidate, seed + i, rung.first, rung.end, rate)
                for candidate, rate in rates
                for i in range(num)
            ],
            is_counted=False,
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
        lengths = question.requests["output_tokens"]
        spread = spread_over_seeds([outcomes for _, outcomes in simulated])
        entries = [
            Entry(
                candidate,
                tuple(outcomes),
                score(
                    candidate,
                    outcomes,
                    question.fit,
                    question.slo,
                    output_tokens=lengths,
                    spread=spread,
                ),
                max(misses(outcomes, question.slo).values()),
            )
            for candidate, outcomes in simulated
        ]
        return rank(entries, question.objective)

    def _run(
        self, jobs: Sequence[Job], *, is_counted: bool = True, is_kept: bool = True
    ) -> list[Outcome]:
        """Outcomes of jobs, in their order; from the cache where it has them."""
        outcomes = {
            index: self._cache.get(job) if is_kept else None for index, job in enumerate(jobs)
        }
        missing = [index for index, outcome in outcomes.items() if outcome is None]
        if is_counted:
            self._tally.add(sum(jobs[i].num_requests for i in set(outcomes) - set(missing)))
        for number, outcome in self._executor.run([jobs[index] for index in missing]):
            job = jobs[missing[number]]
            outcomes[missing[number]] = outcome
            if is_kept:
                self._cache.put(job, outcome)
            if is_counted:
                self._tally.add(job.num_requests)
        return [outcome for outcome in outcomes.values() if outcome is not None]

    def _expect(self, number: int, num_candidates: int) -> None:
        """Count the requests to simulate from a stretch on, as far as is known."""
        sizes = list(map(_size, self._rungs))
        kept = [rung.num_kept + self._num_shown for rung in self._rungs]
        if not self.is_short:
            kept[-1] = self._rungs[-1].num_kept + 1  # the best without a draft
        kept[-1] += 1  # one that comes first only then
        later = sum(
            size * num for size, num in zip(sizes[number + 1 :], kept[number:], strict=False)
        )
        repeats = self._question.num_seeds * kept[-1] * sizes[-1]  # the first seed's are at hand
        self._later = later + repeats + requests_of_doubts(self._question)
        self._spare = 0 if number else MOST_NEIGHBOURS * sizes[0]
        self._tally.expect(num_candidates * sizes[number] + self._spare + self._later)


def _size(rung: Rung) -> int:
    return rung.end - rung.first
