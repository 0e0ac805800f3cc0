"""A rough score for every candidate, so that only the promising ones are simulated on the trace.

How a policy behaves (tokens and forwards a round) is found once per policy, by simulating a few
hundred rounds of typical requests one at a time; what that takes at each split of the machine and
each batch limit is then arithmetic on the fitted step times. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from codesign.config import Serving
from codesign.plan import Candidate
from codesign.policy.speculation import SpeculationSpec

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit
    from codesign.policy.cost import RoundCost

_NUM_TYPICAL = 8  # requests that show how a policy behaves
_TYPICAL_OUTPUT = 48  # their longest output
_LOAD_STEPS = 30  # iterations of the load's fixed point, which contracts quickly
_FULL = 0.99  # load at which the queue's wait is capped
_INSTANT = 1e-3  # seconds, the shortest trace

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace in five numbers.

    Attributes:
        rate: Requests per second; very large if all come at once.
        prompt_tokens: Mean.
        output_tokens: Mean.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def of(cls, requests: pd.DataFrame) -> Workload:
        """Means of a prepared trace."""
        arrival = np.asarray(requests["arrival"], np.float64)
        return cls(
            rate=len(requests) / max(float(np.ptp(arrival)), _INSTANT),
            prompt_tokens=float(np.mean(np.asarray(requests["prompt_tokens"]))),
            output_tokens=float(np.mean(np.asarray(requests["output_tokens"]))),
        )

    @property
    def context(self) -> float:
        """KV rows of a request, on average over its life."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a policy does for one request in one round, on average.

    Attributes:
        emitted: Tokens emitted, bonus token included.
        rows: Rows verified, root included.
        forwards: Draft forwards that the target waits for.
        overlapped: Draft forwards beside the verification.
        draft_rows: Rows of a draft forward.
    """

    emitted: float
    rows: float
    forwards: float
    overlapped: float
    draft_rows: float


@dataclass(frozen=True, slots=True)
class Screened:
    """A candidate's rough score.

    Attributes:
        candidate: What it is about.
        load: Demand over capacity; above 1 the queue grows without end.
        tpot: Seconds per token at the batch that the load leads to.
        latency: Seconds from arrival to last token of an average request.
    """

    candidate: Candidate
    load: float
    tpot: float
    latency: float

    def key(self, objective: str) -> tuple[float, float, tuple[int, int, int]]:
        """Sort key, best first: capacity, then short latency (goodput); or fast tokens first."""
        overload = round(max(self.load, 1.0), 2)
        if objective == "goodput":
            return overload, self.latency, self.candidate.complexity
        return self.tpot, overload, self.candidate.complexity


def screen(
    candidates: Sequence[Candidate],
    requests: pd.DataFrame,
    fit: Fit,
    *,
    objective: str,
    seed: int,
    progress: Progress | None = None,
) -> list[Screened]:
    """Score all candidates, best first.

    Args:
        candidates: The search space.
        requests: Prepared trace.
        fit: Step times and acceptance; holds every candidate's deployment.
        objective: "goodput" or "latency".
        seed: Of the draws of typical requests.
        progress: Called with ("screen", done, total).
    """
    workload = Workload.of(requests)
    typical = typical_requests(requests, seed)
    behaviours: dict[SpeculationSpec, Behaviour] = {}
    scored = []
    for done, candidate in enumerate(candidates, start=1):
        spec = candidate.speculation
        if spec not in behaviours:
            behaviours[spec] = observe(candidate, typical, fit, seed)
        cost = fit.costs[candidate.deployment.label]
        scored.append(estimate(candidate, behaviours[spec], cost, workload))
        if progress:
            progress("screen", done, len(candidates))
    return sorted(scored, key=lambda s: s.key(objective))


def typical_requests(requests: pd.DataFrame, seed: int) -> pd.DataFrame:
    """A few requests of the trace, as if each came alone, with outputs cut short."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(requests), size=_NUM_TYPICAL, replace=len(requests) < _NUM_TYPICAL)
    chosen = requests.iloc[np.sort(rows)].reset_index(drop=True)
    return chosen.assign(
        arrival=0.0, output_tokens=chosen["output_tokens"].clip(lower=2, upper=_TYPICAL_OUTPUT)
    )


