"""Whether speculation pays: against plain decoding at each load, and against perfect foresight.

The null plan is the best one without a draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate, ScoredCandidate
from codesign.plan import Economics
from codesign.planner.behaviour import Behaviour, token_shares
from codesign.planner.round_times import BehaviourTable, round_seconds
from codesign.planner.sample import agreement_runs
from codesign.planner.screen import behaviours_of
from codesign.planner.workload import Workload

if TYPE_CHECKING:
    from codesign.fit import Fit
    from codesign.planner.question import Question

_MAX_ORACLE = 16  # draft tokens of a round with perfect foresight
_MAX_RECORDED = 20_000  # recorded tokens that the oracle looks at, per kind of prompt
_BISECTIONS = 40
_MOST_LASTING = 12  # policies that are looked at for one that pays at more load


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """How fast one candidate decodes when a number of requests run on all its workers.

    Attributes:
        candidate: Its deployment and policy.
        fit: Step times.
        behaviours: What it may do in a round; the best of them is done.
        context: KV rows of a request.
    """

    candidate: Candidate
    fit: Fit
    behaviours: Sequence[Behaviour]
    context: float

    def seconds_per_token(self, running: NDArray[np.float64]) -> NDArray[np.float64]:
        """(B,) seconds per token of one request, at each number of running requests."""
        table = BehaviourTable.of(self.behaviours)
        return (self._rounds(table, running) / table.emitted[:, None]).min(axis=0)

    def fastest_round(self, running: float) -> tuple[float, float]:
        """Seconds and tokens of a round of the behaviour that is the fastest there."""
        emitted = BehaviourTable.of(self.behaviours).emitted
        seconds = self.round_seconds(running)
        at = np.argmin(seconds / emitted)
        return float(seconds[at]), float(emitted[at])

    def foreseeing(self) -> Decoding:
        """The same with one behaviour per length that perfect foresight may choose."""
        is_apart = self.candidate.deployment.draft_workers > 0
        chains = [
            Behaviour(n + 1.0, n + 1.0, overlapped=float(n))
            if is_apart
            else Behaviour(n + 1.0, n + 1.0, awaited=(1.0,) * n, awaited_rows=(1.0,) * n)
            for n in range(_MAX_ORACLE + 1)
        ]
        return Decoding(self.candidate, self.fit, chains, self.context)

    def round_seconds(self, running: float) -> NDArray[np.float64]:
        """(P,) seconds of a round of each behaviour."""
        return self._rounds(BehaviourTable.of(self.behaviours), np.array([running]))[:, 0]

    def _rounds(self, table: BehaviourTable, running: NDArray[np.float64]) -> NDArray[np.float64]:
        deployment = self.candidate.deployment
        return round_seconds(
            table,
            self.fit.costs[deployment.unit.label],
            batch=np.maximum(running / deployment.replicas, 1.0),
            context=self.context,
            is_apart=deployment.draft_workers > 0,
        )


def weigh_speculation(ranked: Sequence[ScoredCandidate], question: Question) -> Economics | None:
    """Economics of the best candidate that speculates.

    Args:
        ranked: Predictions, best first.
        question: What was asked.

    Returns:
        None if no candidate speculates, or none does not, or answers have a single token.
    """
    null = next((s for s in ranked if s.candidate.family == "plain"), None)
    best = next((s for s in ranked if s.candidate.family != "plain"), None)
    if null is None or best is None or "acceptance_length" not in best.predicted:
        return None
    emitted, simulated = best.predicted["acceptance_length"].value, _seconds_of_all(best)
    fit, shares = question.fit, token_shares(question.requests, question.fit.answers)
    plain, drafting = _decodings((null, best), question, shares)
    batch = _running(best)
    plain_seconds, _ = plain.fastest_round(batch)
    needed = simulated / plain_seconds
    largest = _most_running((null, best), question, plain.context)
    crossover = _crossover(_pays(best, drafting, plain, largest), batch)
    lasting, lasting_crossover = "", None
    if crossover is not None:
        others = [s for s in ranked if s.candidate.family != "plain" and s is not best]
        found = _lasting(others, null, question, shares)
        if found[1] > crossover:
            lasting, lasting_crossover = found
    chain = best.candidate.speculation
    return Economics(
        null_plan=null.label,
        speculative=best.label,
        gain=emitted / needed,
        crossover=crossover,
        largest_batch=largest,
        batch=batch,
        break_even_length=needed,
        acceptance_length=emitted,
        break_even_rate=chance_for(needed, chain.max_depth) if chain.kind == "chain" else None,
        oracle_gain=plain_seconds / oracle_seconds(drafting, batch, fit.answers, shares),
        lasting=lasting,
        lasting_crossover=lasting_crossover,
    )


def _decodings(
    plans: Sequence[ScoredCandidate], question: Question, shares: Mapping[str, float]
) -> list[Decoding]:
    specs = list(dict.fromkeys(s.candidate.speculation for s in plans))
    behaviours = behaviours_of(specs, question.fit, shares)
    context = Workload.of(question.requests).context
    return [
        Decoding(s.candidate, question.fit, behaviours[s.candidate.speculation], context)
        for s in plans
    ]


def _running(scored: ScoredCandidate) -> float:
    """Requests that ran at once on average, on all workers together."""
    each = 1.0 if scored.running is None else scored.running.value
    return max(each, 1.0) * scored.candidate.deployment.replicas


def _seconds_of_all(scored: ScoredCandidate) -> float:
    """Seconds in which each request has a round: longer than one where some sit rounds out."""
    seconds, taking_part = sum(scored.spans.values()), scored.predicted.get("mean_batch")
    if scored.running is None or taking_part is None:
        return seconds
    return seconds * scored.running.value / taking_part.value


def _pays(
    scored: ScoredCandidate, drafting: Decoding, plain: Decoding, largest: int
) -> NDArray[np.bool_]:
    """(largest,) whether a token takes no longer than without a draft, at 1, 2, ... requests."""
    running = np.arange(1.0, largest + 1.0)
    # Arithmetic says how it goes on from the simulated load, not where it starts.
    arithmetic = drafting.seconds_per_token(np.array([_running(scored), *running]))
    simulated = _seconds_of_all(scored) / scored.predicted["acceptance_length"].value
    return arithmetic[1:] * (simulated / arithmetic[0]) <= plain.seconds_per_token(running)


def _lasting(
    others: Sequence[ScoredCandidate],
    null: ScoredCandidate,
    question: Question,
    shares: Mapping[str, float],
) -> tuple[str, int]:
    """Which of some candidates pays up to most running requests, and up to how many; ("", 0)."""
    first = {s.candidate.speculation: s for s in reversed(others) if _is_weighed(s)}
    plans = [s for s in others if first.get(s.candidate.speculation) is s][:_MOST_LASTING]
    found = "", 0
    plain, *decodings = _decodings((null, *plans), question, shares)
    for scored, drafting in zip(plans, decodings, strict=True):
        largest = _most_running((null, scored), question, plain.context)
        crossover = _crossover(_pays(scored, drafting, plain, largest), _running(scored))
        up_to = largest if crossover is None else crossover
        found = max(found, (scored.label, up_to), key=lambda pair: pair[1])
    return found


def _is_weighed(scored: ScoredCandidate) -> bool:
    """Whether its simulation says how long its rounds are and what they emit."""
    return "acceptance_length" in scored.predicted and sum(scored.spans.values()) > 0


def _crossover(pays: NDArray[np.bool_], batch: float) -> int | None:
    """Most running requests at which drafting pays without a gap from the simulated load on.

    Args:
        pays: (B,) at 1, 2, ... running requests.
        batch: Running requests that were simulated.

    Returns:
        If it does not pay there, the most below; None if it pays up to the end.
    """
    load = min(int(batch), len(pays))
    if not pays[load - 1]:
        return int(np.flatnonzero(pays[: load - 1]).max(initial=-1)) + 1
    stops = np.flatnonzero(~pays[load:])
    return load + int(stops[0]) if len(stops) else None


def _most_running(plans: Sequence[ScoredCandidate], question: Question, context: float) -> int:
    """Requests that fit the workers at once with each of some plans, at the largest batch limit."""
    most = []
    for candidate in (s.candidate for s in plans):
        cost = question.fit.costs[candidate.deployment.unit.label]
        room = cost.kv_room(
            question.serving.max_kv_tokens, has_draft=candidate.speculation.has_draft
        )
        each = question.max_batch if room is None else min(question.max_batch, int(room / context))
        most.append(each * candidate.deployment.replicas)
    return max(min(most), 1)


def chance_for(length: float, depth: int) -> float | None:
    """Chance of each token of a chain to be accepted that gives a mean number of tokens per round.

    Args:
        length: Tokens per round, bonus token included.
        depth: Draft tokens.

    Returns:
        None if no chance does.

    Source:
        Leviathan et al., arXiv:2211.17192, equation 1.
    """
    if not 1.0 <= length <= depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        chance = (low + high) / 2
        reached = sum(chance**i for i in range(depth + 1))
        low, high = (chance, high) if reached < length else (low, chance)
    return (low + high) / 2


def oracle_seconds(
    drafting: Decoding, batch: float, profile: AcceptanceProfile, shares: Mapping[str, float]
) -> float:
    """Seconds per token if each round drafted exactly what will be accepted, and the best part.

    Each recording is cut into rounds so that the sum of their times is least. All requests of the
    batch are taken to draft as much, and a forward beside the verification costs only what it is
    longer: a bound, not a plan. Trees may follow any of their ranks.

    Args:
        drafting: The speculative candidate.
        batch: Running requests.
        profile: Recorded acceptance.
        shares: Of the output tokens of each kind of prompt.
    """
    seconds = drafting.foreseeing().round_seconds(batch)
    spec = drafting.candidate.speculation
    fanout = 1 if spec.max_depth else max(spec.rows - 1, spec.width)  # as wide as its tree may be
    total = 0.0
    for kind, share in shares.items():
        tokens = spent = 0.0
        for runs in agreement_runs(profile, kind, fanout):
            tokens += len(runs)
            spent += _least_seconds(np.minimum(runs, _MAX_ORACLE), seconds)
            if tokens >= _MAX_RECORDED:
                break
        total += share * spent / tokens
    return total


def _least_seconds(runs: NDArray[np.int64], seconds: NDArray[np.float64]) -> float:
    """Least time to emit a recording: the best cut into rounds, from its end to its beginning."""
    num = len(runs)
    left = np.zeros(num + _MAX_ORACLE + 2)  # beyond the end nothing is left to do
    for at in range(num - 1, -1, -1):
        most = int(runs[at]) + 1
        left[at] = (seconds[:most] + left[at + 1 : at + 1 + most]).min()
    return float(left[0])
