"""Which candidate is best, which cannot be told from it, and why: the planner's judgement.

Step-time error moves all candidates of a machine together, and all are simulated with the same
seeds. So the choice goes by paired differences, seed by seed; ties are named by whole intervals,
which contain the error of the fit as well. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codesign.config import SLO
from codesign.plan import Candidate, ScoredCandidate
from codesign.planner.predict import Outcome

NOTICEABLE = 0.01  # relative gain that a simpler plan is given up for

# What decides, in this order; True: more is better. The first is the objective itself.
CRITERIA = {
    "goodput": (("goodput", True), ("latency_mean", False), ("tpot_mean", False)),
    "latency": (("tpot_mean", False), ("goodput", True), ("latency_mean", False)),
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
        leader = max(defined, key=lambda e: (sign * _mean(e.values(figure)), e.candidate.label))
        pool = [e for e in defined if not _is_clearly_better(leader, e, figure, sign)]
    return min(pool, key=lambda entry: (entry.candidate.complexity, entry.candidate.label))


def _is_clearly_better(one: Entry, other: Entry, figure: str, sign: float) -> bool:
    """Better with every seed, and noticeably so on average."""
    ours, theirs = one.values(figure), other.values(figure)
    gains = [
        sign * (ours[seed] - theirs[seed]) / max(abs(theirs[seed]), 1e-12)
        for seed in ours.keys() & theirs.keys()
    ]
    return bool(gains) and min(gains) > 0 and sum(gains) / len(gains) > NOTICEABLE


def _mean(values: dict[int, float]) -> float:
    return sum(values.values()) / len(values)


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
    """One line: what a round of the first candidate spends its time on, its gain, what binds."""
    best = ranked[0]
    parts = []
    total = sum(best.spans.values())
    if total > 0:
        shares = [f"verification takes {best.spans['target'] / total:.0%} of a round"]
        if best.spans["draft"] > 0:
            shares.append(f"waiting for the draft {best.spans['draft'] / total:.0%}")
        parts.append(", ".join(shares))
    parts += _gain_over_plain(ranked)
    parts.append(_what_binds(best, slo))
    return "; ".join(parts)


def _gain_over_plain(ranked: Sequence[ScoredCandidate]) -> list[str]:
    best = ranked[0]
    plain = [s for s in ranked if s.candidate.family == "plain" and "tpot_mean" in s.predicted]
    if best.candidate.family == "plain" or not plain or "tpot_mean" not in best.predicted:
        return []
    fastest = min(s.predicted["tpot_mean"].value for s in plain)
    ratio = best.predicted["tpot_mean"].value / fastest
    word = "below" if ratio <= 1 else "above"
    return [f"mean TPOT {abs(1 - ratio):.0%} {word} plain decoding's"]


def _what_binds(best: ScoredCandidate, slo: SLO) -> str:
    used = {
        name: best.predicted[f"{name}_slo"].value / target
        for name, target in (("ttft", slo.ttft), ("tpot", slo.tpot))
        if target is not None and f"{name}_slo" in best.predicted
    }
    if not used:
        return "no target binds"
    name = max(used, key=used.__getitem__)
    return f"{name.upper()} p{slo.percentile:g} binds first, at {used[name]:.0%} of its target"
