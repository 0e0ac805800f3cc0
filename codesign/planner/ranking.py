"""Which candidate is best, which cannot be told from it, and why: the planner's judgement.

Step-time error moves all candidates of a machine together, and all are simulated with the same
seeds. So the choice goes by paired differences, seed by seed; ties are named by whole intervals,
which contain the error of the fit as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import SLO
from codesign.planner.predict import Outcome
from codesign.planner.saturation import OVERLOADED
from codesign.planner.student_t import student_t_quantile

NOTICEABLE = 0.01  # relative gain that a simpler plan is given up for

# What decides, in this order; True: more is better. The first is the objective itself.
CRITERIA = {
    "goodput": (("goodput", True), ("latency_mean", False), ("tpot_mean", False)),
    "latency": (("tpot_mean", False), ("goodput", True), ("latency_mean", False)),
    "fewest": (("goodput", True), ("latency_mean", False), ("tpot_mean", False)),
}

FIGURE_WORDS = {"goodput": "goodput", "latency_mean": "mean latency", "tpot_mean": "mean TPOT"}
_OVERLOAD = (
    "it cannot sustain this load: the queue grows as long as requests arrive. Plan for fewer "
    "(--rate-scale), or set --slo-ttft-ms to see which plan can"
)
_SPAN_WORDS = {
    "target": "verifying",
    "draft": "waiting for the draft",
    "reroot": "re-rooting",
    "link_there": "messages",
    "link_back": "messages",
}


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
    """Best first: those that meet the SLO, then the others by how far they miss it."""
    feasible = [entry for entry in entries if entry.scored.is_feasible]
    missing = [entry for entry in entries if not entry.scored.is_feasible]
    ranked = []
    while feasible:
        best = _best(feasible, objective)
        feasible.remove(best)
        ranked.append(best)
    return ranked + sorted(missing, key=lambda e: (e.miss, e.candidate.complexity))


def _best(entries: list[Entry], objective: str) -> Entry:
    """Narrow down by each criterion to those not clearly worse than its leader; then simplest."""
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
    return min(pool, key=lambda entry: (entry.candidate.complexity, entry.candidate.label))


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

    In the two criteria that matter most; best first.
    """
    best = ranked[0]
    figures = [figure for figure, _ in CRITERIA[objective][:2] if figure in best.predicted]
    return tuple(
        other.label
        for other in ranked[1:]
        if other.is_feasible
        and all(
            figure in other.predicted and best.predicted[figure].overlaps(other.predicted[figure])
            for figure in figures
        )
    )


def explain(ranked: Sequence[ScoredCandidate], slo: SLO) -> str:
    """One line: what the first candidate's rounds spend time on, its gain, the nearest target.

    A queue that grows without end comes first: no other figure means much beside it.
    """
    best = ranked[0]
    parts = [_OVERLOAD] if best.saturation == OVERLOADED else []
    total = sum(best.spans.values())
    if total > 0 and best.candidate.speculation.has_draft:
        shares = [f"verification takes {best.spans['target'] / total:.0%} of a round"]
        if best.spans["draft"] > 0:
            shares.append(f"waiting for the draft {best.spans['draft'] / total:.0%}")
        parts.append(", ".join(shares))
    parts += _gain_over_plain(ranked)
    if best.candidate.family == "plain" and any(s.candidate.family != "plain" for s in ranked):
        parts.append("no plan with a draft serves this better")
    parts.append(_nearest_target(best, slo))
    return "; ".join(parts)


def explain_runner_up(ranked: Sequence[Entry], objective: str) -> str:
    """One line: by what the second candidate lost, and the cause; "" if there is none.

    The second is the first one of another policy or deployment: that a batch limit more would do
    the same is no news.
    """
    best = ranked[0]
    other = next((s for s in ranked[1:] if _kind(s.candidate) != _kind(best.candidate)), None)
    if other is None:
        return ""
    label = other.candidate.label
    if not other.scored.is_feasible:
        return f"{label}: misses the SLO"
    return f"{label}: {_lost_by(best, other, objective)}{_cause(best, other)}"


def _kind(candidate: Candidate) -> tuple[object, object]:
    return candidate.speculation, candidate.deployment


def _lost_by(best: Entry, other: Entry, objective: str) -> str:
    """The first criterion in which the best is noticeably better."""
    for figure, more_is_better in CRITERIA[objective]:
        if (pair := best.beside(other, figure)) is None:
            continue
        ours, theirs = pair
        loss = (ours - theirs if more_is_better else theirs - ours) / max(ours, 1e-12)
        if loss > NOTICEABLE:
            return f"{loss:.0%} {'less' if more_is_better else 'more'} {FIGURE_WORDS[figure]}"
    if other.candidate.complexity > best.candidate.complexity:
        return "not better by more than chance, or by less than 1 %; the simpler plan was chosen"
    return "less than 1 % apart"


def _cause(best: Entry, other: Entry) -> str:
    """What makes a token of the other one dearer: fewer tokens per round, or a longer round."""
    parts = []
    pair = best.beside(other, "acceptance_length")
    if pair and pair[1] < pair[0] * (1 - NOTICEABLE):
        parts.append(f"{pair[1]:.2f} instead of {pair[0]:.2f} tokens per round")
    before, after = best.scored.spans, other.scored.spans
    ours, theirs = sum(before.values()), sum(after.values())
    if theirs > ours * (1 + NOTICEABLE):
        span = max(after, key=lambda name: after[name] - before.get(name, 0.0))
        parts.append(
            f"a round takes {milliseconds(theirs)} instead of {milliseconds(ours)}, most of it "
            f"more {_SPAN_WORDS[span]}"
        )
    return f": {', '.join(parts)}" if parts else ""


def milliseconds(seconds: float) -> str:
    """Three digits, or whole milliseconds: never with an exponent."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _gain_over_plain(ranked: Sequence[ScoredCandidate]) -> list[str]:
    best = ranked[0]
    # The best plain plan, as in the table and in ``economics``; the fastest may let others wait.
    plain = next((s for s in ranked if s.candidate.family == "plain"), best)
    if plain is best or not all("tpot_mean" in s.predicted for s in (plain, best)):
        return []
    ratio = best.predicted["tpot_mean"].value / plain.predicted["tpot_mean"].value
    word = "below" if ratio <= 1 else "above"
    miss = "" if plain.is_feasible else " (which misses the SLO)"
    return [f"mean TPOT {abs(1 - ratio):.0%} {word} plain decoding's{miss}"]


def _nearest_target(best: ScoredCandidate, slo: SLO) -> str:
    used = {
        name: best.predicted[f"{name}_slo"].value / target
        for name, target in (("ttft", slo.ttft), ("tpot", slo.tpot))
        if target is not None and f"{name}_slo" in best.predicted
    }
    if not used:
        return "no target applies" if slo.is_set else "no SLO was set"
    name = max(used, key=used.__getitem__)
    # More load may reach another target first: a queue grows faster than a batch gets slower.
    return (
        f"{name.upper()} p{slo.percentile:g} has the least room, at {used[name]:.0%} of its target"
    )
