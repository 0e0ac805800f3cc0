"""Plans for more GPUs than a pair was measured on: from its measurements, not from data sheets."""

from __future__ import annotations

import argparse
import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmarks.group_sizes import table
from codesign.cli import plan_result
from codesign.cli.fit_argument import fit_from_args
from codesign.config import SLO, Serving, parse_deployment
from codesign.fit import EXTRAPOLATED, Fit
from codesign.fit.devices import load_device
from codesign.fit.extrapolated import (
    AT_MEDIAN,
    BARE,
    BATCHES,
    STEPS,
    SizeLine,
    _non_negative,
    across_hosts,
    extent,
    extrapolated_fit,
)
from codesign.fit.priced_model import parse_model
from codesign.fit.roofline import Forward
from codesign.fit.shipped import shipped_pair
from codesign.fit.what_if import beyond_measured, device_fit, what_if_fit
from codesign.planner import Question, search
from codesign.planner.search_space import search_space
from codesign.policy.cost import StepTime

PAIRS = [
    ("llama-3-70b:int4", "llama-3.2-1b:int4"),
    ("llama-3-70b:int4", "llama-3.2-3b:int4"),
    ("llama-3.1-8b:int4", "llama-3.2-1b:int4"),
    ("qwen2-72b:int4", "qwen2-1.5b:int4"),
]
H200 = load_device("h200")
TARGET = parse_model(PAIRS[0][0])


def engine(fixed: float, slower: float, peer: float, *sizes: int) -> SizeLine:
    """An engine that is a line in its GPUs, on so many of them."""

    def time(gpus: int) -> StepTime:
        bare = Forward(TARGET, H200, gpus, BARE).decode.scaled(slower)
        return bare.later(fixed + peer * (gpus - 1))

    return SizeLine({size: time(size) for size in sizes}, Forward(TARGET, H200, 1, BARE), STEPS)


@pytest.mark.parametrize("peer", [0.0, 1e-4])
def test_an_engine_that_is_a_line_in_its_gpus_is_told_on_more_of_them(peer):
    known, more = engine(1e-3, 1.3, peer, 1, 2, 4), engine(1e-3, 1.3, peer, 4, 8)
    ours, theirs = (more.times[size](8, 1000) for size in (8, 4))
    assert known.ratio(8, 4) == pytest.approx(ours / theirs, rel=0.02)  # of four shapes one line
    assert known.ratio(4, 4) == 1.0


def test_what_the_line_is_off_without_the_largest_group_is_what_its_peers_add():
    assert engine(1e-3, 1.3, 0.0, 1, 2, 4).left_out_error < 0.02
    assert engine(1e-3, 1.3, 4e-4, 1, 2, 4).left_out_error > 0.05
    assert engine(1e-3, 1.3, 0.0, 2, 4).left_out_error is None  # nothing tells what is fixed


def test_groups_that_share_heads_unevenly_take_as_much_longer_as_one_that_was_measured():
    even = engine(1e-3, 1.3, 1e-4, 1, 2, 4)  # of 8 key-value heads
    slow = engine(1e-3, 1.3, 1e-4, 3).times[3].scaled(1.1)
    line = replace(even, times={**even.times, 3: slow})
    assert line.ratio(8, 4) == even.ratio(8, 4)
    for size in (5, 6, 7):
        assert line.ratio(size, 4) == pytest.approx(1.1 * even.ratio(size, 4), rel=0.01)
    fast = replace(even, times={**even.times, 3: slow.scaled(0.5)})
    assert fast.ratio(5, 4) == even.ratio(5, 4)  # what is uneven is no faster


