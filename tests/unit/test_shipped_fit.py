from __future__ import annotations

import argparse
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from codesign.answer_parts import in_parts, part_names, tokens_of_parts
from codesign.artifacts import machine, read_json
from codesign.candidate import Candidate
from codesign.cli.fit_argument import fit_from_args
from codesign.config import Deployment
from codesign.errors import InputError
from codesign.fit import ROOFLINE, Fit, shipped
from codesign.fit.prompt_luck import parts_covariance, rounds_per_token
from codesign.fit.shipped import (
    DEFAULT_FIT,
    FITS,
    is_of_gpus,
    machine_of,
    machines_of,
    shipped_acceptance,
    shipped_pair,
)
from codesign.fit.what_if import (
    DIALLED_ERROR,
    OTHER_PAIR_ERROR,
    device_fit,
    kept_device_fit,
    measured_note,
    what_if_fit,
)
from codesign.models import DEFAULT_TARGET, DRAFTS
from codesign.planner.predict import prompt_note
from codesign.planner.uncertainty import acceptance_error, tokens_error
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling


def test_the_shipped_fit_covers_the_default_pair_in_one_process_and_in_two():
    fit = Fit.load(DEFAULT_FIT)
    assert (fit.target, fit.draft) == (DEFAULT_TARGET, DRAFTS[DEFAULT_TARGET])
    assert set(fit.costs) == {"2", "1+1"}
    assert "measured 20" in machine_of(DEFAULT_FIT)


def test_step_times_of_the_shipped_fit_are_those_of_a_machine():
    for cost in Fit.load(DEFAULT_FIT).costs.values():
        for step in (cost.target, cost.draft):
            seconds = [step(rows, 256.0) for rows in range(1, 65)]
            assert all(0 < a <= b for a, b in itertools.pairwise(seconds))
        assert all(cost.target(n) > 4 * cost.draft(n) for n in (1, 4, 8))


def test_shipped_acceptance_is_found_for_its_pair_and_its_sampling_alone():
    pair = (DEFAULT_TARGET, DRAFTS[DEFAULT_TARGET])
    table = shipped_acceptance(*pair, Sampling(seed=7))
    assert table is not None
    assert len(table) > 3000
    assert 0.6 < (table["rank"] == 0).mean() < 0.9
    assert table["category"].nunique() == 6
    for other in (Sampling(0.7), Sampling(top_k=5), Sampling(top_p=0.9)):
        assert shipped_acceptance(*pair, other) is None
    assert shipped_acceptance(DEFAULT_TARGET, "ngram", Sampling()) is None


MEASURED = [
    ("llama-3-70b:int4", "llama-3.2-1b:int4"),
    ("llama-3.1-70b:int4", "llama-3.2-3b:int4"),
    ("llama-3.1-8b:int4", "llama-3.2-1b:int4"),
    ("qwen2-72b:int4", "qwen2-1.5b:int4"),
]


def measured_on(device, pair, name):
    """The shipped fit's file, measured on a machine of this name."""
    path = shipped_pair(device, *pair)
    assert path is not None
    assert machine_of(path).startswith(f"{name}, measured 20")
    return path


@pytest.mark.parametrize("pair", MEASURED)
def test_pairs_were_measured_on_one_h100_too(pair):
    measured_on("h100", pair, "NVIDIA H100 80GB HBM3")
    fit, faster = device_fit("h100", 1, *pair), device_fit("h200", 1, *pair)
    assert fit.origin == "fitted"
    assert list(fit.costs) == ["1"]
    # Steps read the weights: 4.8 TB/s instead of 3.35.
    ours, theirs = (f.costs["1"].target(8, 1024) for f in (fit, faster))
    assert 1.1 < ours / theirs < 1.5
    assert 0 < fit.costs["1"].kv_tokens < faster.costs["1"].kv_tokens


