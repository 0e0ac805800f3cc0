"""The watched search, its tables and charts, and what a visitor takes away, without a browser."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from codesign.config import SLO, Serving
from codesign.dashboard import plan_charts as charts
from codesign.dashboard.choices import SYNTHETIC, Machine, Traffic
from codesign.dashboard.commands import plan_command
from codesign.dashboard.exports import ENGINE_TITLES, export_text
from codesign.dashboard.plan_tables import (
    candidate_table,
    convergence_table,
    figures_of,
    inside,
    on_front,
    rival,
    side_by_side,
    span_table,
)
from codesign.dashboard.planning import (
    Found,
    PlanAsked,
    Seen,
    find_plan,
    known_plan,
    request_limit,
)
from codesign.dashboard.what_if import MOST
from codesign.plan import Plan

ASKED = PlanAsked(
    Traffic(SYNTHETIC, rate=4.0, seconds=15.0, prompt_mean=300, output_mean=40),
    Machine(),
    SLO(ttft=1.0, tpot=0.05),
    Serving(preemption=True),
    policies=("plain", "chain-3", "async-tree-8x4x2"),
)


@pytest.fixture(scope="module")
def watched() -> tuple[Found, list[int]]:
    counts: list[int] = []
    return find_plan(ASKED, watch=lambda seen: counts.append(len(seen)), processes=1), counts


@pytest.fixture(scope="module")
def found(watched) -> Found:
    return watched[0]


def test_every_simulation_is_seen_as_it_ends_and_the_plan_is_remembered(watched):
    found, counts = watched
    assert counts == list(range(1, len(found.seen) + 1))
    assert len(found.seen) >= found.answer.num_simulated
    assert known_plan(ASKED) is found


def test_a_search_that_is_stopped_leaves_no_plan():
    class Stopped(BaseException):
        pass

    def stop(seen):
        raise Stopped

    asked = PlanAsked(ASKED.traffic, ASKED.machine, ASKED.slo, ASKED.serving, policies=("chain-2",))
    with pytest.raises(Stopped):
        find_plan(asked, watch=stop, processes=1)
    assert known_plan(asked) is None


def test_the_bundle_is_a_folder_that_codesign_run_can_use(found, tmp_path):
    with zipfile.ZipFile(io.BytesIO(found.bundle())) as archive:
        archive.extractall(tmp_path)
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.chosen == found.plan.chosen
    assert len(plan.requests()) == 60
    assert plan.fit.check().parent.resolve() == tmp_path.resolve()


def test_no_plan_on_the_front_is_beaten_and_every_other_one_is(found):
    table = candidate_table(found.plan)
    front = on_front(table, "tpot_slo", "ttft_slo")
    assert front.any()
    points = table[["tpot_slo", "ttft_slo"]].to_numpy()
    for row, is_front in enumerate(front):
        no_worse = (points <= points[row]).all(1)
        beaten = (no_worse & (points < points[row]).any(1)).any()
        assert beaten != is_front


def test_more_is_better_on_the_front_of_goodput():
    table = pd.DataFrame({"goodput": [1.0, 2.0, np.nan], "tpot_slo": [5.0, 5.0, 1.0]})
    assert on_front(table, "tpot_slo", "goodput").tolist() == [False, True, False]


def test_a_brush_keeps_what_is_inside_and_none_keeps_all(found):
    table = candidate_table(found.plan)
    assert len(inside(table, {})) == len(table)
    middle = float(table["tpot_slo"].median())
    kept = inside(table, {"tpot_slo": [middle, 0.0]})
    assert 0 < len(kept) < len(table)
    assert (kept["tpot_slo"] <= middle).all()


def test_two_plans_side_by_side_say_which_is_better_or_that_they_cannot_be_told_apart(found):
    best = found.plan.chosen.label
    same = side_by_side(found.plan, best, best)
    assert set(same["better"]) == {"equal"}
    other = found.plan.scored[rival(found.plan)]
    kinds = [
        (scored.candidate.speculation, scored.candidate.deployment)
        for scored in (other, found.plan.chosen)
    ]
    assert kinds[0] != kinds[1]
    compared = side_by_side(found.plan, best, other.label)
    assert set(compared["better"]) <= {"first", "second", "equal", "cannot be told apart"}
    spans = span_table(found.plan, [best, other.label])
    assert set(spans["plan"]) == {best, other.label}


def test_the_best_so_far_only_gets_better_within_a_stretch():
    seen = [Seen(1, "a", 60, {"goodput": 1.0}), Seen(2, "b", 60, {"goodput": 0.5}),
            Seen(3, "c", 60, {"goodput": 2.0}), Seen(4, "c", 240, {"goodput": 1.5}),
            Seen(5, "d", 60, {})]  # fmt: skip
    assert convergence_table(seen, "goodput")["best"].tolist() == [1.0, 1.0, 2.0, 1.5]
    times = [Seen(1, "a", 60, {"tpot_mean": 0.02}), Seen(2, "b", 60, {"tpot_mean": 0.01})]
    assert convergence_table(times, "latency")["best"].tolist() == [20.0, 10.0]


def test_the_charts_hold_every_plan_and_a_brush(found):
    table = candidate_table(found.plan)
    chart = charts.pareto_chart(table, "tpot_slo", "goodput", best=found.plan.chosen.label)
    text = json.dumps(chart.to_dict(), allow_nan=False)
    assert all(scored.label in text for scored in found.plan.scored)
    assert any(param["name"] == charts.BRUSH for param in chart.to_dict()["params"])
    seen = convergence_table(found.seen, "goodput")
    assert charts.convergence_chart(seen, "goodput").to_dict()["layer"]
    spans = span_table(found.plan, [found.plan.chosen.label])
    assert charts.two_rounds_chart(spans).to_dict()["mark"]


def test_without_targets_nothing_is_shown_of_an_slo(found):
    table = candidate_table(found.plan)
    for slo, is_shown in ((ASKED.slo, True), (SLO(), False)):
        figures = figures_of(slo, has_own=False)
        assert ("slo_attainment" in figures) == is_shown
        best = found.plan.chosen.label
        chart = charts.pareto_chart(table, "tpot_slo", "goodput", best=best, figures=figures)
        layers = json.dumps(chart.to_dict()["layer"])
        assert layers.count("meets the SLO") == 2 * is_shown
        compared = side_by_side(found.plan, best, best, figures)
        assert ("in SLO, %" in set(compared["figure"])) == is_shown


@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_a_plan_becomes_the_commands_of_every_engine(found, engine):
    exported = export_text(found, engine)
    assert exported.commands
    assert export_text(found, engine) is exported


def test_a_very_long_trace_is_cut_and_the_command_line_says_so(tmp_path):
    rows = "\n".join(f"{i},20,2" for i in range(MOST + 5))
    file = tmp_path / "long.csv"
    file.write_text(f"arrival,prompt_tokens,output_tokens\n{rows}\n")
    asked = replace(ASKED, traffic=Traffic(str(file)))
    assert request_limit(asked) == MOST
    assert f"--max-requests {MOST}" in plan_command(asked).replace(" \\\n   ", "")
    assert request_limit(replace(asked, max_requests=7)) == 7
    assert request_limit(ASKED) is None


def test_the_command_line_asks_the_same_question():
    shown = plan_command(ASKED).replace(" \\\n   ", "")
    assert "codesign plan --trace synthetic.parquet" in shown
    assert shown.endswith("--objective goodput --policies plain,chain-3,async-tree-8x4x2")


def test_only_plans_that_the_engine_here_runs_are_searched_if_asked_for():
    asked = replace(ASKED, policies=("plain",), runnable=True)
    assert plan_command(asked).endswith(" --policies plain --runnable")
    assert "--runnable" not in plan_command(ASKED)
    found = find_plan(asked, processes=1)
    assert not any(s.candidate.deployment.prefill_workers for s in found.plan.scored)
    assert any("(--runnable)" in note for note in found.plan.notes)