def test_no_coefficient_is_below_nothing():
    design = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    assert _non_negative(design, np.array([3.0, 5.0, 9.0])) == pytest.approx([1.0, 2.0])
    falling, means = np.array([9.0, 5.0, 3.0]), np.array([17.0 / 3.0, 0.0])
    assert _non_negative(design, falling) == pytest.approx(means)


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("pair", PAIRS)
def test_more_gpus_go_on_from_the_largest_group_that_was_measured(device, pair):
    fit, priced = device_fit(device, 8, *pair), what_if_fit(device, 8, *pair)
    measured = Fit.load(shipped_pair(device, *pair))
    assert fit.origin == EXTRAPOLATED
    assert list(fit.costs) == list(priced.costs)
    for label, cost in measured.costs.items():
        assert fit.costs[label].target == cost.target
        assert fit.costs[label].draft == cost.draft
        assert fit.costs[label].prefill(1000) == pytest.approx(cost.prefill(1000))
    for op, shape in (("target", (8, 1000)), ("draft", (8, 1000)), ("prefill", (1000,))):
        times = [getattr(fit.costs[str(gpus)], op)(*shape) for gpus in range(4, 9)]
        for before, after in itertools.pairwise(times):
            assert 0.8 * before < after < 1.16 * before  # uneven shares, and no other source
        assert getattr(fit.costs["4+4"], op)(*shape) == times[0]
    assert fit.costs["8"].prefill(1000) < fit.costs["4"].prefill(1000)
    assert fit.costs["8"].target(1, 1000.0) < 0.6 * priced.costs["8"].target(1, 1000.0)
    assert fit.costs["5+3"].link == measured.costs["3+1"].link
    assert fit.costs["8"].link == 0.0
    assert fit.costs["8"].kv_tokens == priced.costs["8"].kv_tokens > fit.costs["4"].kv_tokens


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[1], PAIRS[3]])
def test_a_large_model_is_faster_on_eight_gpus_than_on_four(pair):
    fit = device_fit("h200", 8, *pair)
    steps = [fit.costs[label].target(8, 1000) for label in ("4", "5+1", "6+2", "8")]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("pair", PAIRS)
def test_four_gpus_told_from_one_and_two_are_within_the_error_that_eight_have(device, pair):
    measured, target = Fit.load(shipped_pair(device, *pair)), parse_model(pair[0])
    times = {size: measured.costs[str(size)].target for size in (1, 2, 4)}
    forward = Forward(target, load_device(device), 1, BARE)
    left_out = SizeLine(times, forward, STEPS).left_out_error
    told = SizeLine({1: times[1], 2: times[2]}, forward, STEPS).ratio(4, 2)
    for shape in (*STEPS, *BATCHES):
        assert told * times[2](*shape) / times[4](*shape) == pytest.approx(1.0, abs=left_out)
    assert 0.01 < left_out < 0.25
    fit = device_fit(device, 16, *pair)
    errors = [fit.errors[f"{label}/target"] for label in ("4", "5", "8", "16")]
    assert errors[0] == measured.errors["4/target"]
    assert AT_MEDIAN * left_out < errors[1] == errors[2] < errors[3]  # two doublings
    assert fit.errors["4+4/draft"] == measured.errors["4/draft"]
    assert fit.errors["8+1/draft"] == measured.errors["3+1/draft"]


def test_sizes_between_those_measured_are_told_from_them_too():
    fit = device_fit("h200", 3, *PAIRS[2])  # of three GPUs nothing but the target of 3+1
    assert fit.origin == EXTRAPOLATED
    assert extent(fit).endswith("GPUs, other groups extrapolated by data sheets")
    assert [fit.origin_of(parse_deployment(x)) for x in ("2", "3")] == ["fitted", EXTRAPOLATED]
    measured = Fit.load(shipped_pair("h200", *PAIRS[2]))
    assert fit.costs["3"].target == measured.costs["3+1"].target
    drafts = [fit.costs[label].draft(8, 1000) for label in ("2", "3")]
    assert drafts[1] == pytest.approx(drafts[0], rel=0.1)


def test_too_few_sizes_leave_a_pair_to_data_sheets():
    measured, priced = Fit.load(shipped_pair("h200", *PAIRS[0])), what_if_fit("h200", 8, *PAIRS[0])
    few = replace(measured, costs={label: measured.costs[label] for label in ("1", "2", "1+1")})
    forward, draft = Forward(TARGET, H200, 1), parse_model(PAIRS[0][1])
    assert extrapolated_fit(measured, priced, forward, draft) is not None
    assert extrapolated_fit(few, priced, forward, draft) is None


def test_a_note_says_what_was_measured_and_how_sure_the_rest_is():
    note = beyond_measured(device_fit("h200", 8, *PAIRS[0]))
    assert "measured on up to 4 GPUs, other groups extrapolated by data sheets" in note
    ours, theirs = map(float, re.findall(r"(\d+\.\d\d) (?:ms )?on \d", note))
    assert theirs < ours == 3.76
    assert note.endswith("--gpus 4")
    assert beyond_measured(device_fit("h200", 4, *PAIRS[0])) == ""
    assert beyond_measured(device_fit("h200", 8, "llama-2-70b", "llama-2-7b")) == ""


