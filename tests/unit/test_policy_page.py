"""The page that compares policies: which measured runs it shows, and what it says of goals."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks.compare_policies import RESULTS
from benchmarks.pages import reflow
from benchmarks.policies import (
    by_targets,
    crowds,
    eight,
    gpu_runs,
    load_map,
    measured,
    pairs,
    splits,
    targets_measured,
)
from benchmarks.policies.goals import goals_section
from benchmarks.policies.page import MEASUREMENTS, PAGE, SPLITS, contents, measurements_of

SECTIONS = {
    "goals": goals_section,
    "map": load_map.map_section,
    "price": measured.price_section,
    "pairs": measured.pairs_section,
    "splits": splits.splits_section,
    "eight": eight.eight_section,
    "crowds": crowds.crowds_section,
    "by targets": by_targets.by_targets_section,
    "runs": gpu_runs.runs_section,
    "runs by targets": targets_measured.targets_measured_section,
    "cpu": measured.cpu_section,
}
PAGES = {"runs": MEASUREMENTS, "runs by targets": MEASUREMENTS, "cpu": MEASUREMENTS}
PAGES |= {"splits": SPLITS, "eight": SPLITS}  # and all others on the first page


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_is_made_from_the_results(name: str, results: dict[str, Any]) -> None:
    where = PAGES.get(name, PAGE).read_text(encoding="utf-8")
    assert reflow(SECTIONS[name](results)) in where
    assert not SECTIONS[name]({}) or name == "goals"


def test_the_page_stays_short_and_lists_its_sections(page: str) -> None:
    assert len(page.splitlines()) <= 500
    listed = contents([page.partition("## How to read this page")[2]])
    assert reflow(listed) in page


def test_what_was_measured_has_a_page_that_stays_short(results: dict[str, Any]) -> None:
    page = MEASUREMENTS.read_text(encoding="utf-8")
    assert page == measurements_of(results)
    assert len(page.splitlines()) <= 380
    assert "SOME OUTPUTS DIFFER" not in page


def test_the_summary_says_the_lowest_speeds_with_many_at_once(
    page: str, results: dict[str, Any]
) -> None:
    summary = " ".join(page.partition("## Goals")[0].split())
    cases = crowds.cases_of(results)
    assert {case.at_once for case in cases} == set(crowds.SIZES)
    for policy in crowds.OURS:
        assert f" {min(crowds.speeds_of(cases, policy).values()):.3f}" in crowds.lowest(results)
    assert crowds.lowest(results) in summary


def test_many_at_once_are_told_by_their_lowest_speed_and_where_it_is() -> None:
    serial, specserve = crowds.OURS
    found: dict[str, dict[str, Any]] = {}
    for load, latencies in {"1.2": (0.97, 0.99), "2.0": (0.995, 0.9796)}.items():
        case = f"crowds/32/{crowds.PAIRS[1]}/code/{load}/1"
        found[f"{case}/plain"] = _figures(1.0, num_requests=10)
        for policy, speed in zip((serial, specserve), latencies, strict=True):
            found[f"{case}/{policy}"] = _figures(1.0 / speed, num_requests=10)
    last = f"crowds/32/{crowds.PAIRS[1]}/code/2.0/1/{serial}"
    found[last] |= {"goodput": 0.8, "slo_attainment": 0.4}
    said = " ".join(crowds.crowds_section(found).split())
    assert "| 32 | 10 | 0.970 (70B + 3B at 1.2) / 0.9796 (70B + 3B at 2.0) | 2 | 1 / 1 |" in said
    assert "has at least 0.9798 (below 0.98 in 1 of 2) of SpecServe's speed" in said
    assert "lower in 1 of 2; at worst 0.80, 4 requests within the SLO to 5." in said
    assert "it has at least 0.970 (below 0.98 in 1 of 2)" in crowds.lowest(found)
    rows = [line for line in goals_section(found).splitlines() if "32 at once, " in line]
    assert "| - | 0.970: 70B + 3B, code at 1.2, 32 at once, seed 1 (missed in 1 of 2)" in rows[0]
    assert all(row.endswith("| simulated: no, measured: - |") for row in (rows[0], rows[2]))
    unfinished = {key.replace("/code/1.2", "/conv/1.2"): f for key, f in list(found.items())[:2]}
    assert crowds.crowds_section(found | unfinished) == crowds.crowds_section(found)


def test_a_lead_in_goodput_is_that_of_the_better_split_and_of_targets_that_some_meet() -> None:
    ways = {way: _figures(1.0) for way in splits.WAYS}
    ways["async-batch-tree-16x2x8 on 2+2"]["goodput"] = 1.2
    assert splits.goodput_lead(ways) == pytest.approx(1.2)
    ways["specserve-8 on 4"]["slo_attainment"] = 0.04
    assert splits.goodput_lead(ways) is None


def test_policies_on_one_split_are_compared_there() -> None:
    case, ours = "70b-int4+1b-int4/code/1.2", f"{splits.ASYNC} on 3+1"
    latency = dict.fromkeys(splits.WAYS, 1.0) | {ours: 2.0}
    found = {f"splits/{case}/{way}": _figures(x, num_requests=10) for way, x in latency.items()}
    found[f"splits/{case}/{ours}"]["goodput"] = 0.9
    for policy, latency_there in (("plain", 3.0), (splits.SPECSERVE, 2.5)):
        found[f"same-split/{case}/{policy} on 3+1"] = _figures(
            latency_there, num_requests=10, slo_attainment=0.6
        )
    (lead,) = splits.same_split(found)[1].values()
    assert lead == pytest.approx(0.9)
    said = " ".join(splits.splits_section(found).split())
    assert "has 1.250 (" in said
    assert "and 1.500 (" in said
    assert "ahead in 0 of 1 cases, and more than 2 % behind in 1 (" in said
    assert "0.90, 5 requests within the SLO to 6)" in said


def _figures(latency: float, **more: Any) -> dict[str, Any]:
    return {"latency_mean": latency, "slo_attainment": 0.5, "goodput": 1.0, **more}


def _run(key: str, created: str, latencies: Mapping[str, float], segment: str) -> dict[str, Any]:
    about = {"created": created, "machine": "NVIDIA H200", "target": "inflated-llama-3-8b",
             "draft": "inflated-draft-llama-3.2-1b", "batch": 8}  # fmt: skip
    ways = {f"{key}/{segment}/{way} on 1": _figures(x) for way, x in latencies.items()}
    return {f"{key}/about": about, **ways}


def test_the_newest_row_of_each_trace_and_load_is_shown() -> None:
    found = {
        **_run("new", "2026-11-24T10:00", {"plain": 2.0, "batch-tree-16x2x8": 1.0}, "code@0.2"),
        **_run("old", "2026-11-23T10:00", {"plain": 9.0}, "code@0.2"),
        **_run("other", "2026-11-22T10:00", {"plain": 3.0}, "code"),
        **_run("said", "2026-11-21T10:00", {"plain": 3.0}, "code@0.7"),  # the same load
    }
    for runs in (("new", "old", "said", "other"), ("old", "other", "said", "new")):
        rows = gpu_runs.rows_of(found, runs)
        assert [(row.run, row.label) for row in rows] == [
            ("new", "8B + 1B, 1 GPU, code at 0.2"),
            ("other", "8B + 1B, 1 GPU, code at 0.7"),
        ]


def test_the_burst_is_told_by_the_run_of_most_policies_even_if_a_newer_one_has_it() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    burst = gpu_runs.burst_row(results)
    assert burst is not None
    assert len(burst.found) > 10
    newest = {(row.place, row.label): row.run for row in gpu_runs.rows_of(results)}
    assert newest[burst.place, burst.label] != burst.run
    assert f"{burst.found['plain']['num_requests']} requests" in gpu_runs.runs_section(results)


def test_what_was_served_by_targets_stands_beside_the_same_requests_served_as_they_came() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for first, targets in targets_measured.RUNS.items():
        about, other = results[f"{first}/about"], results[f"{targets}/about"]
        assert (about["scheduling"], other["scheduling"]) == ("fcfs", "slo")
        assert about["tpot"] == other["tpot"]
    lead = targets_measured.measured_lead(results)
    assert lead is not None
    found = {
        way.rpartition("/")[2].partition(" ")[0]: figures["attainment"]["1.4"]
        for way, figures in results.items()
        if way.startswith("ranks-70b-burst-targets-28-h200x1/code/")
    }
    assert len(found) == 5
    others = max(share for policy, share in found.items() if policy != "batch-tree-16x2x8")
    assert lead[1][1.4] == pytest.approx(100 * (found["batch-tree-16x2x8"] - others))
    without = {k: v for k, v in results.items() if not k.startswith("ranks-70b-burst-targets")}
    section = targets_measured.targets_measured_section(without)
    assert "70B + 1B" not in section.partition("By targets")[0].partition("| requests")[2]


def test_shifted_requests_are_the_same_ones_a_little_earlier_or_later() -> None:
    arrival = [0.0, 0.01, 0.02, 1.0, 2.0]
    asked = pd.DataFrame({"arrival": arrival, "output_tokens": range(5)})
    orders = set()
    for seed in range(20):
        moved = pairs.shifted(asked, 0.05, seed)
        assert moved["arrival"].is_monotonic_increasing
        assert moved["arrival"].iloc[0] == 0.0
        assert sorted(moved["output_tokens"]) == [*range(5)]
        gaps = np.diff(moved["arrival"].iloc[-3:])
        assert np.abs(gaps - [0.98, 1.0]).max() <= 0.12
        orders.add(tuple(moved["output_tokens"]))
    assert len(orders) > 2
    assert pairs.shifted(asked, 0.0, 1)["arrival"].tolist() == arrival


def test_a_goal_names_its_worst_case_and_how_many_missed_it() -> None:
    found = {
        f"traces/h100x8/{trace}/{policy}": _figures(latency)
        for trace, latencies in {"code": (1.0, 1.25), "conv": (1.0, 0.5)}.items()
        for policy, latency in zip(("plain", "batch-tree-16x2x8"), latencies, strict=True)
    }
    for policy in ("plain", "batch-tree-16x2x8"):
        found[f"pairs/llama-3-70b-int4+llama-3.2-1b-int4/code/0.7/{policy}"] = _figures(1.0)
    row = next(line for line in goals_section(found).splitlines() if "batch tree: at most" in line)
    assert "0.800: code, own rate (missed in 1 of 2)" in row
    assert "1.000: 70B + 1B, code at 0.7" in row
    assert re.search(r"simulated: no, measured: - \|$", row)
