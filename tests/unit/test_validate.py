from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from codesign.artifacts import header, write_table
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.cli.validate import _overview
from codesign.config import SLO, Deployment, Serving
from codesign.errors import InputError
from codesign.file_ref import FileRef
from codesign.metrics import summarise, tpot
from codesign.plan import Plan
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.records import RoundLog
from codesign.run_directory import write_run
from codesign.sim import simulate
from codesign.validate import (
    CHECKED,
    Comparison,
    RunComparison,
    _other_plan,
    validate,
)
from codesign.validate.ranking import rank, rank_correlation
from codesign.validate.words import cause

POLICIES = ("plain", "chain-3", "tree-8x2x2", "async-tree-8x2x3")


def candidate(policy: str) -> Candidate:
    spec = parse_policy(policy)
    return Candidate(Deployment(1, 1) if spec.is_async else Deployment(2), spec, 4)


@pytest.fixture
def plan(tmp_path, machine_fit) -> Plan:
    rng = np.random.default_rng(1)
    requests = pd.DataFrame(
        {
            "arrival": np.concatenate([[0.0], np.cumsum(rng.exponential(0.5, 11))]),
            "prompt_tokens": rng.integers(20, 80, 12),
            "output_tokens": rng.integers(16, 48, 12),
            "category": rng.choice(["chat", "code"], 12),
        }
    )
    write_table(tmp_path / "trace.parquet", requests, header("trace", seed=None))
    machine_fit.save(tmp_path / "fit.json")
    chosen = ScoredCandidate(candidate("tree-8x2x2"), {}, {}, "fitted", is_feasible=True)
    return Plan(
        target="target",
        draft="draft",
        slo=SLO(ttft=1.0, tpot=0.05),
        objective="goodput",
        sampling=Sampling(),
        serving=Serving(max_kv_tokens=4096),
        trace=FileRef.of(tmp_path / "trace.parquet"),
        num_requests=12,
        fit=FileRef.of(tmp_path / "fit.json"),
        seed=0,
        num_seeds=3,
        chosen=chosen,
    )


@pytest.fixture
def make_run(plan, machine_fit, tmp_path):
    """Write a "measured" run: another simulation, with all times stretched."""

    def make(policy: str, *, stretch=1.0, seed=99, requests=None, change=None, name=None):
        served = plan.requests() if requests is None else requests
        records = simulate(
            served, candidate(policy), machine_fit, serving=Serving(max_kv_tokens=4096), seed=seed
        )
        records.notes.clear()
        for request in records.requests:
            request.first_token = request.arrival + stretch * (
                request.first_token - request.arrival
            )
            request.finish = request.arrival + stretch * (request.finish - request.arrival)
        records.rounds = RoundLog(
            dataclasses.replace(r, target=stretch * r.target, draft=stretch * r.draft)
            for r in records.rounds
        )
        records.seconds *= stretch
        if change:
            change(records)
        path = tmp_path / "runs" / (name or policy)
        summary = {"candidate": candidate(policy).to_dict()}
        write_run(path, records, origin="measured", summary=summary, seed=seed)
        return path, records

    return make


def test_a_run_that_behaves_as_predicted_is_within_the_tolerance(plan, machine_fit, make_run):
    paths = [make_run(policy)[0] for policy in POLICIES]
    validation = validate(plan, machine_fit, paths)
    assert validation.outside(0.15) == []
    assert [run.candidate.speculation.label for run in validation.runs] == list(POLICIES)
    assert {run.origin for run in validation.runs} == {"measured"}


def test_a_run_that_is_slower_than_predicted_is_found(plan, machine_fit, make_run):
    path, records = make_run("plain", stretch=1.5)
    validation = validate(plan, machine_fit, [path])
    (run,) = validation.runs
    error = run.figure("tpot_mean").error
    assert error == pytest.approx(1 / 1.5 - 1, abs=1e-6)
    assert run.figure("tpot_mean").measured == summarise(records, plan.slo).tpot_mean
    assert not run.figure("tpot_mean").is_inside
    assert {figure.name for _, figure in validation.outside(0.15)} == {"tpot_mean", "throughput"}
    assert validation.outside(0.60) == []