def test_a_plan_whose_groups_cross_hosts_says_so():
    fit = device_fit("h200", 16, *PAIRS[0])
    for label in ("12", "10+4", "4+9", "2/p10"):
        assert "GPUs crosses hosts of 8" in across_hosts(fit, parse_deployment(label))
    for label in ("8", "2x8", "8+8", "4x4", "8/p8"):
        assert across_hosts(fit, parse_deployment(label)) == ""
    assert across_hosts(what_if_fit("h200", 16, *PAIRS[0]), parse_deployment("16")) == ""
    requests = pd.DataFrame({"arrival": [0.0], "prompt_tokens": 50, "output_tokens": 9})
    for label, said in (("16", True), ("2x8", False)):
        unit = parse_deployment(label).unit.label
        alone = replace(fit, costs={unit: fit.costs[unit]})
        question = Question(
            requests=requests, fit=alone, slo=SLO(), serving=Serving(), workers=16, max_batch=1,
            policies=("plain",),
        )  # fmt: skip
        answer = search(question)
        assert answer.chosen.candidate.deployment.label == label
        assert any("a group of 16 GPUs crosses hosts" in n for n in answer.notes) == said


def test_origins_are_of_the_deployment_and_survive_a_file(tmp_path):
    fit = device_fit("h200", 8, *PAIRS[0])
    fit.save(tmp_path / "fit.json")
    again = Fit.load(tmp_path / "fit.json")
    assert again.origin == EXTRAPOLATED
    origins = [
        again.origin_of(parse_deployment(label)) for label in ("2x4", "3+1", "4/p4", "3/p5", "8")
    ]
    assert origins == ["fitted", "fitted", "fitted", EXTRAPOLATED, EXTRAPOLATED]
    assert again.costs == fit.costs
    assert fit.drift("8", 1e-3) > 0.0  # machines change after their profile, as in a fit


def test_all_splits_are_searched_and_nothing_is_to_be_profiled():
    fit = device_fit("h200", 8, *PAIRS[0])
    space = search_space(fit.costs, workers=8, max_batch=1, origin=fit.origin, measure="profile")
    assert {"4+4", "8", "2x4", "6+2"} <= {c.deployment.label for c in space.candidates}
    assert not any("no step times" in note for note in space.notes)


def test_what_a_plan_is_made_from_is_said(capsys):
    names = dict(zip(("target", "draft"), PAIRS[0], strict=True))
    fit_from_args(argparse.Namespace(fit=None, device="h200", gpus=8, acceptance=None, **names))
    said = capsys.readouterr().err
    assert "8 x h200, measured on up to 4 GPUs, other groups extrapolated by data sheets;" in said
    assert "other engines" not in said


@pytest.mark.parametrize(
    ("gpus", "pair", "words"),
    [
        (2, PAIRS[0], "fitted to measurements"),
        (8, PAIRS[0], "measured on up to 4 GPUs, other groups extrapolated by data sheets"),
        (8, ("llama-2-70b", "llama-2-7b"), "roofline (data sheets, not measured)"),
    ],
)
def test_all_commands_have_the_same_words_for_where_times_come_from(gpus, pair, words, capsys):
    names = dict(zip(("target", "draft"), pair, strict=True))
    asked = argparse.Namespace(fit=None, device="h200", gpus=gpus, acceptance=None, **names)
    fit, _ = fit_from_args(asked)
    assert capsys.readouterr().err.startswith(f"fit: {gpus} x h200, {words}; acceptance ")
    split = parse_deployment(str(gpus))
    chosen = SimpleNamespace(
        origin=fit.origin_of(split), candidate=SimpleNamespace(deployment=split)
    )
    assert plan_result._origin(SimpleNamespace(chosen=chosen), fit).startswith(
        f"step times {words}"
    )


def test_the_planners_page_has_the_errors_of_every_way():
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    assert table() in page


def test_groups_that_were_measured_apart_are_measured():
    fit = device_fit("h200", 8, *PAIRS[0])
    labels = ("4", "2x4", "4+1", "4+4", "8", "7+1")
    origins = [fit.origin_of(parse_deployment(label)) for label in labels]
    assert origins == ["fitted"] * 4 + [EXTRAPOLATED] * 2
