"""Timeline, Validate and Profiles in Streamlit's own harness: full, empty, and asked wrongly."""

from __future__ import annotations

import dataclasses
import shlex
import shutil

import pytest
from streamlit.testing.v1 import AppTest

from codesign.cli import build_parser
from codesign.cli.dashboard import app_script
from codesign.fit.what_if import device_fit
from codesign.records import RoundLog
from codesign.run_directory import read_run, write_run

pytestmark = pytest.mark.usefixtures("components_scanned_once")
ASYNC = "async-tree-8x2x2 on 1+1, batch 4"
PLAIN = "plain on 2, batch 4"


def open_page(name: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(app_script()), default_timeout=60.0)
    app.query_params["trace"] = "upload"  # the first page has nothing to simulate
    app.run()
    for key, value in query.items():
        app.query_params[key] = value
    page = app.switch_page(f"app_pages/{name}.py").run()
    assert not page.exception
    return page


@pytest.fixture
def full(planned_folder, monkeypatch):
    monkeypatch.chdir(planned_folder)


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def widget(widgets, label: str):
    return next(each for each in widgets if each.label == label)


def texts(page: AppTest) -> str:
    return "\n".join(each.value for each in (*page.markdown, *page.caption))


def test_the_timeline_shows_a_run_and_the_tree_of_the_round_that_is_chosen(full):
    page = open_page("timeline", candidate=ASYNC)
    assert not page.error
    assert widget(page.selectbox, "Measured run").value == "runs/async-tree-8x2x2"
    slider = widget(page.slider, "Round of the request")
    assert f"Round {slider.value} of " in texts(page)
    slider.set_value(slider.value + 1).run()
    assert f"Round {slider.value} of " in texts(page)
    assert "draft tokens verified" in texts(page)