@pytest.mark.parametrize("pair", MEASURED)
def test_a_pair_that_was_measured_takes_the_place_of_its_roofline(pair):
    path = measured_on("h200", pair, "NVIDIA H200")
    fit, priced = device_fit("h200", 2, *pair), what_if_fit("h200", 2, *pair)
    assert (fit.origin, priced.origin) == ("fitted", ROOFLINE)
    assert (fit.target, fit.draft) == (priced.target, priced.draft) == pair
    assert fit.acceptance_origin.startswith("recorded for inflated-")
    assert "not for this pair" in fit.acceptance_origin
    assert list(fit.costs) == list(priced.costs) == ["1", "1+1", "2"]
    for cost in fit.costs.values():
        assert cost.prefill.apart
        assert cost.target(1) < cost.target(9) < cost.target(17) < cost.target(129)
        assert cost.target(8, 4000.0, 8) > cost.target(4, 2000.0, 4)
        assert cost.target(8, 4000.0, 8) > cost.target(1, 500.0)  # as served, with its host's part
        assert cost.kv_tokens is not None
    assert fit.costs["2"].target(8) < fit.costs["1+1"].target(8)
    assert fit.costs["1"].link == 0.0 < fit.costs["1+1"].link
    assert fit.costs["1"].target(8) == pytest.approx(fit.costs["1+1"].target(8), rel=0.25)
    if "1" in Fit.load(path).costs:
        return
    # One GPU was not timed with both: each side of 1+1 ran on one.
    assert fit.costs["1"].target == fit.costs["1+1"].target
    assert fit.costs["1"].kv_tokens == priced.costs["1"].kv_tokens


def test_long_prompts_of_a_measured_pair_grow_as_the_roofline_says():
    pair = ("llama-3-70b:int4", "llama-3.2-1b:int4")
    fit, priced = device_fit("h200", 2, *pair), what_if_fit("h200", 2, *pair)
    for label, cost in fit.costs.items():
        sheet = priced.costs[label]
        for ours, theirs in (
            (cost.prefill, sheet.prefill),
            (cost.draft_prefill, sheet.draft_prefill),
        ):
            assert ours(8192) - ours(4096) == pytest.approx(theirs(8192) - theirs(4096), rel=0.01)
            assert 0 < ours(16) < ours(100) < ours(512) <= ours(2048) < ours(4096) < 3.0
    requests = pd.DataFrame({"prompt_tokens": [40, 5000]})
    assert "up to 5,000 tokens, but were measured up to 2,047" in prompt_note(fit, requests)
    assert prompt_note(fit, requests[:1]) == ""
    assert prompt_note(priced, requests) == ""


def test_all_gpus_measured_as_one_group_and_as_two_are_enough():
    pair = ("llama-3-70b:int4", "llama-3.2-1b:int4")
    fit = device_fit("h200", 4, *pair)
    assert fit.origin == "fitted"
    assert list(fit.costs) == ["1", "1+1", "2", "2+1", "2+2", "3", "3+1", "4"]  # no 1+2 or 1+3
    steps = [fit.costs[label].target(8) for label in ("4", "3+1", "2+2", "1+1")]
    assert steps == sorted(steps)
    assert all(cost.kv_tokens for cost in fit.costs.values())


@pytest.mark.parametrize("pair", MEASURED)
def test_every_pair_was_measured_on_four_h200s(pair):
    fit = device_fit("h200", 4, *pair)
    assert fit.origin == "fitted"
    assert {"1", "1+1", "2", "2+2", "3+1", "4"} <= set(fit.costs)
    steps = [fit.costs[label].target(8, 1024) for label in ("4", "3+1", "2", "1")]
    assert steps == sorted(steps)


@pytest.mark.parametrize("pair", MEASURED)
def test_every_pair_was_measured_on_four_h100s(pair):
    fit = device_fit("h100", 4, *pair)
    assert fit.origin == "fitted"
    assert {"1", "1+1", "2", "3+1", "4"} <= set(fit.costs)
    steps = [fit.costs[label].target(64, 8192, 8) for label in ("4", "3+1", "2", "1+1")]
    assert steps == sorted(steps)


