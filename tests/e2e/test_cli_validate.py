from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest

from codesign.cli import build_parser, main
from codesign.records import RoundLog
from codesign.run_directory import read_run, write_run

TRACE = (
    "--trace", "conv-twin", "--slice", "0:60", "--rate-scale", "0.05",
    "--max-prompt", "120", "--max-output", "32", "--max-requests", "8",
)  # fmt: skip


@pytest.fixture
def cli(cli_here):
    return cli_here


@pytest.fixture(scope="module")
def made_once(machine_fit, tmp_path_factory):
    """A plan, and two runs of it that the simulator made with another seed."""
    folder = tmp_path_factory.mktemp("planned")
    fit = str(folder / "fit.json")
    machine_fit.save(fit)
    code = main(
        ["plan", *TRACE, "--fit", fit, "--workers", "2", "--policies", "plain,tree-8x2x2",
         "--max-batch", "4", "--out", str(folder / "plan.json"), "--quiet"]
    )  # fmt: skip
    assert code == 0
    for policy in ("plain", "tree-8x2x2"):
        code = main(
            ["simulate", "--trace", str(folder / "plan.trace.parquet"), "--fit", fit,
             "--policy", policy, "--deployment", "2", "--max-batch", "4", "--seed", "9",
             "--out", str(folder / "runs" / policy), "--quiet"]
        )  # fmt: skip
        assert code == 0
    return folder


@pytest.fixture
def planned(made_once, tmp_path):
    """The plan and the runs in the folder where ``cli`` runs."""
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def stretch(folder, factor: float) -> None:
    """Make a run's requests take ``factor`` times as long."""
    run = read_run(folder)
    for request in run.records.requests:
        request.finish = request.arrival + factor * (request.finish - request.arrival)
    write_run(
        folder,
        run.records,
        origin="measured",
        summary={"candidate": run.summary["candidate"]},
        seed=None,
    )


