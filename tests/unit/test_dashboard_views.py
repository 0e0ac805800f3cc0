"""What the pages Timeline, Validate and Profiles draw is what the runs and the fits say."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from codesign.artifacts import header, read_json, write_json, write_table
from codesign.dashboard.files import plan_files, plan_of_run, run_folders, runs_of, unzipped
from codesign.dashboard.profiles import (
    FLOOR_PARTS,
    coverage_table,
    device_table,
    floor_table,
    forward_parts,
    known_fits,
    measured_points,
)
from codesign.dashboard.timeline import lane_chart, lanes, request_rounds, served_requests, window
from codesign.dashboard.trees import round_sentence, round_table, tree_chart, tree_table
from codesign.dashboard.validation import (
    compared,
    request_chart,
    request_table,
    residual_table,
)
from codesign.errors import InputError
from codesign.fit import Fit
from codesign.fit.devices import load_device
from codesign.fit.priced_model import parse_model
from codesign.fit.roofline import Forward
from codesign.fit.shipped import FITS, is_of_gpus
from codesign.plan import Plan
from codesign.policy.cost import RoundCost, StepTime
from codesign.run_directory import StoredRun, read_run
from codesign.sim.replay import ReplayedRound, replay
from codesign.validate import Validation, validate
from codesign.validate.charts import SPAN_COLOURS
from codesign.validate.words import verdict

ASYNC = "async-tree-8x2x2"


@pytest.fixture(scope="module")
def run(planned_folder: Path) -> StoredRun:
    return read_run(planned_folder / "runs" / ASYNC)


@pytest.fixture(scope="module")
def validation(planned_folder: Path) -> Validation:
    plan = Plan.load(planned_folder / "plan.json")
    return validate(plan, Fit.load(plan.fit.check()), run_folders(planned_folder / "runs"))


@pytest.fixture(scope="module")
def rounds(planned_folder: Path) -> list[ReplayedRound]:
    plan = Plan.load(planned_folder / "plan.json")
    candidate = plan.find("async-tree").candidate
    fit = Fit.load(plan.fit.check())
    return replay(plan.requests(), 1, candidate, fit, serving=plan.serving, slo=plan.slo, seed=0)


def test_the_rounds_of_a_request_are_as_many_as_it_took_part_in(run):
    for request in run.records.requests:
        assert len(request_rounds(run.records, request.request_id)) == request.num_rounds


def test_a_request_that_was_not_served_is_one_line(run):
    with pytest.raises(InputError, match="request 99 was not served"):
        request_rounds(run.records, 99)


def test_lanes_hold_every_span_once_and_at_its_length(run):
    rounds = request_rounds(run.records, 2)
    shown = lanes(rounds, side="measured", origin=float(rounds["start"].iloc[0]))
    total = (shown["end"] - shown["begin"]).sum()
    spans = sum(rounds[name].sum() for name in ("prefill", *SPAN_COLOURS))
    assert total == pytest.approx(1e3 * spans, abs=1e-3)
    assert shown["begin"].min() == pytest.approx(0.0, abs=1e-6)


def test_spans_of_a_lane_do_not_overlap(run):
    shown = lanes(request_rounds(run.records, 2), side="measured", origin=0.0)
    for _, lane in shown.sort_values("begin").groupby("row"):
        assert (lane["begin"].to_numpy()[1:] >= lane["end"].to_numpy()[:-1] - 1e-6).all()


def test_of_each_lane_the_simulated_one_stands_above_the_measured_one(run):
    rounds = request_rounds(run.records, 2)
    both = pd.concat([lanes(rounds, side=s, origin=0.0) for s in ("measured", "simulated")])
    spec = lane_chart(both, chosen_round=2).to_dict()
    order = spec["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert order[:4] == [
        "target, simulated", "target, measured", "draft, simulated", "draft, measured",
    ]  # fmt: skip


@pytest.mark.parametrize(("chosen", "first"), [(0, 0), (5, 3), (9, 6)])
def test_a_window_stays_within_the_rounds(chosen, first):
    shown = window(pd.DataFrame({"round": range(10)}), chosen, 4)
    assert shown["round"].tolist() == list(range(first, first + 4))


def test_requests_to_choose_from_were_served_by_every_run(run):
    ids = served_requests([run.records])
    assert ids == [r.request_id for r in run.records.requests if r.output_tokens > 1]
    assert served_requests([]) == []


def test_a_drawn_tree_counts_what_the_round_says(rounds):
    for r in rounds:
        table = tree_table(r, with_proposals=True)
        assert len(table) == len(r.parents)
        states = table["state"].value_counts()
        assert states.get("accepted", 0) == len(r.accepted)
        assert states.get("the target's own token", 0) == int(r.is_hit)
        assert (table["fate"] == "kept").sum() == len(r.kept)


def test_no_two_leaves_share_a_place_and_parents_stand_between_their_children(rounds):
    table = tree_table(max(rounds, key=lambda r: len(r.parents)), with_proposals=True)
    leaves = table[~table["node"].isin(table["parent"])]
    assert leaves["place"].is_unique
    for parent, children in table[table["parent"] >= 0].groupby("parent"):
        place = table.loc[table["node"] == parent, "place"].item()
        assert children["place"].min() <= place <= children["place"].max()


def test_proposals_that_nobody_used_are_drawn_on_request_alone(rounds):
    r = max(rounds, key=lambda r: len(r.parents))
    assert len(tree_table(r)) < len(tree_table(r, with_proposals=True))
    assert set(r.verified) <= set(tree_table(r)["node"])


def test_a_tree_can_be_drawn_and_read_without_colour(rounds):
    layers = tree_chart(rounds[2]).to_dict()["layer"]
    marks = [layer for layer in layers if layer["mark"]["type"] == "point"]
    for mark in marks:
        shapes = mark["encoding"]["shape"]["scale"]["range"]
        assert len(set(shapes)) == len(shapes)


def test_the_table_of_rounds_adds_up_to_the_request(rounds):
    table = round_table(rounds)
    assert table["emitted"].sum() == 31  # the first of 32 came with the prompt
    assert (table["accepted"] <= table["verified"]).all()
    assert round_sentence(rounds[0], len(rounds)).startswith(f"Round 1 of {len(rounds)}: the draft")


def test_a_round_of_one_draft_token_is_told_in_the_singular(rounds):
    told = [dataclasses.replace(rounds[2], verified=[0, *range(1, n + 1)]) for n in (1, 2)]
    one, two = (round_sentence(shown, 9) for shown in told)
    assert "9: 1 draft token verified" in one
    assert "9: 2 draft tokens verified" in two


def test_residuals_are_relative_to_the_measurement(validation):
    table = residual_table(validation.runs)
    run = validation.runs[0]
    mine = table[(table["run"] == run.label) & (table["figure"] == "TPOT mean")].iloc[0]
    found = run.figure("tpot_mean")
    assert mine["error"] == pytest.approx(found.predicted.value / found.measured - 1.0)
    assert mine["low"] <= mine["error"] <= mine["high"]
    assert (mine["inside"] == "inside") == (mine["low"] <= 0.0 <= mine["high"])


def test_the_verdict_names_the_worst_figure(validation):
    is_good, sentence = verdict(validation, 10.0)
    assert is_good
    assert sentence.startswith("2 runs: ")
    is_good, sentence = verdict(validation, 1e-9)
    assert not is_good
    assert "the worst is" in sentence


def test_many_requests_are_thinned_out_and_few_are_all_there(validation, monkeypatch):
    assert len(request_table(validation.runs, "tpot")) == 16
    monkeypatch.setattr("codesign.dashboard.validation._MOST_POINTS", 6)
    assert 2 <= len(request_table(validation.runs, "tpot")) <= 8
    request_chart(validation.runs, "ttft").to_dict()


def test_plans_and_runs_of_a_folder_are_found(planned_folder, monkeypatch):
    monkeypatch.chdir(planned_folder)
    assert plan_files(Path()) == [Path("plan.json")]
    assert len(run_folders(Path("runs"))) == 2
    assert run_folders(Path("runs") / ASYNC) == [Path("runs") / ASYNC]
    # A simulated run names no plan: the one that lies around stands in.
    assert plan_of_run(Path("runs") / ASYNC, plan_files(Path())) == Path("plan.json")


def test_a_folder_or_a_dead_link_with_the_name_of_a_plan_is_passed_over(tmp_path):
    (tmp_path / "old.json").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    assert plan_files(tmp_path) == []


def test_runs_of_a_candidate_are_found_beside_its_plan(planned_folder, tmp_path):
    plan = planned_folder / "plan.json"
    assert runs_of(plan, "plain on 2, batch 4") == [planned_folder / "runs" / "plain"]
    assert runs_of(plan, "chain-3 on 2, batch 4") == []
    (tmp_path / "runs").mkdir()
    assert runs_of(tmp_path / "plan.json", "plain on 2, batch 4") == []


def test_an_uploaded_zip_of_runs_and_plan_is_as_good_as_the_folder(
    planned_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in sorted(planned_folder.rglob("*")):
            archive.write(path, path.relative_to(planned_folder))
    folder = unzipped(buffer.getvalue())
    runs = run_folders(folder)
    assert [run.name for run in runs] == [ASYNC, "plain"]
    plan = Plan.load(folder / "plan.json")
    assert len(validate(plan, Fit.load(plan.fit.check()), runs[:1]).runs) == 1
    assert unzipped(buffer.getvalue()) == folder


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_an_upload_that_is_no_zip_is_one_line(data):
    with pytest.raises(InputError, match="no readable ZIP") as caught:
        unzipped(data)
    assert "\n" not in str(caught.value)


def test_a_zip_cannot_write_outside_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("../../outside/run.json", "{}")
    folder = unzipped(buffer.getvalue())
    assert not (folder.parents[1] / "outside").exists()
    assert all(folder in path.parents for path in tmp_path.rglob("run.json"))


def test_runs_are_compared_once_until_they_change(planned_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(planned_folder, folder)
    asked = []
    runs = [str(folder / "runs" / "plain")]

    def compare() -> Validation:
        return compared(str(folder / "plan.json"), runs, progress=lambda *a: asked.append(a))

    first = compare()
    assert asked
    count = len(asked)
    assert compare() is first
    assert len(asked) == count
    os.utime(folder / "runs" / "plain" / "run.json", (1, 1))
    assert compare() is not first


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_a_folder_without_runs_says_how_to_make_one(name, tmp_path):
    with pytest.raises(InputError, match="codesign run --plan"):
        run_folders(tmp_path / name)


def test_the_plan_that_a_run_names_is_found_from_another_folder(tmp_path):
    folder = tmp_path / "demo" / "runs" / "one"
    inputs = {"plan": {"path": "demo/plan.json", "sha256": ""}}
    write_json(folder / "run.json", {**header("run", seed=0), "inputs": inputs})
    (tmp_path / "demo" / "plan.json").write_text("{}")
    assert plan_of_run(folder) == tmp_path / "demo" / "plan.json"


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_the_parts_of_a_forward_add_up_and_one_gpu_reduces_nothing(gpus):
    forward = Forward(parse_model("llama-3.1-8b:int4"), load_device("h100"), gpus)
    parts = forward_parts(forward)
    assert list(parts) == list(FLOOR_PARTS)
    assert sum(parts.values()) == pytest.approx(forward.delta)
    assert min(parts.values()) >= 0
    assert (parts["all-reduces"] == 0) == (gpus == 1)


def test_gpus_that_do_not_hold_the_weights_have_no_floor():
    forwards = [
        Forward(parse_model("llama-3.1-70b"), load_device("h100"), gpus) for gpus in range(1, 9)
    ]
    assert sorted(set(floor_table(forwards)["gpus"])) == [3, 4, 5, 6, 7, 8]


def test_points_are_medians_less_what_the_fit_charges_for_context(tmp_path):
    time = StepTime.linear(alpha=1e-5, gamma=1e-3, delta=0.02)
    shapes = [(rows, 2, context) for rows in (1, 4, 16) for context in (0, 512, 4096)]
    steps = pd.DataFrame(
        [
            {"deployment": "2", "op": "target", "rows": r, "requests": q, "context": c,
             "beside": False, "seconds": factor * time(r, c)}
            for r, q, c in shapes
            for factor in (0.5, 1.0, 9.0)
        ]
    )  # fmt: skip
    write_table(tmp_path / "steps.parquet", steps, header("profile", seed=0))
    points = measured_points(tmp_path, "2", "target", RoundCost(time, time, time, time))
    assert len(points) == 9
    expected = [1e3 * time(float(rows), 0.0) for rows in points["rows"]]
    assert np.allclose(points["without_context"], expected)
    assert set(points["group"]) == {"no context", "up to 1,024", "more"}
    assert (points["slowest"] > points["fastest"]).all()


def test_points_of_a_draft_are_without_its_rows_children(tmp_path):
    time = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.02)
    steps = pd.DataFrame(
        [
            {"deployment": "2", "op": "draft", "rows": 32, "requests": q, "context": 0,
             "beside": False, "seconds": 0.02 + 1e-5 * n * (q > 1), "nodes": n}
            for q, n in ((1, 31), (8, 224))
        ]
    )  # fmt: skip
    write_table(tmp_path / "steps.parquet", steps, header("profile", seed=0))
    cost = RoundCost(time, time, time, time, child=1e-5)
    points = measured_points(tmp_path, "2", "draft", cost)
    assert np.allclose(points["ms"], 20.0)


def test_what_ships_is_known_everywhere_and_labels_are_unique(
    tmp_path, planned_folder, monkeypatch
):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    assert any(entry.is_shipped for entry in known_fits(tmp_path))
    labels = [entry.label for entry in known_fits(planned_folder)]
    assert len(set(labels)) == len(labels) >= 2


def test_a_file_that_is_no_fit_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    (tmp_path / "fit.json").write_text("[1, 2")
    assert all(entry.is_shipped for entry in known_fits(tmp_path))


def test_data_sheets_name_their_source():
    table = device_table()
    assert {"h100", "h200", "b200"} <= set(table["name"])
    assert table["source"].str.len().min() > 10


def test_the_machine_of_a_fit_has_as_many_gpus_as_its_largest_split(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    machines = {str(e.path.parent.name): e.machine for e in known_fits(tmp_path)}
    assert machines["h200-llama-3-70b-int4+llama-3.2-1b-int4"] == "4 x NVIDIA H200"
    assert set(coverage_table(known_fits(tmp_path))["file"]) == {"shipped"}
    assert machines["h100-qwen2-72b-int4+qwen2-1.5b-int4"] == "4 x NVIDIA H100 80GB HBM3"


def test_a_fit_of_gpus_that_a_laptop_made_is_of_these_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    shipped = FITS / "h200-qwen2-72b-int4+qwen2-1.5b-int4" / "fit.json"
    laptop = {"cpu": "a laptop's", "cores": 4, "gpus": []}
    body = {**read_json(shipped, kind="fit"), "hardware": laptop, "device": "cuda"}

    def machine(body):
        write_json(tmp_path / "fit.json", body)
        [entry] = [entry for entry in known_fits(tmp_path) if not entry.is_shipped]
        return entry.machine

    assert machine(body) == "4 x NVIDIA H200"
    threads = {"machine": "Xeon", "day": "2026-11-23", "parts": ["2"]}
    on_threads = {**body, "device": "cpu", "measured": [threads]}
    assert machine(on_threads) == "Xeon"
    host = {**laptop, "cpu": "Xeon", "gpus": [{"name": "NVIDIA H200"}]}
    assert machine({**on_threads, "hardware": host}) == "Xeon, 4 cores"
    older = {**body, "device": "", "hardware": host}
    assert machine(older) == "4 x NVIDIA H200"


def test_what_a_plan_is_exported_for_are_the_workers_that_were_measured():
    laptop, host = {"cpu": "Xeon", "gpus": []}, {"cpu": "Xeon", "gpus": [{"name": "H200"}]}
    fitted = {"origin": "fitted", "costs": {"2": {"kv_tokens": None}}}
    assert is_of_gpus({**fitted, "hardware": laptop, "device": "cuda"})
    assert is_of_gpus({**fitted, "hardware": host})  # older fits do not say
    assert not is_of_gpus({**fitted, "hardware": laptop})
    known = {"2": {"kv_tokens": 4096}}
    assert is_of_gpus({**fitted, "hardware": laptop, "costs": known})
    assert not is_of_gpus({**fitted, "hardware": host, "device": "cpu"})
    assert not is_of_gpus({**fitted, "hardware": host, "device": "cpu-ranks"})
    assert not is_of_gpus({"origin": "roofline", "hardware": host})
