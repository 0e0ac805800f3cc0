from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

import codesign.planner.executor
from codesign.config import SLO, Serving
from codesign.errors import InfeasibleError, UsageError
from codesign.planner import Question, search
from codesign.planner.fewest import search_fewest
from codesign.policy.cost import RoundCost, StepTime


@pytest.fixture
def question(machine_fit):
    """A machine on which n workers take 0.04 / n seconds a step, and replicas pay off."""

    def cost(workers: int) -> RoundCost:
        step = StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.04 / workers)
        return RoundCost(step, step, step, step)

    fit = dataclasses.replace(machine_fit, costs={str(n): cost(n) for n in (1, 2, 4)}, errors={})
    requests = pd.DataFrame(
        {
            "arrival": np.arange(20) * 1.0,
            "prompt_tokens": 20,
            "output_tokens": 30,
            "category": "chat",
        }
    )
    return Question(
        requests,
        fit,
        SLO(tpot=0.025),
        Serving(max_kv_tokens=4096),
        objective="fewest",
        workers=4,
        max_batch=4,
        policies=("plain",),
    )


def test_the_fewest_workers_that_meet_the_slo_are_taken(question):
    stages: dict[str, None] = {}
    answer = search_fewest(question, progress=lambda stage, *_: stages.setdefault(stage))
    assert next(iter(stages)) == "screen on 1 worker"
    assert list(stages)[-2:] == ["screen on 2 workers", "simulate on 2 workers"]
    assert answer.chosen.candidate.deployment.num_workers == 2
    assert answer.reason.startswith("2 workers are the fewest that meet the SLO; 1 does not; ")
    with pytest.raises(InfeasibleError):
        search(dataclasses.replace(question, workers=1))


def test_what_smaller_numbers_miss_is_not_looked_for(question, monkeypatch):
    monkeypatch.setattr("codesign.planner.fewest._HOPELESS", 0.0)  # every number is simulated
    stages: dict[str, None] = {}
    answer = search_fewest(question, progress=lambda stage, *_: stages.setdefault(stage))
    assert answer.reason.startswith("2 workers are the fewest that meet the SLO; 1 does not; ")
    assert "simulate on 1 worker" in stages
    assert not [stage for stage in stages if "miss" in stage]


def test_a_number_that_is_far_off_is_not_simulated(question, monkeypatch):
    simulated = set()
    simulate = codesign.planner.executor.simulate_outcome

    def recorded(requests, candidate, *args, **options):
        simulated.add(candidate.deployment.num_workers)
        return simulate(requests, candidate, *args, **options)

    monkeypatch.setattr(codesign.planner.executor, "simulate_outcome", recorded)
    search_fewest(question)
    assert simulated == {2}


def test_numbers_that_the_fit_does_not_know_are_named(question):
    costs = {label: question.fit.costs[label] for label in ("2", "4")}
    fit = dataclasses.replace(question.fit, costs=costs)
    answer = search_fewest(dataclasses.replace(question, fit=fit))
    assert "(the fit has no plan for 1)" in answer.reason


def test_where_none_suffices_the_nearest_miss_of_all_workers_is_named(question):
    with pytest.raises(InfeasibleError, match="on 4"):
        search_fewest(dataclasses.replace(question, slo=SLO(tpot=0.005)))


def test_without_a_target_there_is_nothing_to_meet(question):
    with pytest.raises(UsageError, match="--slo-tpot-ms"):
        search_fewest(dataclasses.replace(question, slo=SLO()))


def test_workers_on_which_the_queue_never_ends_are_too_few(question):
    """TPOT alone is kept by serving one request at a time, however many wait."""
    requests = question.requests.assign(arrival=np.arange(20) * 0.25)
    asked = dataclasses.replace(question, requests=requests, slo=SLO(tpot=0.05), max_batch=1)
    answer = search_fewest(asked)
    assert answer.chosen.saturation != "overloaded"
    workers = answer.chosen.candidate.deployment.num_workers
    assert workers > 1
    assert answer.reason.startswith(
        f"{workers} workers are the fewest that meet the SLO and bear the load"
    )
    assert "; on 1" in answer.reason


def test_where_no_number_of_workers_bears_the_load_the_most_are_taken_and_it_is_said(question):
    requests = question.requests.assign(arrival=np.arange(20) * 0.01)
    asked = dataclasses.replace(question, requests=requests, slo=SLO(tpot=0.05), max_batch=1)
    answer = search_fewest(asked)
    assert answer.chosen.candidate.deployment.num_workers == 4
    assert answer.reason.startswith("no plan that meets the SLO can sustain this load")
