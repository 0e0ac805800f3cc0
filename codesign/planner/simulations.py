"""The simulations of one search, each seed and stretch once, in the order of successive halving."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codesign import Progress
from codesign.candidate import Candidate
from codesign.planner.executor import Executor, Job
from codesign.planner.halving import (
    NEAR,
    NUM_CLIMBS,
    Rung,
    finalists,
    neighbours,
    rungs,
    survivors,
)
from codesign.planner.predict import Outcome, misses, score, spread_over_seeds
from codesign.planner.question import Question
from codesign.planner.ranking import Entry, may_be_best, rank
from codesign.planner.search_cache import SearchCache


class Simulations:
    """Simulates candidates of one question, each seed and stretch once.

    Args:
        question: What is asked.
        executor: Where simulations run.
        cache: Of those that an interrupted search has finished.
        progress: Called as ``progress("simulate", requests done, requests in all)``.

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
        self._progress = progress
        self._rungs = rungs(question.requests)
        self.num_simulated = 0  # candidates
        self._done = 0  # requests simulated
        self._total = 0  # requests to simulate, as far as is known

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
        for number, rung in enumerate(self._rungs):
            self._expect(rung, len(left))
            ordered = self._ranked(left, rung, [question.seed])
            if number == 0:
                ordered = self._climbed(ordered, rung, space)
                if self._is_worth_more(ordered[0]):
                    ordered = self._climbed(self._joined(ordered, more(), rung), rung, space)
            left = survivors(ordered, rung.num_kept)
        left = finalists(ordered, len(question.requests))
        seeds = range(question.seed, question.seed + question.num_seeds)
        repeated: dict[Candidate, tuple[Outcome, ...]] = {}
        while left:
            self._total = self._done + len(left) * len(seeds) * len(question.requests)
            again = self._ranked(left, self._rungs[-1], seeds)
            repeated |= {entry.candidate: entry.outcomes for entry in again}
            ordered = self._judged(
                [(e.candidate, repeated.get(e.candidate, e.outcomes)) for e in ordered]
            )
            # The first may owe its place to a single seed.
            left = [e.candidate for e in ordered[:1] if e.candidate not in repeated]
        return ordered

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
        self._total += len(added) * (rung.end - rung.first)
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

    def _run(self, jobs: Sequence[Job], *, is_counted: bool = True) -> list[Outcome]:
        """Outcomes of jobs, in their order; from the cache where it has them."""
        outcomes = {index: self._cache.get(job) for index, job in enumerate(jobs)}
        missing = [index for index, outcome in outcomes.items() if outcome is None]
        if is_counted:
            self._report(sum(job.num_requests for job in jobs) - _size(jobs, missing))
        for number, outcome in self._executor.run([jobs[index] for index in missing]):
            job = jobs[missing[number]]
            outcomes[missing[number]] = outcome
            self._cache.put(job, outcome)
            if is_counted:
                self._report(job.num_requests)
        return [outcome for outcome in outcomes.values() if outcome is not None]

    def _expect(self, rung: Rung, num_candidates: int) -> None:
        """Count the requests to simulate from a stretch on, as far as is known."""
        left = self._rungs[self._rungs.index(rung) :]
        sizes = [r.end - r.first for r in left]
        kept = [num_candidates, *(r.num_kept for r in left)]
        repeats = self._question.num_seeds * kept[-1] * sizes[-1]  # the first seed's are at hand
        expected = sum(size * count for size, count in zip(sizes, kept[:-1], strict=True))
        self._total = self._done + expected + repeats

    def _report(self, num_requests: int) -> None:
        self._done += num_requests
        if self._progress and num_requests:
            self._progress("simulate", self._done, max(self._total, self._done))


def _size(jobs: Sequence[Job], indices: Sequence[int]) -> int:
    return sum(jobs[index].num_requests for index in indices)
