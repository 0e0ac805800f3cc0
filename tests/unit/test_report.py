from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Deployment, Serving
from codesign.file_ref import FileRef
from codesign.plan import Plan
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.validate import (
    FIGURES,
    RANKED,
    ROUND_FIGURES,
    Comparison,
    RunComparison,
    Validation,
    charts,
)
from codesign.validate.ranking import Ranking
from codesign.validate.report import html_report
from codesign.validate.words import SHOWN, figure_text, ranking_text, shown_comparisons

PLAIN = Candidate(Deployment(2), parse_policy("plain"), 4)
CHAIN = Candidate(Deployment(2), parse_policy("chain-3"), 4)


class Checker(HTMLParser):
    """Collects text and checks that every element is closed in order."""

    VOID = ("meta", "br", "link", "path", "rect", "line", "circle")

    def __init__(self):
        super().__init__()
        self.open, self.text, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def run(candidate, *, measured_tpot=0.02) -> RunComparison:
    requests = pd.DataFrame(
        {
            "request_id": [0, 1],
            "category": ["chat", "code"],
            "predicted_ttft": [0.2, 0.3],
            "measured_ttft": [0.21, np.nan],
            "predicted_tpot": [0.02, np.nan],
            "measured_tpot": [measured_tpot, np.nan],
        }
    )
    return RunComparison(
        path=Path("runs/one"),
        candidate=candidate,
        origin="measured",
        figures=(
            Comparison("tpot_mean", Interval(0.02, 0.019, 0.021), measured_tpot),
            Comparison("throughput", Interval(40.0, 39.0, 41.0), 40.5),
        ),
        spans=(
            Comparison("target", Interval(0.018, 0.017, 0.019), 0.0185),
            Comparison("draft", Interval(0.002, 0.0019, 0.0021), 0.0022),
            Comparison("link_there", Interval(0.0, 0.0, 0.0), 0.00001),
        ),
        rounds=(Comparison("batch", Interval(1.5, 1.4, 1.6), 1.55),),
        by_seed={},
        requests=requests,
        notes=("a <note> & more",),
    )


@pytest.fixture
def plan() -> Plan:
    ref = FileRef(Path("x"), "0")
    return Plan(
        target="target", draft="draft", slo=SLO(tpot=0.05), objective="goodput",
        sampling=Sampling(), serving=Serving(max_kv_tokens=4096), trace=ref, num_requests=2,
        fit=ref, seed=0, num_seeds=3,
        chosen=ScoredCandidate(PLAIN, {}, {}, "fitted", is_feasible=True),
    )  # fmt: skip


def validation(*runs, rankings=()) -> Validation:
    return Validation(runs, rankings, PLAIN.label, 3)