def test_the_largest_error_comes_first(plan, machine_fit, make_run):
    paths = [make_run("plain", stretch=1.3)[0], make_run("chain-3", stretch=2.0)[0]]
    outside = validate(plan, machine_fit, paths).outside(0.1)
    assert outside[0][0].candidate.speculation.label == "chain-3"
    sizes = [abs(figure.error) for _, figure in outside]
    assert sizes == sorted(sizes, reverse=True)


def test_another_acceptance_length_is_found_as_such(plan, machine_fit, make_run):
    def accept_less(records):
        for request in records.requests:
            request.num_rounds *= 2

    validation = validate(plan, machine_fit, [make_run("chain-3", change=accept_less)[0]])
    names = {figure.name for _, figure in validation.outside(0.15)}
    assert names == {"acceptance_length"}
    assert names < set(CHECKED)


def test_requests_are_joined_one_by_one(plan, machine_fit, make_run):
    path, records = make_run("plain", stretch=1.25)
    table = validate(plan, machine_fit, [path]).runs[0].requests
    assert table["request_id"].tolist() == list(range(12))
    assert table["measured_tpot"].tolist() == [tpot(request) for request in records.requests]
    # Plain decoding draws nothing, so each request is predicted exactly.
    np.testing.assert_allclose(table["measured_tpot"] / table["predicted_tpot"], 1.25)
    error = validate(plan, machine_fit, [path]).runs[0].request_error("tpot")
    assert error == pytest.approx(0.2)


def test_a_draft_prompt_is_no_part_of_the_draft_span(plan, machine_fit, make_run):
    long_prompts = dataclasses.replace(
        machine_fit,
        costs={
            label: dataclasses.replace(cost, draft_prefill=cost.draft_prefill.scaled(10.0))
            for label, cost in machine_fit.costs.items()
        },
    )
    path, _ = make_run("tree-8x2x2")
    [run] = validate(plan, long_prompts, [path]).runs
    span = next(span for span in run.spans if span.name == "draft")
    assert span.error == pytest.approx(0.0, abs=0.15)
    seconds = next(each for each in run.rounds if each.name == "seconds")
    assert seconds.error == pytest.approx(0.0, abs=0.15)


def test_other_kinds_of_prompt_may_be_simulated_than_the_plan_names(plan, machine_fit, make_run):
    path, _ = make_run("chain-3")
    own = plan.requests().assign(category="nothing recorded")
    [usual], [other] = (validate(plan, machine_fit, [path], requests=r).runs for r in (None, own))
    assert usual.by_seed["acceptance_length"] != other.by_seed["acceptance_length"]


def test_spans_are_compared_one_by_one(plan, machine_fit, make_run):
    def slow_links(records):
        records.rounds = RoundLog(
            dataclasses.replace(r, link_there=3 * r.link_there) for r in records.rounds
        )

    path, _ = make_run("async-tree-8x2x3", seed=0, change=slow_links)
    spans = {span.name: span for span in validate(plan, machine_fit, [path]).runs[0].spans}
    assert spans["link_there"].error == pytest.approx(-2 / 3, abs=0.02)
    assert spans["link_back"].error == pytest.approx(0.0, abs=0.05)
    assert spans["target"].error == pytest.approx(0.0, abs=0.05)


def test_shares_within_an_slo_are_compared_only_where_one_was_set(plan, machine_fit, make_run):
    folders = [make_run("plain")[0]]
    for asked, is_there in ((plan, True), (dataclasses.replace(plan, slo=SLO()), False)):
        (run,) = validate(asked, machine_fit, folders).runs
        assert ("slo_attainment" in {figure.name for figure in run.figures}) == is_there