def test_the_command_that_measures_a_candidate_is_one_that_there_is(
    planned_folder, tmp_path, monkeypatch
):
    for file in planned_folder.glob("*.*"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    command = texts(open_page("timeline", candidate=ASYNC)).partition("To measure it: `")[2]
    words = shlex.split(command.partition("`")[0])
    assert build_parser("run").parse_args(words[1:]).candidate == [ASYNC]


def test_a_link_reproduces_candidate_request_and_round(full):
    page = open_page("timeline", candidate=ASYNC, request="2", round="2")
    assert widget(page.selectbox, "Candidate").value == ASYNC
    assert widget(page.number_input, "Request").value == 2
    assert "Round 2 of " in texts(page)


def test_a_round_that_the_next_candidate_does_not_have_becomes_one_that_it_has(full):
    page = open_page("timeline", candidate=PLAIN, round="31")
    assert widget(page.slider, "Round of the request").value == 31
    widget(page.selectbox, "Candidate").set_value(ASYNC).run()
    assert not page.exception
    last = int(widget(page.slider, "Round of the request").max)
    assert last < 31
    shown = int(texts(page).partition("Round ")[2].partition(" of ")[0])
    assert 1 <= shown <= last


@pytest.mark.parametrize("query", [{"round": "999"}, {"request": "77"}, {"candidate": "nobody"}])
def test_a_link_that_asks_for_what_is_not_there_shows_something_else(full, query):
    page = open_page("timeline", **query)
    assert not page.error
    assert widget(page.slider, "Round of the request").value >= 1


def test_plain_decoding_has_lanes_and_no_tree(full):
    page = open_page("timeline", candidate=PLAIN)
    assert not page.error
    assert "there is no tree to show" in texts(page)


def test_the_empty_timeline_names_the_command_that_makes_a_plan(empty):
    page = open_page("timeline")
    assert "codesign plan --trace" in page.code[0].value


def test_a_plan_that_is_none_is_one_line_on_the_timeline(full):
    page = open_page("timeline", plan="fit.json")
    assert page.error[0].value.startswith("fit.json is a fit file, not a plan file.")
    assert "\n" not in page.error[0].value
    assert widget(page.selectbox, "Plan file").value == "fit.json"  # and another can be chosen


def test_validate_compares_all_runs_and_the_tolerance_moves_the_verdict(
    planned_folder, tmp_path, monkeypatch
):
    shutil.copytree(planned_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    slow = read_run("runs/plain")
    for request in slow.records.requests:
        request.finish = request.arrival + 1.3 * (request.finish - request.arrival)
    summary = {"candidate": slow.summary["candidate"]}
    write_run("runs/plain", slow.records, origin="measured", summary=summary, seed=None)
    page = open_page("validate")
    assert not page.error
    assert "the worst is" in page.warning[0].value
    assert PLAIN in page.warning[0].value
    widget(page.slider, "Tolerance, %").set_value(50).run()
    assert not page.warning
    assert "are all within 50%" in page.success[0].value


def test_validate_says_that_the_fit_is_of_a_faster_machine_and_what_to_type(
    planned_folder, tmp_path, monkeypatch
):
    shutil.copytree(planned_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = read_run("runs/plain")
    for request in run.records.requests:
        request.finish = request.arrival + 2 * (request.finish - request.arrival)
    run.records.rounds = RoundLog(
        dataclasses.replace(r, target=2 * r.target) for r in run.records.rounds
    )
    summary = {"candidate": run.summary["candidate"]}
    write_run("runs/plain", run.records, origin="measured", summary=summary, seed=None)
    page = open_page("validate")
    assert "took 2 times what the fit says" in page.info[0].value
    assert page.info[0].value.endswith("codesign fit profile --out fit.json")
    widget(page.slider, "Tolerance, %").set_value(50).run()
    assert not page.info


def test_validate_takes_one_run_as_well_as_a_folder_of_them(full):
    page = open_page("validate", folder="runs/plain")
    assert widget(page.multiselect, "Runs").value == ["runs/plain"]
    assert not page.error


def test_empty_validate_names_the_commands_that_fill_it(empty):
    assert "codesign run --plan" in open_page("validate").code[0].value


def test_a_folder_without_runs_is_one_line_and_another_can_be_named(full):
    page = open_page("validate", folder="nowhere")
    assert page.error[0].value.startswith("nowhere does not exist.")
    widget(page.text_input, "Folder of runs").set_value("runs").run()
    assert not page.error


def test_profiles_shows_the_fit_of_this_folder_and_what_a_forward_costs(full):
    page = open_page("profiles")
    assert not page.error
    assert widget(page.metric, "Target, 1 row").value == "20 ms"
    split = widget(page.selectbox, "Split")
    split.set_value("1+1").run()
    assert widget(page.metric, "Target, 1 row").value == "30 ms"  # on one of the two workers
    assert widget(page.metric, "Message").value == "0.2 ms"


def test_splits_that_were_measured_are_fitted_where_others_of_their_fit_are_extrapolated(empty):
    device_fit("h200", 8, "llama-3-70b:int4", "llama-3.2-1b:int4").save("fit.json")
    for split, origin in (("4+4", "fitted"), ("8", "extrapolated")):
        page = open_page("profiles", measured_fit="fit.json", fit_split=split)
        assert widget(page.selectbox, "Split").value == split
        shown = [metric.proto.delta_description for metric in page.metric]
        assert set(shown) == {origin}


def test_a_split_that_the_next_fit_does_not_have_becomes_another(full):
    page = open_page("profiles", fit_split="1+1")
    assert widget(page.selectbox, "Split").value == "1+1"
    fits = widget(page.selectbox, "Fit")
    fits.set_value(next(path for path in fits.options if "fit.json" in path)).run()
    assert not page.exception


def test_profiles_of_an_empty_folder_shows_what_ships_and_how_to_measure(empty):
    page = open_page("profiles")
    assert page.dataframe[0].value["machine"].tolist()
    assert "codesign profile --out profile" in page.code[0].value


def test_a_model_that_fits_nowhere_is_one_line_and_the_page_goes_on(empty):
    page = open_page("profiles", sheet="rtx-4090", sheet_model="qwen2-72b")
    assert page.warning[0].value.startswith("qwen2-72b does not fit on 8 x rtx-4090.")
    widget(page.selectbox, "GPU").set_value("h200").run()
    assert not page.warning
