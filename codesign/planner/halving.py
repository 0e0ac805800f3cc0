"""Successive halving: many candidates on a short stretch of the trace, the best of them on more.

A short trace is simulated as a whole. Sizes follow from the number of requests alone, never from
a clock, so that the same question gets the same plan on any machine.

Source:
    Jamieson and Talwalkar, arXiv:1502.07943.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.planner.ranking import Entry
from codesign.planner.saturation import AT_ONCE
from codesign.planner.screen import Screened
from codesign.policy.speculation import SpeculationSpec

if TYPE_CHECKING:
    import pandas as pd

_SHORT = 2000  # requests up to which every simulation is of the whole trace
_PARTS = (16, 4, 1)  # the stretches of a longer trace are a 16th, a quarter, and all of it
_NUM_ENTERING = 40  # best of the screen
_NUM_MORE = 120  # the same if none of these meets the SLO, but one comes near
NEAR = 1.25  # times a target: a miss that the screen may have got wrong
_NUM_KEPT = (20, 6)  # after a 16th of a long trace, after a quarter
_NUM_FINALISTS = (6, 2)  # simulated with every seed: of a short trace, of a long one
_MAX_LIMITS = 3  # batch limits per policy and deployment among those that enter
_MAX_SHARE = 0.2  # of those that enter on one deployment: the screen errs alike on all of these
_HOPELESS = 0.8  # share of the best goodput below which no deployment of a long trace is tried
_SAME = 0.002  # relative difference of scores below which a batch limit is never reached
_NUM_CLIMBING = 6  # best plans whose neighbouring batch limits are simulated, too
MOST_NEIGHBOURS = 2 * _NUM_CLIMBING  # that one look finds; later ones find few
NUM_CLIMBS = 3  # times that it is looked at who they are
COMPARED = (SpeculationSpec(), SpeculationSpec(kind="chain", max_depth=3))  # always in the table


@dataclass(frozen=True, slots=True)
class Rung:
    """One stretch of the trace.

    Attributes:
        first: Its first request.
        end: The request behind its last.
        num_kept: Candidates that are simulated on the next stretch; after the last one, with
            every seed.
    """

    first: int
    end: int
    num_kept: int


def rungs(requests: pd.DataFrame) -> list[Rung]:
    """Growing stretches of a trace, the last one all of it."""
    num = len(requests)
    if num <= _SHORT:
        return [Rung(0, num, _NUM_FINALISTS[0])]
    kept = (*_NUM_KEPT, _NUM_FINALISTS[1])
    arrival = np.asarray(requests["arrival"], np.float64)
    return [
        Rung(*typical_stretch(arrival, num // part), count)
        for part, count in zip(_PARTS, kept, strict=True)
    ]


def typical_stretch(arrival: np.ndarray, length: int) -> tuple[int, int]:
    """(first, end) of the stretch of ``length`` requests whose rate is nearest the trace's own."""
    num = len(arrival)
    if length >= num:
        return 0, num
    firsts = np.arange(0, num - length + 1, max(length // 8, 1))
    seconds = np.maximum(arrival[firsts + length - 1] - arrival[firsts], 1e-9)
    whole = max(float(arrival[-1] - arrival[0]), 1e-9) * length / num
    first = int(firsts[np.argmin(np.abs(np.log(seconds / whole)))])
    return first, first + length


def entering(
    screened: Screened,
    objective: str,
    percentile: float,
    num_requests: int,
    *,
    is_second: bool = False,
) -> list[int]:
    """Candidates worth simulating: the best of the screen, and what every table must show.

    The screen can be wrong about what meets the SLO and about queues, so half of the places go by
    the objective and the rest by other orders of the same scores. Not too many of
    one deployment, nor of one policy there, and the best of every deployment.

    Args:
        screened: Scores of all candidates.
        objective: See ``screen_orders``.
        percentile: The same.
        num_requests: Of the trace; for a long one, deployments of no promise are left out.
        is_second: More of them, as those of the first time missed the SLO by little.

    Returns:
        Their places in ``screened``.
    """
    orders = screen_orders(screened, objective, percentile, num_requests)
    others = chain.from_iterable(zip(*orders[1:], strict=True))
    chosen: dict[int, None] = {}
    kinds: dict[tuple[SpeculationSpec, Deployment], list[int]] = {}
    shares: Counter[Deployment] = Counter()
    num_deployments = len({candidate.deployment for candidate in screened.candidates})
    num_entering = _NUM_MORE if is_second else _NUM_ENTERING
    most = num_entering * max(_MAX_SHARE, 1.0 / num_deployments)
    for index in chain.from_iterable(zip(orders[0], others, strict=False)):
        candidate = screened.candidates[index]
        alike = kinds.setdefault((candidate.speculation, candidate.deployment), [])
        if (
            len(chosen) < num_entering
            and index not in chosen
            and len(alike) < _MAX_LIMITS
            and shares[candidate.deployment] < most
            and not any(_is_same(screened, index, other) for other in alike)
        ):
            alike.append(index)
            shares[candidate.deployment] += 1
            chosen[index] = None
    for place in representatives([screened.candidates[i] for i in orders[0]]):
        chosen.setdefault(orders[0][place])
    first_of = {screened.candidates[i].deployment: i for i in reversed(orders[0])}
    least = 0.0 if num_requests <= _SHORT else _HOPELESS * float(screened.goodput.max())
    chosen |= dict.fromkeys(i for i in first_of.values() if screened.goodput[i] >= least)
    return list(chosen)


def _is_same(screened: Screened, one: int, other: int) -> bool:
    """Whether a batch limit makes no difference, because neither is ever reached."""
    return all(
        abs(scores[one] - scores[other]) <= _SAME * scores[other]
        for scores in (screened.goodput, screened.latency)
    )


def neighbours(ordered: Sequence[Entry], space: Sequence[Candidate]) -> list[Candidate]:
    """The best few plans at the next smaller and the next larger batch limit.

    Queues and their luck are what the screen knows least, and the limit is what they depend on.

    Args:
        ordered: What was simulated, best first.
        space: All candidates.
    """
    limits = sorted({candidate.max_batch for candidate in space})
    simulated = {entry.candidate for entry in ordered}
    wanted = set()
    for entry in ordered[:_NUM_CLIMBING]:
        at = limits.index(entry.candidate.max_batch)
        wanted |= {
            replace(entry.candidate, max_batch=limit) for limit in limits[max(at - 1, 0) : at + 2]
        }
    return [candidate for candidate in space if candidate in wanted - simulated]


def screen_orders(
    screened: Screened, objective: str, percentile: float, num_requests: int
) -> list[list[int]]:
    """Candidates best first, by the objective and then by other views of the same scores.

    Args:
        screened: N scores.
        objective: "goodput" or "latency"; see ``Question``.
        percentile: Of the SLO: so many percent of the requests must meet it.
        num_requests: Of the trace.

    Returns:
        Orders of the N candidates' places, the objective's first.
    """
    misses = screened.attained < percentile / 100.0 - 1e-9
    goodput = np.round(screened.goodput / max(float(screened.goodput.max()), 1e-12), 2)
    limits = np.array([c.max_batch for c in screened.candidates])
    costs = np.array([c.complexity for c in screened.candidates]).T
    ends = (*costs[::-1], limits)
    served, late, tpot = -goodput, screened.latency, screened.tpot
    swamped = _swamped(screened, limits, num_requests)
    if objective != "latency":
        keys = [
            (late, served, misses),
            (late, served),
            (tpot, np.round(served, 1), misses),
        ]
    else:
        keys = [
            (served, tpot, swamped, misses),
            (served, tpot, swamped),
            (late, np.round(served, 1), misses),
        ]
    return [np.lexsort((*ends, *key)).tolist() for key in keys]


def _swamped(screened: Screened, limits: np.ndarray, num_requests: int) -> np.ndarray:
    """(N,) whether a queue is too long when the last request comes, by the load.

    As in ``saturation``: who runs and as many that wait, for as long as one runs, are not too many.
    Nor is what comes at once, which is no rate.
    """
    replicas = np.array([candidate.deployment.replicas for candidate in screened.candidates])
    each = num_requests / replicas
    left = each * (1.0 - 1.0 / np.maximum(screened.load, 1.0))
    return (left > 2.0 * limits) & (AT_ONCE * screened.load * limits < each)


def representatives(ordered: Sequence[Candidate]) -> list[int]:
    """The first of each family, of each policy in COMPARED, and of no draft in one group."""
    found: dict[object, int] = {}
    for index, candidate in enumerate(ordered):
        found.setdefault(candidate.family, index)
        if candidate.speculation in COMPARED:
            found.setdefault(candidate.speculation, index)
        if is_null(candidate):
            found.setdefault("null", index)
    return sorted(set(found.values()))


def is_null(candidate: Candidate) -> bool:
    """Whether all workers are one group of the target, without a draft."""
    whole = Deployment(candidate.deployment.num_workers)
    return candidate.speculation.kind == "plain" and candidate.deployment == whole


def survivors(ordered: Sequence[Entry], num_kept: int) -> list[Candidate]:
    """The first few, each policy on a deployment once, and what every table must show."""
    best: dict[tuple[SpeculationSpec, Deployment], int] = {}
    for index, entry in enumerate(ordered):
        best.setdefault((entry.candidate.speculation, entry.candidate.deployment), index)
    first = list(best.values())[:num_kept]
    shown = representatives([entry.candidate for entry in ordered])
    return [ordered[index].candidate for index in sorted({*first, *shown})]


def finalists(ordered: Sequence[Entry], num_requests: int) -> list[Candidate]:
    """Candidates to simulate with every seed.

    Of a long trace only the first few and the best plan without a draft: there luck evens out, and
    what the seeds of these differ by stands for the others.
    """
    is_long = num_requests > _SHORT
    if not is_long:
        return survivors(ordered, _NUM_FINALISTS[0])
    first = [entry.candidate for entry in ordered[: _NUM_FINALISTS[1]]]
    plain = [e.candidate for e in ordered if e.candidate.family == "plain"][:1]
    return list(dict.fromkeys([*first, *plain]))
