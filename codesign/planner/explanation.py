"""Why a candidate is best, and by what the second one lost: one line each."""

from __future__ import annotations

from collections.abc import Sequence

from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import SLO
from codesign.planner.ranking import CRITERIA, NOTICEABLE, Entry, may_be_best
from codesign.planner.saturation import OVERLOADED
from codesign.slo_figure import slo_figure

FIGURE_WORDS = {"goodput": "goodput", "latency_mean": "mean latency", "tpot_mean": "mean TPOT"}
_OVERLOAD = (
    "it cannot sustain this load: the queue grows as long as requests arrive. Plan for fewer "
    "(--rate-scale), or set --slo-ttft-ms to see which plan can"
)
_NONE_BEARS = (
    "can sustain this load: the queue grows as long as requests arrive. Plan for fewer "
    "(--rate-scale)"
)
_SPAN_WORDS = {
    "target": "verifying",
    "draft": "waiting for the draft",
    "reroot": "re-rooting",
    "link_there": "messages",
    "link_back": "messages",
}


def explain(
    ranked: Sequence[ScoredCandidate], slo: SLO, objective: str, *, has_own: bool = False
) -> str:
    """One line: what the first candidate's rounds spend time on, its gain, the nearest target.

    A queue that grows without end comes first: no other figure means much beside it.

    Args:
        ranked: Predictions, best first.
        slo: Targets.
        objective: What decides.
        has_own: Requests have TPOT targets of their own.
    """
    best = ranked[0]
    parts = _load_words(ranked, slo, objective)
    total = sum(best.spans.values())
    if total > 0 and best.candidate.speculation.has_draft:
        shares = [f"verification takes {best.spans['target'] / total:.0%} of a round"]
        if best.spans["draft"] > 0:
            shares.append(f"waiting for the draft {best.spans['draft'] / total:.0%}")
        parts.append(", ".join(shares))
    parts += _gain_over_plain(ranked)
    if best.candidate.family == "plain" and any(s.candidate.family != "plain" for s in ranked):
        parts.append("no plan with a draft serves this better")
    parts.append(_nearest_target(best, slo, has_own=has_own))
    return "; ".join(parts)


def _load_words(ranked: Sequence[ScoredCandidate], slo: SLO, objective: str) -> list[str]:
    """That the first does not bear the load, or who would be faster and does not."""
    best = ranked[0]
    if not may_be_best(best, objective):
        return [f"no plan {'that meets the SLO ' if slo.is_set else ''}{_NONE_BEARS}"]
    if best.saturation == OVERLOADED:
        return [_OVERLOAD]
    figure, more_is_better = CRITERIA[objective][0]
    sign = -1.0 if more_is_better else 1.0
    swamped = [
        other
        for other in ranked[1:]
        if other.is_feasible and not may_be_best(other, objective) and figure in other.predicted
    ]
    if not swamped:
        return []
    first = min(swamped, key=lambda other: sign * other.predicted[figure].value)
    ours, theirs = best.predicted[figure].value, first.predicted[figure].value
    gain = sign * (ours - theirs) / max(ours, 1e-12)
    if gain <= NOTICEABLE:
        return []
    word = "more" if more_is_better else "less"
    return [
        f"the best of those that bear this load; {first.label} has {gain:.0%} {word} "
        f"{FIGURE_WORDS[figure]}, but its queue grows as long as requests arrive"
    ]


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
    if may_be_best(best.scored, objective) and not may_be_best(other.scored, objective):
        return f"{label}: cannot sustain this load"
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
    if best.candidate.runs_in_engine and not other.candidate.runs_in_engine:
        return (
            "not better by more than chance, or by less than 1 %; the engine here does not serve it"
        )
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
    return [
        f"mean TPOT on this trace, prompts included, {abs(1 - ratio):.0%} {word} that of "
        f"{plain.candidate.label}{miss}"
    ]


def _nearest_target(best: ScoredCandidate, slo: SLO, *, has_own: bool) -> str:
    used = {
        name: best.predicted[f"{name}_slo"].value / target
        for name, target in (("ttft", slo.ttft), ("tpot", slo.tpot))
        if target is not None and f"{name}_slo" in best.predicted
    }
    if not used:
        return "no target applies" if slo.is_set else "no SLO was set"
    name = max(used, key=used.__getitem__)
    # More load may reach another target first: a queue grows faster than a batch gets slower.
    figure = slo_figure(name, slo, has_own=has_own)
    of = "" if figure.unit == "%" else " of its target"
    return f"{figure.title} has the least room, at {used[name]:.0%}{of}"