def test_what_was_never_measured_is_priced_as_a_whole():
    pair = ("llama-3-70b:int4", "llama-3.2-1b:int4")
    assert device_fit("h200", 2, "llama-3.1-8b:int4", "llama-3.2-3b:int4").origin == ROOFLINE
    assert device_fit("h200", 2, "llama-3.1-8b", "llama-3.2-1b").origin == ROOFLINE  # bf16
    dialled = device_fit("h200", 2, *pair, acceptance=0.9)
    assert dialled.origin == "fitted"
    assert dialled.acceptance_origin == "made up: 0.9 of first draft tokens"
    measured = device_fit("h200", 2, *pair)
    assert dialled.acceptance.hit_rate(1) > measured.acceptance.hit_rate(1)
    assert dialled.errors["acceptance"] == DIALLED_ERROR


def test_who_plans_in_bf16_is_told_what_was_measured_in_int4():
    note = measured_note(device_fit("h200", 8, "llama-3.1-70b", "llama-3.2-1b"), "h200")
    assert note == (
        "these step times are from data sheets; measured ones of this pair with int4 weights ship: "
        "--target llama-3.1-70b:int4 --draft llama-3.2-1b:int4"
    )
    named = "--target llama-3-70b:int4 --draft llama-3.2-1b:int4"
    mixed = device_fit("h200", 8, "llama-3-70b:int4", "llama-3.2-1b")
    assert measured_note(mixed, "h200").endswith(named)
    for device, target in (("h200", "llama-2-70b"), ("a100", "llama-3.1-70b")):
        assert measured_note(what_if_fit(device, 8, target, "llama-3.2-1b"), device) == ""
    assert measured_note(device_fit("h200", 4, *MEASURED[0]), "h200") == ""
    assert "measured on up to 4" in measured_note(device_fit("h200", 8, *MEASURED[0]), "h200")


