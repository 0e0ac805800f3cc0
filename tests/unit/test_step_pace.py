"""Whether a run's steps took what its fit says, and what is said where they did not."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from codesign.artifacts import machine, read_json, write_json
from codesign.artifacts.machine import machine_name
from codesign.config import parse_deployment
from codesign.fit.shipped import DEFAULT_FIT, FITS, machine_of, machines_of
from codesign.fit.step_pace import (
    Served,
    has_usual_rows,
    other_machine_note,
    step_pace,
    step_pace_note,
)
from codesign.fit.what_if import device_fit
from codesign.records import RoundLog, RoundRecord

EPYC = Served("smollm2-135m", "smollm2-135m-draft", "cpu", "AMD EPYC")
H100 = Served("./70b", "./1 b", "cuda", "NVIDIA H100 80GB HBM3")
H200_FIT = FITS / "h200-qwen2-72b-int4+qwen2-1.5b-int4" / "fit.json"
QUIET = RoundRecord(
    round=0, start=0.0, batch=2, rows=8, context=300, num_expansions=3, draft_rows=6,
    num_draft_tokens=6, num_accepted_tokens=2, num_emitted_tokens=4, prefill=0.0, prefill_tokens=0,
    target=0.0, link_there=0.0, link_back=0.0, reroot=0.0, draft=0.0,
)  # fmt: skip


def of(cost, factor: float, **changes) -> RoundRecord:
    record = dataclasses.replace(QUIET, **changes)
    expected = cost.target(record.rows, record.context, max(record.batch, 1))
    return dataclasses.replace(record, target=factor * expected)


def note_of(paces, *known, split: str = "2", **options) -> str:
    size = parse_deployment(split)
    return step_pace_note([(size, pace) for pace in paces], *known, **options)


def test_the_pace_is_that_of_rounds_without_prompts_whatever_their_rows(machine_fit):
    cost = machine_fit.costs["2"]
    rounds = [of(cost, 2.0), of(cost, 2.0, rows=3, batch=1, context=40)]
    disturbed = [of(cost, 50.0, prefill_tokens=64), of(cost, 50.0, batch=0)]
    found = step_pace(cost, RoundLog([*rounds, *disturbed]), is_apart=False)
    assert found == pytest.approx(2.0)
    assert step_pace(cost, RoundLog(disturbed), is_apart=False) is None
    assert step_pace(cost, RoundLog(), is_apart=False) is None


def test_rounds_by_turns_are_held_against_steps_that_wait_for_the_host(machine_fit):
    cost = machine_fit.costs["2"]
    ahead = dataclasses.replace(cost, target=dataclasses.replace(cost.target, ahead=1e-3))
    plain = of(cost, 1.0, rows=2)
    assert step_pace(ahead, RoundLog([plain]), is_apart=False) > 1.01
    by_turns = [dataclasses.replace(plain, running=3), of(ahead, 1.0, rows=2)]
    assert step_pace(ahead, RoundLog(by_turns), is_apart=False) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("factor", "pace"), [(1.0, 1.0), (1.05, 1.0), (2.0 / 0.9, 2.0), (0.5, 0.5)]
)
def test_a_draft_beside_the_target_may_cost_what_the_fit_says(machine_fit, factor, pace):
    cost = machine_fit.costs["1+1"]  # it may cost a tenth
    log = RoundLog([of(cost, factor)])
    assert step_pace(cost, log, is_apart=True) == pytest.approx(pace)
    assert step_pace(cost, log, is_apart=False) == pytest.approx(factor)


def test_padded_forwards_are_not_held_against_a_fit():
    assert has_usual_rows({})
    assert has_usual_rows({"padded_rows": 8})
    assert not has_usual_rows({"padded_rows": 128})


def test_paces_within_the_tolerance_are_not_worth_a_line(machine_fit):
    assert note_of([None, 1.1, 0.9], machine_fit, DEFAULT_FIT, EPYC) == ""
    assert note_of([1.1], machine_fit, DEFAULT_FIT, EPYC, tolerance=0.05)


def test_the_fit_that_ships_may_be_of_another_processor_of_the_same_name(machine_fit):
    note = note_of([2.0, 1.9, 1.0], machine_fit, DEFAULT_FIT, EPYC)
    assert "took 1.9 to 2 times what the fit says" in note
    assert "the one that ships, measured on AMD EPYC" in note
    assert "perhaps another of that name" in note
    assert note.endswith(
        "with --fit fit.json: codesign profile --out profile && codesign fit profile --out fit.json"
    )
    assert other_machine_note(machine_fit, DEFAULT_FIT, EPYC) == ""


def test_ranks_on_a_cpu_are_not_the_threads_of_its_fit(machine_fit):
    ranks = dataclasses.replace(EPYC, device="cpu-ranks")
    note = note_of([2.0], machine_fit, DEFAULT_FIT, ranks)
    assert "AMD EPYC, with a process for each worker where the fit is of threads. Measure" in note
    assert "codesign profile --device cpu-ranks --out profile" in note
    of_ranks = dataclasses.replace(machine_fit, device="cpu-ranks")
    assert "or busy" in note_of([2.0], of_ranks, DEFAULT_FIT, ranks)


def test_a_fit_of_an_h200_is_named_where_an_h100_ran_with_the_models_to_profile(machine_fit):
    note = note_of([1.5], machine_fit, H200_FIT, H100)
    assert "measured on NVIDIA H200; the run was on NVIDIA H100 80GB HBM3." in note
    command = "codesign profile --target ./70b --draft './1 b' --device cuda --out profile"
    assert note.endswith(f"{command} && codesign fit profile --out fit.json")
    before = other_machine_note(machine_fit, H200_FIT, H100)
    assert before.startswith("the plan's step times were measured on NVIDIA H200, this is NVIDIA H")
    assert before.endswith(f"{command} && codesign fit profile --out fit.json")


def test_the_fit_to_make_samples_as_the_plans_did_and_replaces_its_device(machine_fit):
    """A plan has temperature, top-k and top-p from its fit alone."""
    warm = dataclasses.replace(machine_fit, temperature=0.7, top_k=40, top_p=0.9)
    note = note_of([2.0], warm, DEFAULT_FIT, EPYC)
    assert "codesign profile --temperature 0.7 --top-k 40 --top-p 0.9 --out profile" in note
    sheet = dataclasses.replace(machine_fit, origin="roofline")
    assert "--fit fit.json in place of --device: codesign profile" in note_of(
        [2.0], sheet, H200_FIT, H100
    )


def test_extrapolated_steps_are_said_to_be(machine_fit):
    beyond = dataclasses.replace(machine_fit, origin="extrapolated")
    note = note_of([1.5], beyond, H200_FIT, H100)
    assert "measured on NVIDIA H200, or extrapolated from there; the run was on NVIDIA" in note


@pytest.mark.parametrize(
    ("machine", "doubt"), [("NVIDIA H200", ", perhaps another of that name, or busy"), ("H100", "")]
)
def test_steps_that_nobody_measured_may_be_extrapolated_wrongly(machine, doubt):
    fit = device_fit("h200", 8, "qwen2-72b:int4", "qwen2-1.5b:int4")
    served = Served("./72b", "./1.5b", "cuda", machine)
    known = fit, H200_FIT, served
    extrapolated = "; steps on 8 GPUs were extrapolated, not measured, and may be off for that."
    assert f"run was on {machine}{doubt}{extrapolated} Measure" in note_of([1.5], *known, split="8")
    assert "steps on 7 GPUs were" in note_of([1.5], *known, split="7+1")
    for split in ("4+4", "4/p4", "4+3"):  # of the target, whose steps these are
        assert "not measured" not in note_of([1.5], *known, split=split)
    on_time, off = (parse_deployment("8"), 1.0), (parse_deployment("2x4"), 1.5)
    assert "not measured" not in step_pace_note([on_time, off], *known)


def test_data_sheets_are_of_no_machine(machine_fit):
    sheet = dataclasses.replace(machine_fit, origin="roofline")
    assert other_machine_note(sheet, H200_FIT, H100) == ""
    assert "which is from data sheets; the run was on NVIDIA H100" in note_of(
        [0.7], sheet, H200_FIT, H100
    )


def test_a_fit_is_of_the_machine_that_was_measured_not_of_the_one_that_fitted(tmp_path):
    shutil.copytree(H200_FIT.parent, tmp_path / "copied")
    path = tmp_path / "copied" / "fit.json"
    laptop = {"cpu": "a laptop's", "cores": 4, "gpus": []}
    fit = {**read_json(path, kind="fit"), "hardware": laptop}
    write_json(path, fit)
    newest = max(each["day"] for each in fit["measured"])
    assert machines_of(path) == ["NVIDIA H200"]
    assert machine_of(path) == f"NVIDIA H200, measured {newest}"
    assert machine_of(DEFAULT_FIT) == "AMD EPYC, measured 2026-11-21"  # says nothing of its parts


def test_a_host_with_gpus_is_its_cpu_to_what_runs_on_threads(monkeypatch):
    host = {"cpu": "Xeon", "gpus": [{"name": "NVIDIA H100"}]}
    assert machine_name(host) == machine_name(host, "cuda") == "NVIDIA H100"
    assert machine_name(host, "cpu") == machine_name(host, "cpu-ranks") == "Xeon"
    summary = {"hardware": host, "target": "t", "draft": "d", "settings": {"device": "cuda"}}
    assert Served.of_summary(summary) == Served("t", "d", "cuda", "NVIDIA H100")
    assert Served.of_summary({"hardware": host}).machine == "Xeon"
    monkeypatch.setattr(machine, "_gpus", lambda: host["gpus"])
    machine.hardware.cache_clear()
    try:
        assert Served.here("t", "d", "cuda").machine == "NVIDIA H100"
    finally:
        machine.hardware.cache_clear()