def test_validate_prints_both_sides_and_writes_a_report(cli, planned):
    result = cli(
        "validate", "--plan", "plan.json", "--run", "runs/plain", "runs/tree-8x2x2",
        "--report", "out/report.html",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for words in ("TPOT mean, ms", "acceptance length", "span: target", "inside", "ranking"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "wrote out/report.html" in result.stderr
    page = (planned / "out" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "tree-8x2x2 on 2, batch 4" in page


def test_a_run_outside_the_tolerance_is_exit_code_6_with_the_worst_figure(cli, planned):
    stretch(planned / "runs" / "plain", 2.0)
    runs = ("--run", "runs/plain", "runs/tree-8x2x2")
    result = cli("validate", "--plan", "plan.json", *runs, "--quiet", "--json")
    assert result.returncode == 6
    payload = json.loads(result.stdout)
    assert payload["is_within_tolerance"] is False
    assert payload["runs"][0]["figures"]["tpot_mean"]["error"] < -0.4
    assert payload["runs"][1]["figures"]["tpot_mean"]["error"] > -0.15
    assert len(result.stderr.splitlines()) == 1
    assert "TPOT mean" in result.stderr
    assert "plain on 2, batch 4" in result.stderr
    _, verb, *flags = shlex.split(result.stderr.partition("on an idle machine: ")[2])
    again = build_parser(verb).parse_args([verb, *flags])
    assert (again.plan, again.out) == (Path("plan.json"), Path("runs"))
    assert cli("validate", "--plan", "plan.json", *runs, "--tolerance", "500").returncode == 0
    assert cli("validate", "--plan", "plan.json", *runs, "--no-check").returncode == 0


def slow_down(folder, factor: float) -> None:
    """Make a run's requests and rounds take ``factor`` times as long."""
    stretch(folder, factor)
    run = read_run(folder)
    run.records.rounds = RoundLog(
        dataclasses.replace(r, target=factor * r.target) for r in run.records.rounds
    )
    summary = {"candidate": run.summary["candidate"]}
    write_run(folder, run.records, origin="measured", summary=summary, seed=None)


def test_slow_steps_end_in_the_command_that_measures_this_machine(cli, planned):
    slow_down(planned / "runs" / "plain", 2.0)
    words = ("validate", "--plan", "plan.json", "--run", "runs/plain", "--quiet")
    result = cli(*words, "--report", "report.html")
    assert result.returncode == 6
    assert "cause     steps of the target took 2 times what the fit says" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    [*_, error] = result.stderr.splitlines()
    command = "codesign profile --out profile && codesign fit profile --out fit.json"
    assert error.endswith(command)
    assert "Cause: steps of the target took 2 times" in (planned / "report.html").read_text()
    payload = json.loads(cli(*words, "--json").stdout)
    assert payload["cause"].endswith(command)
    assert payload["runs"][0]["step_pace"] == pytest.approx(2.0)


def test_a_run_that_was_cut_short_is_exit_code_6_and_said_plainly(cli, planned):
    run = read_run(planned / "runs" / "plain")
    run.records.requests[3].finish = None
    settings = {"device": "cpu-ranks", "padded_rows": 32, "max_waiting": 5}
    summary = {"candidate": run.summary["candidate"], "settings": settings}
    summary |= {"target": "./my target", "draft": "./my draft"}
    write_run(planned / "runs" / "plain", run.records, origin="measured", summary=summary, seed=0)
    words = ("validate", "--plan", "plan.json", "--run", "runs/plain", "--tolerance", "900")
    result = cli(*words, "--quiet", "--json")
    assert result.returncode == 6
    assert "1 of 8 requests did not finish" in result.stderr
    _, verb, *flags = shlex.split(result.stderr.partition("Complete it: ")[2])
    again = build_parser(verb).parse_args([verb, *flags])
    assert (again.plan, again.candidate) == (Path("plan.json"), ["plain on 2, batch 4"])
    assert (again.target, again.draft) == ("./my target", "./my draft")
    assert {name: getattr(again, name) for name in settings} == settings
    assert (again.out, again.resume) == (Path("runs"), True)
    assert len(result.stderr.splitlines()) == 1
    payload = json.loads(result.stdout)
    assert payload["is_within_tolerance"] is False
    assert payload["runs"][0]["num_unfinished"] == 1
    assert cli(*words, "--no-check").returncode == 0


def test_a_run_that_refused_requests_is_not_called_cut_short(cli, planned):
    run = read_run(planned / "runs" / "plain")
    run.records.requests[3].finish = None
    run.records.refused = {3: "1 request waits already"}
    settings = {"device": "cpu", "padded_rows": 8, "max_waiting": 1}
    words = ("validate", "--plan", "plan.json", "--run", "runs/plain", "--quiet")
    for told in (settings, {**settings, "max_waiting": None}):
        summary = {"candidate": run.summary["candidate"], "settings": told}
        write_run(
            planned / "runs" / "plain", run.records, origin="measured", summary=summary, seed=0
        )
        result = cli(*words)
        assert result.returncode == 6
        assert "1 of 8 requests refused" in result.stderr
        assert "Request 3: 1 request waits already" in result.stderr
        assert "did not finish" not in result.stderr
        serves_all = result.stderr.partition("Serve all: ")[2]
        if told["max_waiting"] is None:  # the reason has its own advice
            assert not serves_all
            continue
        _, verb, *flags = shlex.split(serves_all)
        again = build_parser(verb).parse_args([verb, *flags])
        assert (again.max_waiting, again.resume, again.out) == (None, False, Path("runs"))


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--run", "nothing"), 4, "nothing/run.json does not exist"),
        (("--run", "runs/plain", "--tolerance", "nan"), 2, "--tolerance"),
        (("--run", "runs/plain", "--report", "r.pdf"), 2, "a name that ends in .html, not 'r.pdf'"),
        (("--run", "nothing", "--report", "d.html"), 2, "--report d.html is a folder. Name a file"),
        (("--run", "runs/plain", "--report", "fit.json/x.html"), 4, "Name another: --report"),
        ((), 2, "--run"),
    ],
)
def test_what_cannot_be_validated_is_refused_in_one_line(cli, planned, flags, code, words):
    (planned / "d.html").mkdir()
    result = cli("validate", "--plan", "plan.json", *flags, "--quiet")
    assert result.returncode == code
    assert words in result.stderr.splitlines()[-1]


def test_a_fit_that_changed_after_planning_is_refused(cli, planned):
    path = planned / "fit.json"
    path.write_text(path.read_text() + "\n")
    result = cli("validate", "--plan", "plan.json", "--run", "runs/plain")
    assert result.returncode == 4
    assert "has changed since the plan was made" in result.stderr


def test_a_report_that_cannot_be_written_whole_leaves_the_old_one(planned, monkeypatch, capsys):
    old = planned / "report.html"
    old.write_text("old")
    write_whole = Path.write_text

    def full_disk(path, text, **rest):
        if "report" in path.name:
            write_whole(path, text[:5], **rest)
            raise OSError(28, "No space left on device")
        return write_whole(path, text, **rest)

    monkeypatch.chdir(planned)
    monkeypatch.setattr(Path, "write_text", full_disk)
    words = ["--plan", "plan.json", "--run", "runs/plain", "--report", "report.html", "--quiet"]
    assert main(["validate", *words]) == 4
    assert "No space left" in capsys.readouterr().err
    assert old.read_text() == "old"
    assert not list(planned.glob("*.tmp"))