def observe(candidate: Candidate, typical: pd.DataFrame, fit: Fit, seed: int) -> Behaviour:
    """Simulate typical requests one at a time and average over the rounds."""
    from codesign.sim import simulate

    alone = Candidate(candidate.deployment, candidate.speculation, max_batch=1)
    longest = np.max(np.asarray(typical["prompt_tokens"] + typical["output_tokens"], np.int64))
    room = int(longest) + alone.speculation.max_rows
    records = simulate(typical, alone, fit, serving=Serving(max_kv_tokens=room), seed=seed)
    rounds = records.rounds
    num_rounds = max(sum(r.batch for r in rounds), 1)
    num_emitted = sum(r.output_tokens - 1 for r in records.requests)
    # Prompt rows ride on a request's first forward; they are priced as prefill.
    num_forwards = sum(r.num_expansions for r in rounds)
    num_prompt_rows = sum(r.prompt_tokens for r in records.requests) if num_forwards else 0
    spec = candidate.speculation
    overlapped = min(float(spec.expansions), num_forwards / num_rounds) if spec.is_async else 0.0
    return Behaviour(
        emitted=num_emitted / num_rounds,
        rows=sum(r.rows for r in rounds) / num_rounds,
        forwards=num_forwards / num_rounds - overlapped,
        overlapped=overlapped,
        draft_rows=max(sum(r.draft_rows for r in rounds) - num_prompt_rows, num_forwards)
        / max(num_forwards, 1),
    )


def estimate(
    candidate: Candidate, behaviour: Behaviour, cost: RoundCost, workload: Workload
) -> Screened:
    """Load, time per token and latency of a candidate, by arithmetic.

    Source:
        Wait in a queue with c servers: Sakasegawa, "An approximation formula
        L = a * rho^b / (1 - rho)", 1977.
    """

    def tpot_at(batch: float) -> float:
        seconds = round_seconds(behaviour, cost, batch=batch, context=workload.context)
        return seconds / behaviour.emitted

    prefill = cost.prefill(workload.prompt_tokens)
    if behaviour.forwards and not behaviour.overlapped:  # serial: the draft prefills in turn
        prefill += cost.draft_prefill(workload.prompt_tokens)
    limit = candidate.max_batch
    # Seconds per request when the batch is full: prefills come one by one, decoding is shared.
    busy = prefill + workload.output_tokens * tpot_at(limit) / limit
    load = workload.rate * busy
    batch = 1.0
    for _ in range(_LOAD_STEPS):
        alive = workload.rate * (prefill + workload.output_tokens * tpot_at(batch))  # Little's law
        batch = (batch + min(max(alive, 1.0), limit)) / 2
    used = min(load, _FULL)
    wait = busy * used ** ((2 * (limit + 1)) ** 0.5 - 1) / (1 - used)
    latency = wait + prefill + workload.output_tokens * tpot_at(batch)
    return Screened(candidate, load, tpot_at(batch), latency)


def round_seconds(behaviour: Behaviour, cost: RoundCost, *, batch: float, context: float) -> float:
    """Seconds of one round on the critical path.

    Args:
        behaviour: Of the policy, per request.
        cost: Step times of the deployment.
        batch: Requests in the round.
        context: KV rows of each.
    """
    target = cost.target(behaviour.rows * batch, context * batch)
    if not behaviour.forwards and not behaviour.overlapped:
        return target
    draft = cost.draft(behaviour.draft_rows * batch, context * batch)
    if not behaviour.overlapped:
        return target + behaviour.forwards * draft + cost.reroot
    # One request that needs a forward holds up the whole batch.
    chance = 1.0 - (1.0 - min(behaviour.forwards, 1.0)) ** batch
    waiting = chance * max(behaviour.forwards, 1.0) * draft
    beside = behaviour.overlapped * draft
    verifying = target + cost.slowdown * min(beside, target)
    return max(verifying, beside) + waiting + cost.reroot + 2 * cost.link
