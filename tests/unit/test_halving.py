"""Successive halving against made-up simulations whose best candidate is known."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import SLO, Deployment, Serving, parse_deployment
from codesign.errors import InfeasibleError
from codesign.planner import Answer, Question, search
from codesign.planner.executor import Job
from codesign.planner.halving import entering, is_null, rungs, survivors, typical_stretch
from codesign.planner.predict import Outcome
from codesign.planner.ranking import Entry
from codesign.planner.screen import Screened
from codesign.planner.search_space import default_policies
from codesign.policy.speculation import parse_policy

POLICIES = (
    "plain", "chain-1", "chain-2", "chain-3", "chain-5", "tree-4x2x2", "tree-8x2x2",
    "async-tree-4x1x2", "async-tree-4x2x2",
)  # fmt: skip
SPANS = {"target": 0.03, "draft": 0.01, "reroot": 0.0, "link_there": 0.0, "link_back": 0.0}


def tpot_of(job: Job) -> float:
    """Any number, but of a candidate always the same: no luck, and no truth in the screen."""
    return 0.02 + zlib.crc32(job.candidate.label.encode()) / 2**32


def worst_without_draft(job: Job) -> float:
    return tpot_of(job) + (10.0 if job.candidate.family == "plain" else 0.0)


class MadeUp:
    """An executor that looks figures up instead of simulating."""

    def __init__(self, tpot=tpot_of) -> None:
        self.tpot = tpot
        self.jobs: list[Job] = []

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Outcome]]:
        self.jobs += jobs
        for number, job in enumerate(jobs):
            tpot = self.tpot(job)
            figures = {
                "tpot_mean": tpot, "tpot_slo": tpot, "ttft_slo": 0.1, "latency_mean": 20 * tpot,
                "goodput": 1 / tpot, "mean_batch": 1.0, "acceptance_length": 2.0,
            }  # fmt: skip
            yield (
                number,
                Outcome(
                    job.candidate.label, job.seed, figures, SPANS, 8, num_requests=job.num_requests
                ),
            )

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None: ...


def requests(num: int) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "arrival": np.cumsum(rng.exponential(2.0, num)),
            "prompt_tokens": rng.integers(20, 80, num),
            "output_tokens": rng.integers(12, 40, num),
            "category": "chat",
        }
    )


@pytest.fixture(params=[40, 6000], ids=["short", "long"])
def question(request, machine_fit) -> Question:
    return Question(
        requests(request.param), machine_fit, SLO(tpot=100.0), Serving(max_kv_tokens=4096),
        objective="latency", workers=2, max_batch=8, policies=POLICIES, num_seeds=2,
    )  # fmt: skip


def answered(question: Question, tpot=tpot_of) -> tuple[Answer, MadeUp]:
    executor = MadeUp(tpot)
    return search(question, executor=executor), executor


def test_the_best_of_what_was_simulated_is_chosen(question):
    answer, executor = answered(question)
    best = min(map(tpot_of, executor.jobs))
    assert answer.chosen.predicted["tpot_mean"].value == pytest.approx(best, rel=0.011)
    assert len({job.candidate for job in executor.jobs}) >= len(POLICIES)


def test_the_table_is_in_order(question):
    ranked = answered(question)[0].ranked
    values = [scored.predicted["tpot_mean"].value for scored in ranked]
    assert all(a <= b * 1.0101 for a, b in pairwise(values))


def test_every_prediction_says_of_how_many_simulations_it_is_the_mean(question):
    answer, executor = answered(question)
    num = len(question.requests)
    for scored in answer.ranked:
        whole = {j.seed for j in executor.jobs
                 if j.candidate == scored.candidate and j.num_requests == num}  # fmt: skip
        assert scored.num_seeds == len(whole)
    assert answer.chosen.num_seeds == question.num_seeds


def test_progress_reaches_its_end_once_and_at_the_end(question):
    seen: dict[str, list[tuple[int, int]]] = {}

    def record(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append((done, total))

    search(question, executor=MadeUp(), progress=record)
    assert list(seen) == ["screen", "simulate"]
    assert [step for step in seen["simulate"] if step[0] >= step[1]] == seen["simulate"][-1:]
    assert all(done <= total for done, total in seen["simulate"])


def told(question: Question) -> dict[str, list[float]]:
    """Share that was told as left, by stage."""
    left: dict[str, list[float]] = {}

    def record(stage: str, done: int, total: int) -> None:
        left.setdefault(stage, []).append(1 - done / total)

    with contextlib.suppress(InfeasibleError):
        search(question, executor=MadeUp(), progress=record)
    return left


def most_growth(shares: Sequence[float]) -> float:
    return max(after - before for before, after in pairwise(shares))


def test_what_is_told_as_left_hardly_grows(question):
    """It did by 7 %, as plans to repeat were counted once they came, and doubts not at all."""
    fit = replace(question.fit, errors={"2/target": 0.9, "2/draft": 0.9, "1+1/draft": 0.9})
    left = told(replace(question, fit=fit, policies=()))
    assert list(left) == ["screen", "simulate"]
    assert most_growth(left["simulate"]) < 0.03


def test_what_is_simulated_as_the_first_were_not_good_enough_is_a_stage_of_its_own(question):
    best = answered(question)[0].chosen.predicted["tpot_mean"].value
    left = told(replace(question, slo=SLO(tpot=0.9 * best)))
    assert list(left)[:3] == ["screen", "simulate", "simulate more"]
    assert all(most_growth(left[stage]) < 0.03 for stage in list(left)[1:3])


def test_what_is_tried_for_a_nearest_miss_is_a_stage_of_its_own(question):
    seen: dict[str, list[tuple[int, int]]] = {}

    def record(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append((done, total))

    hard = replace(question, slo=SLO(tpot=0.001))
    with pytest.raises(InfeasibleError):
        search(hard, executor=MadeUp(), progress=record)
    assert list(seen)[:3] == ["screen", "simulate", "nearest miss"]
    for stage in list(seen)[1:]:
        assert [step for step in seen[stage] if step[0] >= step[1]] == seen[stage][-1:], stage


def test_plain_decoding_on_all_workers_is_never_dropped(question):
    answer, executor = answered(question, worst_without_draft)
    null = [s for s in answer.ranked if is_null(s.candidate)]
    assert null
    assert null[0].predicted["tpot_mean"].value > 10.0
    num = len(question.requests)
    whole = [job for job in executor.jobs if is_null(job.candidate) and job.num_requests == num]
    assert whole  # on the whole trace, too


def test_the_same_question_gets_the_same_answer_and_the_same_simulations(question):
    one, other = answered(question), answered(question)
    assert one[0] == other[0]
    assert one[1].jobs == other[1].jobs


def test_a_candidate_that_only_the_whole_trace_shows_to_be_bad_is_not_chosen(question):
    num = len(question.requests)
    first = answered(question)[0].chosen.candidate

    def trap(job: Job) -> float:
        is_bad = job.candidate == first and job.num_requests == num
        return 50.0 if is_bad else tpot_of(job)

    answer = answered(question, trap)[0]
    assert answer.chosen.candidate != first
    assert first in {scored.candidate for scored in answer.ranked}


def test_a_candidate_that_misses_the_slo_is_not_chosen_however_fast_the_others_are(question):
    def slow(job: Job) -> float:
        return tpot_of(job) if job.candidate.family == "plain" else 200.0

    answer = answered(question, slow)[0]
    assert answer.chosen.candidate.family == "plain"
    assert answer.num_feasible < len(answer.ranked)


def test_luck_with_the_first_seed_does_not_make_a_plan_the_best(question):
    def lucky(job: Job) -> float:
        is_bad = job.candidate.family != "plain" and job.seed > question.seed
        return 200.0 if is_bad else tpot_of(job)

    answer, executor = answered(question, lucky)
    assert answer.chosen.candidate.family == "plain"
    num = len(question.requests)
    own = (j for j in executor.jobs if j.candidate == answer.chosen.candidate)
    assert {j.seed for j in own if j.num_requests == num} == {0, 1}


def test_the_rate_of_a_nearest_miss_holds_on_all_requests(question):
    """A stretch may be calmer than the whole trace."""
    num = len(question.requests)

    def calm_stretch(job: Job) -> float:
        return 1000.0 * job.rate * (1.0 if job.num_requests == num else 0.2)

    with pytest.raises(InfeasibleError, match="times this arrival rate it meets the SLO") as err:
        answered(question, calm_stretch)
    rate = float(re.search(r"At ([\d.]+) times", str(err.value))[1])
    assert 0.09 < rate <= 0.1  # of 1000 s, the target is 100 s


def test_an_slo_that_only_a_stretch_misses_is_met_at_a_rate_of_all_requests(question):
    num = len(question.requests)

    def hard_stretch(job: Job) -> float:
        return 1000.0 * job.rate if job.num_requests == num else 500.0

    with pytest.raises(InfeasibleError, match=r"At 0\.09\d? times|At 0\.1 times"):
        answered(question, hard_stretch)


def test_fewer_candidates_are_left_on_longer_stretches(question):
    jobs = answered(question)[1].jobs
    counts: dict[int, set] = {}
    for job in jobs:
        counts.setdefault(job.num_requests, set()).add(job.candidate)
    sizes = [len(counts[length]) for length in sorted(counts)]
    assert sizes == sorted(sizes, reverse=True)
    assert max(counts) == len(question.requests)
    if len(question.requests) > 2000:
        assert sizes[0] > 2 * sizes[-1]


def test_the_best_few_go_on_each_policy_once_with_the_best_of_each_family_and_the_null_plan():
    labels = ["tree-8x2x2", "tree-8x2x2", "tree-4x2x2", "tree-4x1x2", "tree-4x4x2", "chain-2",
              "chain-5", "chain-3", "plain"]  # fmt: skip
    found = [
        Candidate(Deployment(2), parse_policy(label), limit)
        for limit, label in enumerate(labels, start=1)
    ]
    ordered = [Entry(c, (), ScoredCandidate(c, {}, {}, "fitted", True), 0.0) for c in found]
    kept = [c.max_batch for c in survivors(ordered, 3)]
    assert kept == [1, 3, 4, 6, 8, 9]


def test_stretches_grow_to_the_whole_trace_and_lie_in_it():
    for num in (1, 17, 6000, 19_366):
        found = rungs(requests(num))
        lengths = [rung.end - rung.first for rung in found]
        assert lengths == sorted(lengths)
        assert (found[-1].first, found[-1].end) == (0, num)
        assert all(0 <= rung.first < rung.end <= num for rung in found)


def test_a_typical_stretch_has_the_rate_of_the_trace():
    quiet, busy = np.full(400, 4.0), np.full(400, 0.1)
    usual = np.full(400, 1.0)
    arrival = np.cumsum(np.concatenate([quiet, usual, busy, usual * 1.3]))
    first, end = typical_stretch(arrival, 200)
    assert end - first == 200
    seconds = arrival[end - 1] - arrival[first]
    assert 200 / seconds == pytest.approx(len(arrival) / arrival[-1], rel=0.35)
    assert typical_stretch(arrival, 5000) == (0, 1600)


def screened(labels: Sequence[str], attained: float = 1.0) -> Screened:
    """Plans of all policies at four limits on each deployment, scores from good to bad."""
    found = [
        Candidate(parse_deployment(label), spec, 2**size)
        for spec in default_policies()
        for label in labels
        for size in range(4)
        if not spec.is_async
    ]
    rising = 1.0 + np.arange(len(found))
    good = np.full(len(found), attained)
    return Screened(found, rising * 0, rising, rising, good, 1 / rising)


@pytest.mark.parametrize("labels", [["1"], ["1", "2"], ["1", "2", "3", "4", "5", "6", "7"]])
def test_forty_plans_are_simulated_first_however_many_deployments_there_are(labels):
    """A fifth for each of two deployments, or of one, would leave most of the 40 places empty."""
    first = entering(screened(labels), "goodput", 90.0, 100)
    assert 40 <= len(first) <= 40 + len(labels) + 8


def test_where_none_meets_the_slo_by_little_more_are_simulated_until_one_does(question):
    first = {job.candidate for job in answered(question)[1].jobs}

    def hard(job: Job) -> float:
        """What is simulated first misses the target of 100 s by a tenth."""
        return 110.0 if job.candidate in first else 90.0

    chosen = answered(question, hard)[0].chosen
    assert chosen.is_feasible
    assert chosen.candidate not in first


def test_where_all_miss_the_slo_by_far_no_more_are_simulated(question):
    executor = MadeUp(lambda job: 1000.0 + tpot_of(job))
    near = MadeUp(lambda job: 110.0 + tpot_of(job))
    for made_up in (executor, near):
        with pytest.raises(InfeasibleError):
            search(question, executor=made_up)
    numbers = [len({job.candidate for job in m.jobs if job.rate == 1.0}) for m in (executor, near)]
    assert numbers[0] < numbers[1]
