"""What would change the planner's choice: doubts are held against searches with the term moved."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

import codesign.planner.executor
from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.planner import Question, search, sensitivity, task_of
from codesign.planner.executor import run_jobs
from codesign.planner.predict import Outcome
from codesign.planner.ranking import Entry
from codesign.planner.sensitivity import find_doubts
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.speculation import parse_policy

POLICIES = ("plain", "chain-1", "chain-2", "chain-4")


def entry(candidate: Candidate, *latencies: float) -> Entry:
    """A plan that meets the SLO, with a mean latency per seed."""
    outcomes = tuple(
        Outcome(candidate.label, seed, {"goodput": 1.0, "latency_mean": latency}, {}, 1)
        for seed, latency in enumerate(latencies)
    )
    return Entry(candidate, outcomes, ScoredCandidate(candidate, {}, {}, "fitted", True), 0.0)


def simulated(question: Question):
    """What runs the jobs of doubts in this process."""
    return lambda jobs: run_jobs(task_of(question), jobs)


@pytest.fixture
def question(machine_fit):
    requests = pd.DataFrame(
        {
            "arrival": [2.0 * n for n in range(12)],
            "prompt_tokens": 40,
            "output_tokens": 40,
            "category": "chat",
        }
    )
    return Question(
        requests,
        dataclasses.replace(machine_fit, errors={}),
        SLO(),
        Serving(max_kv_tokens=4096),
        objective="latency",
        workers=2,
        max_batch=2,
        policies=POLICIES,
    )


def test_terms_without_an_error_leave_no_doubt(question):
    assert search(question).doubts == ()


def test_small_errors_leave_no_doubt_where_the_choice_is_clear(question):
    fit = dataclasses.replace(question.fit, errors={"2/target": 1e-4, "2/draft": 1e-4})
    assert search(dataclasses.replace(question, fit=fit)).doubts == ()


@pytest.mark.parametrize(("op", "error"), [("draft", 0.9), ("target", 0.9)])
def test_a_doubt_comes_true_when_the_term_is_off_by_its_error(question, op, error):
    fit = dataclasses.replace(question.fit, errors={f"2/{op}": error})
    answer = search(dataclasses.replace(question, fit=fit))
    (doubt,) = answer.doubts
    assert doubt.term == f"{op} step of 2"
    assert abs(doubt.change) == error
    cost = fit.costs["2"]
    moved = dataclasses.replace(cost, **{op: getattr(cost, op).scaled(1.0 + doubt.change)})
    machine = dataclasses.replace(fit, costs={**fit.costs, "2": moved})
    after = {s.label: s for s in search(dataclasses.replace(question, fit=machine)).ranked}
    ours, theirs = (
        after[label].predicted["tpot_mean"].value for label in (answer.chosen.label, doubt.rival)
    )
    assert theirs < ours
    assert (ours - theirs) / ours == pytest.approx(doubt.regret, abs=0.05)


def test_what_only_the_arithmetic_of_queues_doubts_is_not_told(question):
    """Near saturation it said that chain-4 would be 8 % better, where simulations say no such."""
    requests = pd.concat([question.requests] * 4, ignore_index=True)
    requests["arrival"] = [0.3 * n for n in range(len(requests))]
    fit = dataclasses.replace(question.fit, errors={"2/prefill": 0.9})
    asked = dataclasses.replace(
        question, requests=requests, fit=fit, objective="goodput", max_batch=4
    )
    answer = search(asked)
    assert answer.chosen.saturation == "stable"
    assert answer.doubts == ()


def test_a_doubt_says_in_which_figure_the_rival_would_be_better(question):
    fit = dataclasses.replace(question.fit, errors={"2/draft": 0.9})
    (doubt,) = search(dataclasses.replace(question, fit=fit)).doubts
    assert doubt.figure == "tpot_mean"


def test_where_simulation_clears_the_first_rival_the_next_one_is_simulated(question, monkeypatch):
    """Arithmetic named the wrong plan, so that no doubt was told at all."""
    fit = dataclasses.replace(question.fit, errors={"2/draft": 0.9})
    asked = dataclasses.replace(question, fit=fit)
    (doubt,) = search(asked).doubts
    simulate = codesign.planner.executor.run_job

    def slow_rival(task, job):
        is_slow = job.candidate.label == doubt.rival and job.costs is not None
        made = simulate(task, job)
        slower = {name: 9.0 * value for name, value in made.figures.items()}
        return dataclasses.replace(made, figures=slower) if is_slow else made

    monkeypatch.setattr(codesign.planner.executor, "run_job", slow_rival)
    (other,) = search(asked).doubts
    assert other.rival != doubt.rival
    assert (other.term, other.change) == (doubt.term, doubt.change)


def test_no_simulation_of_a_doubt_is_made_twice(question, monkeypatch):
    """Nor again if the search has made it: that was half of them."""
    errors = {"2/target": 0.9, "2/draft": 0.9, "acceptance": 0.5}
    asked = dataclasses.replace(question, fit=dataclasses.replace(question.fit, errors=errors))
    made = []
    simulate = codesign.planner.executor.run_job

    def noted(task, job):
        made.append(repr(job))
        return simulate(task, job)

    monkeypatch.setattr(codesign.planner.executor, "run_job", noted)
    assert len(search(asked).doubts) == 3
    assert len(set(made)) == len(made)


def test_fewer_tokens_per_round_speak_for_less_drafting(question):
    fit = dataclasses.replace(question.fit, errors={"acceptance": 0.5})
    answer = search(dataclasses.replace(question, fit=fit))
    doubt = next(d for d in answer.doubts if d.term == "tokens per round")
    assert doubt.change < 0
    assert doubt.rival.startswith("plain")


def test_long_answers_may_be_doubted_where_short_ones_are_not(question):
    fit = dataclasses.replace(question.fit, parts_covariance=((0.0, 0.0), (0.0, 0.25)))
    short = dataclasses.replace(question, fit=fit)
    assert search(short).doubts == ()
    requests = question.requests.assign(output_tokens=4000)
    requests["arrival"] *= 100
    long = dataclasses.replace(short, requests=requests, serving=Serving(max_kv_tokens=9000))
    (doubt,) = search(long).doubts
    assert doubt.term == "tokens per round"
    assert doubt.change == pytest.approx(-0.5 * (1 - 64 / 4000))


def test_the_worst_doubt_comes_first(question):
    errors = {"2/target": 0.9, "2/draft": 0.9, "acceptance": 0.5}
    fit = dataclasses.replace(question.fit, errors=errors)
    regrets = [d.regret for d in search(dataclasses.replace(question, fit=fit)).doubts]
    assert len(regrets) == 3
    assert regrets == sorted(regrets, reverse=True)


def test_the_workers_that_run_prompts_alone_may_be_doubted_too(question):
    step = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.02)
    prompt = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.5)
    costs = dict.fromkeys("123", RoundCost(step, step, prompt, prompt))
    fit = dataclasses.replace(question.fit, costs=costs, errors={"1/prefill": 0.9})
    plain = parse_policy("plain")
    plans = [Candidate(parse_deployment(label), plain, 4) for label in ("2/p1", "3")]
    ranked = [entry(plan, 2.0) for plan in plans]
    asked = dataclasses.replace(question, fit=fit, objective="goodput", workers=3)
    (doubt,) = find_doubts(ranked, asked, simulated(asked))
    assert (doubt.term, doubt.change) == ("prompt step of 1", 0.9)
    assert doubt.rival == plans[1].label


def test_a_plan_with_fewer_seeds_is_no_rival_for_its_luck(question):
    """With the seed that both have the plans are equal; the best has met worse luck since."""
    fit = dataclasses.replace(question.fit, errors={"2/target": 0.02})
    chain = parse_policy("chain-2")
    plans = [Candidate(parse_deployment("2"), chain, batch) for batch in (1, 2)]
    ranked = [entry(plans[0], 2.0, 3.0, 4.0), entry(plans[1], 2.0)]
    asked = dataclasses.replace(question, fit=fit, objective="goodput")
    assert find_doubts(ranked, asked, simulated(asked)) == ()


def test_a_draft_that_takes_longer_has_dearer_children_too(machine_fit):
    cost = dataclasses.replace(next(iter(machine_fit.costs.values())), child=1e-5)
    for op, child in (("draft", 2e-5), ("target", 1e-5)):
        moved = sensitivity._scaled(cost, op, 2.0)
        assert moved.child == child
        for name in ("draft", "target"):
            assert getattr(moved, name)(4, 9) == getattr(cost, name)(4, 9) * (1 + (name == op))