def test_a_kept_fit_is_named_by_where_its_step_times_are_from(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    sheets = what_if_fit("h200", 2, "llama-3.1-70b:fp8", "llama-3.2-1b", acceptance=0.7)
    _, file = kept_device_fit(sheets, "h200", 2, acceptance=0.7)
    assert file.name == "2xh200-llama-3.1-70b-fp8-llama-3.2-1b-roofline-acceptance-0.7.json"
    _, file = kept_device_fit(device_fit("h200", 2, *MEASURED[0]), "h200", 2)
    assert file.name == "2xh200-llama-3-70b-int4-llama-3.2-1b-int4-fitted.json"


def test_the_readme_names_every_pair_that_ships():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    pairs = {path.name.partition("-")[2] for path in FITS.iterdir() if path.name[0] == "h"}
    for pair in pairs:
        target, draft = (re.sub("-int4$", ":int4", name) for name in pair.split("+"))
        assert f"| `{target}` | " in text, target
        assert draft in text, draft
    assert len(pairs) == 4


@pytest.mark.parametrize("gpus", [2, 8])
def test_what_a_small_pair_accepts_may_be_as_far_off_as_any_other_pairs(gpus):
    pair = MEASURED[0]
    shipped_one = Fit.load(shipped_pair("h200", *pair))
    fit = device_fit("h200", gpus, *pair)
    assert shipped_one.has_own_recordings  # --fit: the runs of campaigns are of the inflated models
    assert not fit.has_own_recordings
    assert fit.errors["acceptance"] == OTHER_PAIR_ERROR
    chain = Candidate(Deployment(2), parse_policy("chain-3"), 1)
    for lengths in ([48], [400]):
        theirs = acceptance_error(shipped_one, chain, lengths)
        assert acceptance_error(fit, chain, lengths) == OTHER_PAIR_ERROR > 3 * theirs


@pytest.mark.parametrize("path", sorted(FITS.glob("*/fit.json")), ids=lambda path: path.parent.name)
def test_a_shipped_fit_has_the_errors_of_its_recordings_parts(path):
    fit = Fit.load(path)
    found = parts_covariance(fit.acceptance)
    assert len(found) == (0 if path == DEFAULT_FIT else 3)
    assert np.array(fit.parts_covariance) == pytest.approx(np.array(found))
    assert tokens_error(fit, [48]) == pytest.approx(fit.errors["acceptance"], rel=0.15)


@pytest.mark.parametrize(
    ("pair", "known"),
    [(MEASURED[2], (0.92, 1.32, 2.08, 2.72)), (MEASURED[0], (1.32, 1.51, 2.06, 2.68))],
)
def test_the_error_of_long_answers_is_that_of_recordings_drawn_again(pair, known):
    fit = Fit.load(shipped_pair("h100", *pair))
    parts = in_parts(fit.acceptance)
    draws, generator = [], np.random.default_rng(0)
    for kind, group in fit.acceptance.recordings.items():
        names = part_names(kind, parts)
        if len(names) < 3:
            continue  # "long", named for its prompts: its answers are short
        rates_PN = np.full((3, len(group)), np.nan)  # rounds a token
        for part, name in enumerate(names):
            reach = [number for number, r in enumerate(group) if len(r.ranks) > 64 * part]
            rates_PN[part, reach] = rounds_per_token(parts.recordings[name])
        is_long = ~np.isnan(rates_PN[2])
        again = [
            generator.choice(part_PN, (600, part_PN.shape[1]), axis=1)
            for part_PN in (rates_PN[:, is_long], rates_PN[:, ~is_long])
        ]
        draws.append(np.nanmean(np.concatenate(again, axis=2), axis=2))
    rounds_DP = np.mean(draws, axis=0).T
    for length, percent in zip((48, 96, 192, 400), known, strict=True):
        tokens_P = tokens_of_parts(np.array([length]), 3)[0]
        again = float(np.std(rounds_DP @ tokens_P / (rounds_DP @ tokens_P).mean()))
        found = tokens_error(fit, [length])
        assert 100 * found == pytest.approx(percent, abs=0.01)
        assert found == pytest.approx(again, rel=0.15)


def test_fits_of_two_gpus_ship_side_by_side(tmp_path, monkeypatch):
    pair = ("llama-3.1-8b:int4", "llama-3.2-1b:int4")
    measured = Fit.load(shipped_pair("h200", *pair))
    steps = {name: step for name, step in measured.steps.items() if name.startswith("1/")}
    for device, slower in (("h100", 1.4), ("h200", 1.0)):
        cost = measured.costs["1"]
        cost = replace(cost, target=cost.target.scaled(slower))
        folder = tmp_path / f"{device}-llama-3.1-8b-int4+llama-3.2-1b-int4"
        folder.mkdir()
        replace(measured, costs={"1": cost}, steps=steps).save(folder / "fit.json")
    monkeypatch.setattr(shipped, "FITS", tmp_path)
    fits = {device: device_fit(device, 1, *pair) for device in ("h100", "h200")}
    assert {fit.origin for fit in fits.values()} == {"fitted"}
    times = {device: fit.costs["1"].target(8) for device, fit in fits.items()}
    assert times["h100"] == pytest.approx(1.4 * times["h200"])
    larger = ("llama-3-70b:int4", "llama-3.2-3b:int4")
    assert device_fit("h100", 4, *larger).origin == ROOFLINE  # as one group, but no split of four


def test_a_laptop_that_plans_for_measured_gpus_plans_for_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_gpus", list)
    machine.hardware.cache_clear()
    path = tmp_path / "kept.json"
    device_fit("h200", 2, "llama-3-70b:int4", "llama-3.2-1b:int4").save(path)
    machine.hardware.cache_clear()
    meta = read_json(path, kind="fit")
    assert not meta["hardware"]["gpus"]
    assert is_of_gpus(meta)
    assert is_of_gpus({**meta, "device": ""})  # plans made before fits said so
    assert machines_of(path) == ["NVIDIA H200"]


def test_a_fit_that_ships_goes_by_its_name_unless_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = shipped_pair("h200", *MEASURED[0]).parent.name
    fit, file = fit_from_args(argparse.Namespace(fit=name))
    assert file == FITS / name / "fit.json"
    assert fit.target.startswith("inflated-")
    Fit.load(DEFAULT_FIT).save(tmp_path / name / "fit.json")
    assert fit_from_args(argparse.Namespace(fit=name))[0].target == DEFAULT_TARGET
    with pytest.raises(InputError, match=r"no-such-fit does not exist"):
        fit_from_args(argparse.Namespace(fit="no-such-fit"))
