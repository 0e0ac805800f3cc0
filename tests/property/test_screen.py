"""The screen against simulating everything, on random machines, drafts, traces and targets."""

from __future__ import annotations

import os

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.config import SLO, Serving
from codesign.fit import Fit
from codesign.planner.executor import Job, Task, run_job
from codesign.planner.halving import NUM_CLIMBS, entering, neighbours
from codesign.planner.predict import misses, score
from codesign.planner.ranking import CRITERIA, NOTICEABLE, Entry, may_be_best, rank
from codesign.planner.screen import screen
from codesign.planner.search_space import search_space
from codesign.policy.cost import Calibration, RoundCost, StepTime

NUM_PROBLEMS = 200
NUM_PARTS = 40  # of 10 to 20 seconds: a loaded machine must not run into the limit of a test
NUM_PROFILES = 5  # drafts; their policies are played once for all problems
POLICIES = ("plain", "chain-1", "chain-2", "chain-4", "tree-4x2x2", "async-tree-4x2x2")
SERVING = Serving(max_kv_tokens=3000)
PROFILES = [
    AcceptanceProfile.independent([0.25 + 0.13 * i, 0.1, 0.05], num_tokens=400, seed=i)
    for i in range(NUM_PROFILES)
]


def made_cost(rng, workers: int, draft_workers: int, base: dict[str, float]) -> RoundCost:
    share = base["scaling"] ** np.log2(workers)
    draft_share = base["scaling"] ** np.log2(draft_workers or workers)
    rows = (1, 8, 64, 256)
    target = tuple(base["target"] * share * (1 + base["row"] * (r - 1)) for r in rows)
    draft = tuple(base["draft"] * draft_share * (1 + 0.2 * base["row"] * (r - 1)) for r in rows)
    return RoundCost(
        target=StepTime(1e-7, rows, target),
        draft=StepTime(1e-8, rows, draft),
        prefill=StepTime.linear(alpha=0.0, gamma=base["prompt"] * share, delta=target[0]),
        draft_prefill=StepTime.linear(alpha=0.0, gamma=0.1 * base["prompt"], delta=draft[0]),
        reroot=0.0002,
        link=0.0002 if draft_workers else 0.0,
    )


def made_problem(number: int):
    """Fit, requests, SLO and objective."""
    rng = np.random.default_rng(number)
    base = {
        "target": rng.uniform(0.01, 0.04),
        "draft": rng.uniform(0.001, 0.008),
        "row": 10 ** rng.uniform(-2.5, -0.7),
        "prompt": 10 ** rng.uniform(-4.5, -3.3),
        "scaling": rng.uniform(0.55, 0.9),
    }
    splits = [(1, 0), (2, 0), (4, 0), (1, 1), (3, 1), (2, 2)]
    costs = {f"{t}+{d}" if d else str(t): made_cost(rng, t, d, base) for t, d in splits}
    fit = Fit("t", "d", 0.0, costs, Calibration(), PROFILES[number % NUM_PROFILES], {})
    num = int(rng.integers(25, 50))
    gap = base["target"] * 10 ** rng.uniform(-0.5, 1.2)
    requests = pd.DataFrame(
        {
            "arrival": np.cumsum(rng.exponential(gap, num)),
            "prompt_tokens": rng.integers(20, 300, num),
            "output_tokens": rng.integers(5, 60, num),
            "category": "",
        }
    )
    targets = rng.random()
    tpot = base["target"] * rng.uniform(0.5, 2.5)
    slo = SLO() if targets < 0.5 else SLO(tpot=tpot, percentile=80.0)
    return fit, requests, slo, ("goodput", "latency")[number % 2]


def simulated(number: int):
    """Every candidate simulated, best first; those that a search would simulate; the objective."""
    fit, requests, slo, objective = made_problem(number)
    space = search_space(
        fit.costs, workers=4, max_batch=16, policies=POLICIES, serving=SERVING, requests=requests
    )
    screened = screen(space.candidates, requests, fit, slo=slo, serving=SERVING)
    task = Task(requests, fit, slo, SERVING)
    entries = []
    for candidate in space.candidates:
        outcome = run_job(task, Job(candidate, 0, 0, len(requests)))
        scored = score(candidate, [outcome], fit, slo, output_tokens=requests["output_tokens"])
        miss = max(misses([outcome], slo).values())
        entries.append(Entry(candidate, (outcome,), scored, miss))
    ordered = rank(entries, objective)
    kept = set()
    for is_second in (False, True):
        entered = entering(screened, objective, slo.percentile, len(requests), is_second=is_second)
        kept |= {space.candidates[i] for i in entered}
        for _ in range(NUM_CLIMBS):
            kept |= set(neighbours([e for e in ordered if e.candidate in kept], space.candidates))
        assert is_second or len(kept) <= len(ordered) // 3
        first = next(e.scored for e in ordered if e.candidate in kept)
        if not first.is_feasible or may_be_best(first, objective):
            break
    return ordered, kept, objective


def loss(best: Entry, kept: Entry, objective: str) -> float:
    """How much worse the kept one is in the first criterion in which they differ noticeably."""
    if not best.scored.is_feasible:
        return 0.0
    if not kept.scored.is_feasible:
        return np.inf
    if may_be_best(best.scored, objective) and not may_be_best(kept.scored, objective):
        return np.inf
    for figure, more_is_better in CRITERIA[objective]:
        ours, theirs = best.outcomes[0].figures[figure], kept.outcomes[0].figures[figure]
        worse = (ours - theirs) / ours if more_is_better else (theirs - ours) / ours
        if abs(worse) > NOTICEABLE:
            return max(worse, 0.0)
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    # All 200 take minutes: CI, which has 25 of them for everything, tries 10.
    range(0, NUM_PARTS, 20 if os.environ.get("CI") else 1),
)
def test_a_search_simulates_the_best_plan_of_random_problems(part):
    """What it leaves out is never noticeably (1 %) better, although it is two thirds of all.

    Short traces are the hard ones: with 25 to 50 requests, luck decides between batch limits. Where
    plans that are faster than the best do not bear the load, it may be 6 % better.
    """
    dropped = {}
    for number in range(part, NUM_PROBLEMS, NUM_PARTS):
        ordered, kept, objective = simulated(number)
        first = next(entry for entry in ordered if entry.candidate in kept)
        is_at_the_edge = not all(may_be_best(e.scored, objective) for e in ordered)
        if (worse := loss(ordered[0], first, objective)) > 0.06 * is_at_the_edge:
            dropped[number] = worse
    assert not dropped