def test_the_ranking_counts_pairs_and_the_regret_of_the_choice(plan, machine_fit, make_run):
    paths = [make_run("plain")[0], make_run("tree-8x2x2", stretch=3.0)[0]]
    by_tpot = next(
        ranking
        for ranking in validate(plan, machine_fit, paths).rankings
        if ranking.figure == "tpot_mean"
    )
    assert by_tpot.predicted[0].startswith("tree")
    assert by_tpot.measured[0].startswith("plain")
    assert (by_tpot.num_pairs, by_tpot.num_tied, by_tpot.num_wrong) == (1, 0, 1)
    assert by_tpot.regret > 0.5
    by_throughput = next(
        ranking
        for ranking in validate(plan, machine_fit, paths).rankings
        if ranking.figure == "throughput"
    )
    assert by_throughput.measured[0].startswith("plain")
    assert by_throughput.regret > 0.3
    right = validate(plan, machine_fit, [make_run("plain")[0], make_run("tree-8x2x2")[0]])
    by_tpot = next(r for r in right.rankings if r.figure == "tpot_mean")
    assert (by_tpot.num_wrong, by_tpot.regret) == (0, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "tied"),
    [
        ((1.0, 1.1), (1.2, 1.3), 0),  # clearly faster
        ((1.0, 1.1), (1.005, 1.105), 1),  # nobody would notice
        ((1.0, 1.5), (1.2, 1.3), 1),  # depends on the seed
    ],
)
def test_pairs_that_were_predicted_to_be_equal_are_not_held_against_the_ranking(one, other, tied):
    """Measured the other way round: wrong, unless no order was predicted."""
    runs = [_bare("plain", one, 2.0), _bare("chain-3", other, 1.0)]
    ranking = rank(runs, "tpot_mean", more_is_better=False, chosen=runs[0].label)
    assert (ranking.num_pairs, ranking.num_tied, ranking.num_wrong) == (1, tied, 1 - tied)
    assert ranking.regret == pytest.approx(1.0)


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 31.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)
    assert rank_correlation([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(3**0.5 / 2)
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None


def _bare(policy, by_seed, measured) -> RunComparison:
    predicted = Interval(float(np.mean(by_seed)), 0.0, 9.0)
    return RunComparison(
        path=Path(policy),
        candidate=candidate(policy),
        origin="measured",
        figures=(Comparison("tpot_mean", predicted, measured),),
        spans=(),
        rounds=(),
        by_seed={"tpot_mean": by_seed},
        requests=pd.DataFrame(),
        notes=(),
    )


def test_two_runs_of_one_candidate_are_no_pair(plan, machine_fit, make_run):
    again = make_run("plain", stretch=1.2, name="again")[0]
    assert validate(plan, machine_fit, [make_run("plain")[0], again]).rankings == ()


def test_a_run_of_some_of_the_requests_is_compared_on_these(plan, machine_fit, make_run):
    path, _ = make_run("chain-3", requests=plan.requests().iloc[:5])
    (run,) = validate(plan, machine_fit, [path]).runs
    assert len(run.requests) == 5
    assert "served 5 of the plan's 12 requests" in run.notes


def test_prompts_of_another_length_are_predicted_as_served(plan, machine_fit, make_run):
    longer = plan.requests().assign(prompt_tokens=lambda t: t["prompt_tokens"] + 200)
    (run,) = validate(plan, machine_fit, [make_run("plain", requests=longer)[0]]).runs
    assert any("12 prompts not as long as planned" in note for note in run.notes)
    assert run.figure("ttft_p50").error == pytest.approx(0.0, abs=1e-9)


def test_unfinished_and_early_ended_requests_are_noted(plan, machine_fit, make_run):
    def cut(records):
        records.requests[0].finish = None
        records.requests[1].output_tokens -= 3

    (run,) = validate(plan, machine_fit, [make_run("plain", change=cut)[0]]).runs
    assert any(note.startswith("1 of 12 requests did not finish") for note in run.notes)
    assert "1 answer ended before the length that was planned for" in run.notes


def test_a_run_with_an_unfinished_request_is_not_within_any_tolerance(plan, machine_fit, make_run):
    def cut(records):
        records.requests[0].finish = None

    paths = [make_run("plain")[0], make_run("chain-3", change=cut)[0]]
    validation = validate(plan, machine_fit, paths)
    assert validation.outside(9.0) == []
    assert [run.num_unfinished for run in validation.runs] == [0, 1]
    assert validation.unfinished == validation.runs[1:]
    assert not validation.is_within(9.0)
    assert validation.rankings == ()  # a run that was cut short is no measurement to rank
    assert validate(plan, machine_fit, paths[:1]).is_within(0.15)


def test_a_checked_figure_that_was_not_measured_is_outside_the_tolerance(
    plan, machine_fit, make_run
):
    def lose_all(records):
        for request in records.requests:
            request.num_rounds = 0
            request.finish = None

    validation = validate(plan, machine_fit, [make_run("plain", change=lose_all)[0]])
    missing = {figure.name: figure for _, figure in validation.outside(9.0)}
    assert set(missing) == {"acceptance_length", "tpot_mean"}
    assert missing["tpot_mean"].error is None
    assert missing["tpot_mean"].size == math.inf
    assert not missing["tpot_mean"].is_inside


def test_a_checked_figure_that_was_measured_as_zero_is_outside_the_tolerance(
    plan, machine_fit, make_run
):
    def emit_nothing(records):
        for request in records.requests:
            request.output_tokens = 0

    validation = validate(plan, machine_fit, [make_run("plain", change=emit_nothing)[0]])
    assert validation.runs[0].figure("throughput").measured == 0.0
    assert "throughput" in {figure.name for _, figure in validation.outside(9.0)}


def test_a_run_of_another_trace_is_refused(plan, machine_fit, make_run):
    moved = plan.requests().assign(arrival=lambda t: t["arrival"] * 2)
    with pytest.raises(InputError, match=r"another trace .* Leave it out of --run"):
        validate(plan, machine_fit, [make_run("plain", requests=moved)[0]])
    more = pd.concat([plan.requests(), plan.requests()], ignore_index=True)
    with pytest.raises(InputError, match=r"other requests .* Leave it out of --run"):
        validate(plan, machine_fit, [make_run("plain", requests=more)[0]])


def test_a_folder_without_a_run_is_refused(plan, machine_fit, tmp_path):
    with pytest.raises(InputError, match=r"run\.json does not exist"):
        validate(plan, machine_fit, [tmp_path / "nothing"])


def test_progress_counts_all_simulations(plan, machine_fit, make_run):
    seen = []
    validate(
        plan,
        machine_fit,
        [make_run("plain")[0], make_run("chain-3")[0]],
        progress=lambda stage, done, total: seen.append((done, total)),
    )
    assert seen == [(i, 6) for i in range(1, 7)]


def test_the_error_is_relative_to_the_measurement():
    assert Comparison("x", Interval(90, 80, 100), 100).error == pytest.approx(-0.1)
    assert Comparison("x", Interval(90, 80, 100), 0).error is None


def test_a_run_of_another_plan_is_told_and_one_that_names_none_is_not():
    def notes(inputs: dict[str, object], plan_hash: str | None) -> list[str]:
        run = SimpleNamespace(summary={"inputs": inputs})
        return _other_plan(run, plan_hash)  # type: ignore[arg-type]

    named = {"plan": {"path": "old.plan.json", "sha256": "aa"}}
    assert notes(named, "aa") == notes({}, "aa") == notes(named, None) == []
    [note] = notes(named, "bb")
    assert "another plan, old.plan.json" in note


def test_steps_of_another_pace_are_told_from_another_acceptance(plan, machine_fit, make_run):
    def accept_less(records):
        for request in records.requests:
            request.num_rounds *= 2

    def words(*paths):
        return cause(validate(plan, machine_fit, paths), machine_fit, plan.fit.path, 0.15)

    slow = make_run("tree-8x2x2", stretch=2.0, name="slow")[0]
    [run] = validate(plan, machine_fit, [slow]).runs
    assert run.step_pace == pytest.approx(2.0)
    assert "took 2 times what the fit says" in words(slow, make_run("plain")[0])
    assert "codesign profile" in words(make_run("plain", stretch=0.5, name="fast")[0])
    assert words(make_run("chain-3", change=accept_less)[0]) == ""

    def waits(records):  # and only waits
        for request in records.requests:
            request.finish += request.finish - request.arrival

    assert words(make_run("plain", change=waits, name="waits")[0]) == ""


def test_a_simulation_with_another_fit_is_no_other_machine(plan, machine_fit, make_run):
    path, records = make_run("plain", stretch=2.0)
    summary = {"candidate": candidate("plain").to_dict()}
    write_run(path, records, origin="simulated", summary=summary, seed=0)
    validation = validate(plan, machine_fit, [path])
    assert validation.outside(0.15)
    assert cause(validation, machine_fit, plan.fit.path, 0.15) == ""


def test_the_overview_of_long_labels_is_not_cut_to_fit(plan, machine_fit, make_run):
    validation = validate(plan, machine_fit, [make_run("async-batch-tree-16x2x8", stretch=4.0)[0]])
    lines = _overview(validation).splitlines()
    assert lines[1].startswith("async-batch-tree-16x2x8 on 1+1, batch 4  ")
    assert max(map(len, lines)) <= 100
    assert ".." not in "".join(lines)
