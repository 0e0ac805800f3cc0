"""The dashboard's pages in Streamlit's own harness, and the verb that serves them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from codesign.cli.dashboard import app_script
from codesign.dashboard import what_if
from codesign.errors import InputError

pytestmark = pytest.mark.usefixtures("components_scanned_once")
SMALL = {
    "trace": "synthetic", "rate": "3.0", "minutes": "1", "prompt_mean": "304", "output_mean": "40",
}  # fmt: skip


def open_page(name: str, **query: str) -> AppTest:
    """A page as a link opens it, or as one comes to it from the first page."""
    app = AppTest.from_file(str(app_script()), default_timeout=60.0)
    for key, value in query.items():
        app.query_params[key] = value
    app.run()
    return app if name == "what_if" else app.switch_page(f"app_pages/{name}.py").run()


@pytest.mark.parametrize("name", ["what_if", "plan"])  # the others: test_dashboard_pages.py
def test_the_pages_that_predict_open_in_an_empty_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = open_page(name, **SMALL)
    assert not page.exception
    assert page.title[0].value


def number(page: AppTest, label: str) -> float:
    metric = next(metric for metric in page.metric if metric.label.startswith(label))
    return float(metric.value.replace(",", ""))


def test_what_if_answers_when_it_opens_and_a_faster_stream_waits_longer():
    page = open_page("what_if", **SMALL)
    assert not page.exception
    assert not page.error
    before = number(page, "TTFT p90")
    assert page.markdown[0].value.count("tree-8x4x2 on 8, batch 64") == 1
    page.slider(key="rate").set_value(40.0).run()
    assert number(page, "TTFT p90") > before
    assert number(page, "Load") > 60


def test_the_view_that_is_answered_beforehand_is_the_first_one(monkeypatch):
    asked = []

    def refuse(question, **options):
        asked.append(question)
        raise InputError("enough")

    monkeypatch.setattr(what_if, "predict", refuse)
    assert open_page("what_if").error[0].value == "enough"
    assert asked == [what_if.first_question()]


def test_a_link_opens_what_it_names():
    page = open_page("what_if", **SMALL, policy="async-tree", split="6+2", rows="16", batch="32")
    assert page.markdown[0].value.count("async-tree-16x4x2 on 6+2, batch 32") == 1
    assert number(page, "Target busy") > 0
    assert number(page, "Draft busy") > 0


def test_what_a_link_asks_for_in_vain_is_said_in_one_line_that_goes_with_the_next_choice():
    page = open_page("what_if", **SMALL, gpus="99", device="z100", k="2", percentile="90")
    (warning,) = page.warning
    assert warning.value.startswith(
        "Not understood in the link: `gpus=99` (used: 8), `device=z100` (used: h100). Once"
    )
    page.number_input(key="gpus").set_value(4).run()
    assert not page.warning
    assert not open_page("what_if", **SMALL, policy="chain", k="2", preemption="true").warning


def test_a_link_to_the_plan_names_what_is_wanted_by_its_title():
    page = AppTest.from_file(str(app_script()), default_timeout=60.0)
    page.switch_page("app_pages/plan.py")
    for key, value in {**SMALL, "objective": "fewest", "runnable": "1"}.items():
        page.query_params[key] = value
    page.run()
    (warning,) = page.warning
    assert "`objective=fewest` (used: most goodput), `runnable=1` (used: false)." in warning.value


def test_a_longer_chain_accepts_more():
    page = open_page("what_if", **SMALL, policy="chain", k="1")
    before = number(page, "Emitted a round")
    page.slider(key="k").set_value(8).run()
    assert number(page, "Emitted a round") > before


def test_a_size_that_the_next_policy_does_not_have_becomes_one_that_it_has():
    page = open_page("what_if", **SMALL, policy="chain", k="16")
    page.selectbox(key="policy").set_value("ssd").run()
    assert not page.exception
    assert page.slider(key="k").value <= page.slider(key="k").max
    assert "ssd-" in page.markdown[0].value


def test_a_wrong_file_is_one_line_and_the_page_stays_usable(tmp_path):
    wrong = tmp_path / "photo.csv"
    wrong.write_bytes(b"\x89PNG not a trace at all")
    page = open_page("what_if", trace="file on this machine", path=str(wrong))
    assert not page.exception
    assert [error.value.count("\n") for error in page.error] == [0]
    assert "photo.csv" in page.error[0].value
    page.selectbox(key="trace").set_value("synthetic").run()
    assert not page.error
    assert number(page, "TTFT p90") > 0


def test_an_upload_is_asked_for_and_models_without_room_are_one_line():
    page = open_page("what_if", trace="upload")
    assert not page.exception
    assert page.code[0].value == "codesign trace list"
    page = open_page("what_if", **SMALL, gpus="1")
    assert not page.exception
    assert len(page.error) == 1


def test_what_was_chosen_on_a_page_is_chosen_on_the_next():
    page = open_page("what_if", **SMALL)
    page.number_input(key="ttft").set_value(750).run()
    plan = page.switch_page("app_pages/plan.py").run()
    assert plan.selectbox(key="trace").value == "synthetic"
    assert plan.number_input(key="ttft").value == 750
    back = plan.switch_page("app_pages/what_if.py").run()
    assert back.number_input(key="ttft").value == 750


def test_a_plan_is_searched_compared_and_taken_away():
    page = open_page("plan", **SMALL)
    page.text_input(key="policies").set_value("plain,chain-3,tree-8x4x2")
    page.number_input(key="max_requests").set_value(60).run()
    assert page.code[0].value.startswith("codesign trace synth steady --rate 3")
    page.button[0].click().run(timeout=120)
    assert not page.exception
    assert not page.error
    shown = " ".join(line.value for line in page.markdown)
    assert "**Why:**" in shown
    assert len(page.dataframe[0].value) >= 3
    assert set(page.dataframe[1].value.columns) == {"figure", "first", "second", "change", "better"}
    assert page.download_button[0].label == "Download plan (zip)"
    page.selectbox(key="engine").set_value("vllm").run()
    assert any("vllm serve" in line.value for line in page.code)


@pytest.mark.parametrize("slo", [5000, 0])
def test_without_targets_the_plan_page_shows_nothing_of_an_slo(slo):
    page = open_page("plan", **SMALL, ttft=str(slo), tpot=str(slo))
    page.text_input(key="policies").set_value("plain")
    page.number_input(key="max_requests").set_value(60).run()
    assert ("--slo-" in page.code[0].value) == bool(slo)
    page.button[0].click().run(timeout=120)
    assert not page.error
    assert ("meets" in page.dataframe[0].proto.column_order) == bool(slo)
    said = " ".join(line.value for line in page.caption)
    assert ("misses the SLO" in said) == bool(slo)


def test_what_is_wanted_is_asked_for_as_on_the_command_line():
    page = open_page("plan", **SMALL)
    assert "--runnable" not in page.code[0].value
    page.selectbox(key="objective").set_value("latency")
    page.checkbox(key="runnable").check().run()
    shown = page.code[0].value.replace(" \\\n   ", "")
    assert shown.endswith("--objective latency --runnable")
    words = "Lowest mean TPOT of the plans that bear the load."
    assert words in [line.value for line in page.caption]


def test_what_speculation_is_compared_with_may_miss_the_slo_and_the_page_says_so():
    page = open_page("plan", **SMALL, tpot="12")
    page.number_input(key="max_requests").set_value(40)
    page.text_input(key="policies").set_value("plain,chain-3")
    page.button[0].click().run(timeout=120)
    assert not page.exception
    (pays,) = (line.value for line in page.markdown if "Does speculation pay?" in line.value)
    assert "faster than plain on 8 (misses the SLO); it breaks even" in pays


def test_an_slo_out_of_reach_names_what_would_fit():
    page = open_page("plan", **SMALL, ttft="1", tpot="1")
    page.number_input(key="max_requests").set_value(40)
    page.text_input(key="policies").set_value("plain")
    page.button[0].click().run(timeout=120)
    assert not page.exception
    assert len(page.error) == 1
    assert page.error[0].value.count("\n") == 0


def answer(url: str, seconds: float) -> str:
    """The body, asked for until the server is there."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.read().decode()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def test_the_verb_serves_on_this_machine_alone_until_it_is_ended(tmp_path, free_port):
    words = ["dashboard", "--port", str(free_port), "--no-browser"]
    command = [sys.executable, "-m", "codesign", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert answer(f"http://localhost:{free_port}/_stcore/health", 60) == "ok"
            assert server.stderr.readline() == (
                f"dashboard: http://localhost:{free_port} until Ctrl-C\n"
            )
        finally:
            server.terminate()
        server.wait(timeout=60)


def test_a_port_that_is_taken_is_one_line_with_the_next_one(cli):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = cli("dashboard", "--port", port, "--no-browser")
    assert result.returncode == 2
    assert result.stderr.startswith(f"codesign dashboard: port {port} cannot be had: ")
    assert f"codesign dashboard --port {port + 1}" in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_streamlit_the_line_says_what_to_install(tmp_path):
    code = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'streamlit' else found(n, *a)\n"
        "from codesign.cli import main\n"
        "sys.exit(main(['dashboard']))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd(), check=False
    )
    assert result.returncode == 5
    assert "pip install 'codesign[app]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_theme_asks_no_other_machine_for_anything():
    config = (app_script().parent / ".streamlit" / "config.toml").read_text(encoding="utf-8")
    assert "http" not in config
    assert "gatherUsageStats = false" in config
