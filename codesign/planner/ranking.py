"""Which candidate is best, and which cannot be told from it: the planner's judgement.

Step-time error moves all candidates of a machine together, and all are simulated with the same
seeds. So the choice goes by paired differences, seed by seed; ties are named by whole intervals,
which contain the error of the fit as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean

from codesign.candidate import Candidate, ScoredCandidate
from codesign.planner.predict import Outcome
from codesign.planner.saturation import BACKLOGGED, OVERLOADED
from codesign.planner.student_t import student_t_quantile

NOTICEABLE = 0.01  # relative gain that a simpler plan is given up for

# What decides, in this order; True: more is better. The first is the objective itself.
CRITERIA = {
    "goodput": (("goodput", True), ("latency_mean", False), ("tpot_mean", False)),
    "latency": (("tpot_mean", False), ("goodput", True), ("latency_mean", False)),
    "fewest": (("goodput", True), ("latency_mean", False), ("tpot_mean", False)),
}

# Objectives of which a plan that bears the load is better than any that does not: the shortest
# rounds are those of a request alone, and on too few workers a queue never ends.
MUST_BEAR = ("latency", "fewest")

# What a queue shows in; True: more is better.
_OF_QUEUE = (("ttft_mean", False), ("ttft_p90", False), ("throughput", True))
_EQUAL = 1e-9  # relative difference of figures of one and the same queue


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate, its simulations and what they predict.

    Attributes:
        miss: Largest ratio of a figure at the SLO's percentile to its target; feasible up to 1.
    """

    candidate: Candidate
    outcomes: tuple[Outcome, ...]
    scored: ScoredCandidate
    miss: float

    def values(self, figure: str) -> dict[int, float]:
        """A figure by seed; empty if it is not defined."""
        return {o.seed: o.figures[figure] for o in self.outcomes if figure in o.figures}

    def beside(self, other: Entry, figure: str) -> tuple[float, float] | None:
        """Means of a figure, this one's and the other's, over the seeds that both have.

        The best plans have more seeds than others: their means cannot be compared, as a seed is
        luck that all plans share. None if no seed has the figure of both.
        """
        ours, theirs = self.shared(other, figure)
        return (fmean(ours), fmean(theirs)) if ours else None

    def shared(self, other: Entry, figure: str) -> tuple[list[float], list[float]]:
        """A figure, this one's and the other's, by seed, of the seeds that both have."""
        ours, theirs = self.values(figure), other.values(figure)
        seeds = sorted(ours.keys() & theirs.keys())
        return [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]


def rank(entries: Sequence[Entry], objective: str) -> list[Entry]:
    """Best first: those that meet the SLO, then the others by how far they miss it.

    Where the objective needs it, those that bear the load come before all that do not.
    """
    entries = compared_in_load(entries)
    feasible = [entry for entry in entries if entry.scored.is_feasible]
    missing = [entry for entry in entries if not entry.scored.is_feasible]
    ranked = []
    for bears in (True, False):
        left = [entry for entry in feasible if may_be_best(entry.scored, objective) == bears]
        while left:
            best = _best(left, objective)
            left.remove(best)
            ranked.append(best)
    return ranked + sorted(missing, key=lambda e: (e.miss, _least_trouble(e)))


def compared_in_load(entries: Sequence[Entry]) -> list[Entry]:
    """The same plans, where none is "overloaded" that bears the load as well as one that is not.

    How long a queue may be goes by how long a request runs. So of two plans that have one queue in
    front of their prompts, the faster one alone may be called overloaded.
    """
    bearing = [entry for entry in entries if entry.scored.saturation != OVERLOADED]
    return [
        replace(entry, scored=replace(entry.scored, saturation=BACKLOGGED))
        if entry.scored.saturation == OVERLOADED
        and any(_queues_no_longer(entry, other) for other in bearing)
        else entry
        for entry in entries
    ]


def _queues_no_longer(entry: Entry, other: Entry) -> bool:
    """Whether requests wait no longer with a plan than with another, which serves no faster."""
    for figure, more_is_better in _OF_QUEUE:
        means = entry.beside(other, figure)
        if means is None:
            return False
        larger, smaller = means if more_is_better else means[::-1]
        if larger < smaller * (1.0 - _EQUAL):
            return False
    return True


def may_be_best(scored: ScoredCandidate, objective: str) -> bool:
    """Whether a plan bears the load, or the objective does not ask that of it."""
    return objective not in MUST_BEAR or scored.saturation != OVERLOADED


def _best(entries: list[Entry], objective: str) -> Entry:
    """Narrow down by each criterion to those not clearly worse than its leader.

    Of what is left the first by ``_least_trouble``.
    """
    pool = entries
    for figure, more_is_better in CRITERIA[objective]:
        defined = [entry for entry in pool if entry.values(figure)]
        if not defined:
            continue
        sign = 1.0 if more_is_better else -1.0
        leader = max(
            defined, key=lambda e: (sign * fmean(e.values(figure).values()), e.candidate.label)
        )
        pool = [e for e in defined if sign * clear_gain(*leader.shared(e, figure)) <= 0.0]
    return min(pool, key=_least_trouble)


def _least_trouble(entry: Entry) -> tuple[object, ...]:
    """Sort key of plans that are equally good at the load that was asked about.

    One that the engine runs; then the simplest policy, and the split of the fewest groups with the
    largest target. Of batch limits the largest: a higher load than the trace's need not queue.
    """
    candidate, split = entry.candidate, entry.candidate.deployment
    return (
        *(not candidate.runs_in_engine, candidate.complexity),
        *(split.num_groups, -split.target_workers, -candidate.max_batch, candidate.label),
    )


def clear_gain(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How much more one figure is than another, as a share of the other one's mean.

    0 where nobody would notice, or where it is the luck of the seeds: neither more nor less with
    each of them, and within an 80 % interval of the mean. Of eight seeds one may well be against
    the better plan; of the usual three hardly any may.

    Args:
        ours: By seed.
        theirs: The same seeds.
    """
    if not theirs:
        return 0.0
    scale = max(fmean(map(abs, theirs)), 1e-12)
    gains = [(our - their) / scale for our, their in zip(ours, theirs, strict=True)]
    gain = fmean(gains)
    if abs(gain) <= NOTICEABLE:
        return 0.0
    is_sure = min(gains) > 0.0 or max(gains) < 0.0 or abs(gain) > _luck(gains, gain)
    return gain if is_sure else 0.0


def _luck(values: Sequence[float], mean: float) -> float:
    """How far off their mean is, at most, in 80 % of cases."""
    freedom = len(values) - 1
    variance = sum([(value - mean) ** 2 for value in values]) / freedom
    return student_t_quantile(freedom, 0.9) * sqrt(variance / len(values))


def find_ties(ranked: Sequence[ScoredCandidate], objective: str) -> tuple[str, ...]:
    """Labels of feasible candidates whose intervals overlap with the first one's.

    In the two criteria that matter most; best first. A plan that does not bear the load is told
    from one that does, where the objective asks for it.
    """
    best = ranked[0]
    bears = may_be_best(best, objective)
    figures = [figure for figure, _ in CRITERIA[objective][:2] if figure in best.predicted]
    return tuple(
        other.label
        for other in ranked[1:]
        if other.is_feasible
        and may_be_best(other, objective) == bears
        and all(
            figure in other.predicted and best.predicted[figure].overlaps(other.predicted[figure])
            for figure in figures
        )
    )