def parsed(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


@pytest.fixture
def no_charts(monkeypatch):
    monkeypatch.setattr(charts, "available", lambda: False)


def test_the_page_is_whole_and_loads_nothing(plan, machine_fit):
    pytest.importorskip("altair")
    page = html_report(validation(run(PLAIN)), plan, tolerance=0.15, fit=machine_fit)
    assert parsed(page).addresses == []
    assert "<script" not in page
    assert "url(" not in page.replace("url(#", "")
    assert page.count("<svg") >= 5  # two figures, two per request, spans, calibration


def test_the_page_follows_light_and_dark(plan, machine_fit):
    pytest.importorskip("altair")
    page = html_report(validation(run(PLAIN)), plan, tolerance=0.15, fit=machine_fit)
    assert "prefers-color-scheme: dark" in page
    svg = page[page.index("<svg") :]
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert 'fill="white"' not in svg


def test_a_figure_that_was_not_measured_is_red_and_left_out_of_the_charts(plan, machine_fit):
    page = html_report(
        validation(run(PLAIN), run(CHAIN, measured_tpot=np.nan)),
        plan, tolerance=9.0, fit=machine_fit,
    )  # fmt: skip
    assert page.count('<td class="bad">-</td>') == 2  # in the overview and in the run's own table
    assert "verdict bad" in page
    parsed(page)


def test_a_run_with_unfinished_requests_is_named_in_the_verdict(plan):
    cut = dataclasses.replace(run(CHAIN), num_unfinished=1)
    page = html_report(validation(run(PLAIN), cut), plan, tolerance=9.0, fit=None)
    assert "verdict bad" in page
    assert f"did not finish ({CHAIN.label})" in page


def test_without_the_report_extra_the_page_has_tables_and_says_how_to_get_charts(plan, no_charts):
    page = html_report(validation(run(PLAIN)), plan, tolerance=0.15, fit=None)
    assert "<svg" not in page
    assert "codesign[report]" in page
    assert "TPOT mean" in page


def test_predicted_and_measured_stand_side_by_side_in_their_unit(plan, no_charts):
    page = html_report(validation(run(PLAIN, measured_tpot=0.025)), plan, tolerance=0.5, fit=None)
    cells = re.findall(r"<td>([^<]*)</td><td>([^<]*)</td><td class=\"\">([^<]*)</td>", page)
    assert ("20", "25", "-20.0 %") in cells


def test_the_verdict_says_whether_the_tolerance_holds(plan, no_charts):
    good = html_report(validation(run(PLAIN)), plan, tolerance=0.15, fit=None)
    assert "are all within 15%" in good
    assert 'class="verdict bad"' not in good
    bad = html_report(validation(run(CHAIN, measured_tpot=0.04)), plan, tolerance=0.15, fit=None)
    assert 'class="verdict bad"' in bad
    assert "TPOT mean of chain-3 on 2, batch 4 (-50.0 %)" in bad
    assert '<td class="bad">-50.0 %</td>' in bad


def test_spans_that_are_next_to_nothing_are_left_out_of_the_tables():
    names = [comparison.name for comparison in shown_comparisons(run(PLAIN))]
    assert "draft" in names
    assert "link_there" not in names


def test_text_of_others_cannot_become_markup(plan, no_charts):
    page = html_report(validation(run(PLAIN)), plan, tolerance=0.15, fit=None)
    assert "a &lt;note&gt; &amp; more" in page
    assert "<note>" not in page


def test_a_run_without_rounds_still_makes_a_page(plan, machine_fit):
    pytest.importorskip("altair")
    bare = RunComparison(
        Path("r"), PLAIN, "measured", (), (), (), {}, run(PLAIN).requests.iloc[:0], ()
    )
    parsed(html_report(validation(bare), plan, tolerance=0.15, fit=machine_fit))


def test_every_figure_that_validation_compares_has_a_title_and_a_unit():
    compared = {*FIGURES, *ROUND_FIGURES, *(name for name, _ in RANKED), *charts.SPAN_COLOURS}
    assert compared <= set(SHOWN)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("tpot_mean", 0.0234, "23.4"), ("throughput", 12345.6, "12,346"), ("ttft_p50", 1.5, "1,500")],
)
def test_figures_are_shown_in_their_unit(name, value, text):
    assert figure_text(name, value) == text


def test_the_ranking_in_words():
    def words(*, num_tied=0, num_wrong=0, regret=None):
        return ranking_text(Ranking("tpot_mean", ("a",), ("a",), 6, num_tied, num_wrong, regret))

    assert words() == "6 of 6 pairs in the predicted order"
    assert words(num_tied=2, num_wrong=1).startswith("3 of 4 pairs in the predicted order, 2 too")
    assert words(num_tied=6) == "all 6 pairs too close to predict"
    assert words(regret=0.0).endswith("the plan's choice is the best measured")
    assert words(regret=0.031).endswith("the plan's choice loses 3.1% to the best measured")


def test_the_calibration_chart_shows_the_recorded_share_per_bin(machine_fit):
    pytest.importorskip("altair")
    spec = charts.calibration(machine_fit.acceptance, machine_fit.calibration).to_dict()
    points = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "circle")
    values = points["data"]["values"]
    assert sum(point["tokens"] for point in values) == machine_fit.acceptance.num_tokens
    share = sum(point["tokens"] * point["accepted"] for point in values)
    assert share / machine_fit.acceptance.num_tokens == pytest.approx(
        machine_fit.acceptance.hit_rate(1)
    )
