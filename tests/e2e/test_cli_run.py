"""``codesign run``, and ``codesign validate`` after it, as typed, on a tiny random pair."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import codesign
from codesign.candidate import Candidate
from codesign.cli import main
from codesign.config import Deployment, Serving
from codesign.errors import InputError
from codesign.plan import Plan
from codesign.policy.speculation import parse_policy
from codesign.run_directory import read_run

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPU cores")

POLICIES = ("plain", "chain-3", "tree-4x2x2", "async-tree-4x2x2")
SECONDS = 3  # from the first arrival to the last


def codesign_words(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "codesign", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(codesign.__file__).parents[1])}


@pytest.fixture(scope="module")
def planned(machine_fit, tiny_models, tmp_path_factory) -> Path:
    """A folder with a plan for the tiny pair: seven requests, one each half second."""
    folder = tmp_path_factory.mktemp("run")
    target, draft = map(str, tiny_models)
    dataclasses.replace(machine_fit, target=target, draft=draft).save(folder / "fit.json")
    rows = [f"2024-05-10 00:00:0{i / 2:.6f},{20 + 3 * i},{10 + i}" for i in range(2 * SECONDS + 1)]
    table = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (folder / "trace.csv").write_text(table + "\n")
    code = main(
        ["plan", "--trace", str(folder / "trace.csv"), "--fit", str(folder / "fit.json"),
         "--workers", "2", "--policies", ",".join(POLICIES), "--max-batch", "2",
         "--out", str(folder / "plan.json"), "--quiet"]
    )  # fmt: skip
    assert code == 0
    return folder


@pytest.fixture(scope="module")
def ran(planned) -> tuple[Path, dict]:
    """The plan's choice and all baselines, run once, and what the command printed."""
    done = subprocess.run(
        codesign_words("run", "--plan", "plan.json", "--baselines", "--out", "runs", "--json"),
        cwd=planned, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fit: steps of the target took" in done.stderr  # tiny models, and a fit of larger ones
    assert "&& codesign fit profile --out fit.json" in done.stderr
    return planned, json.loads(done.stdout)


@pytest.fixture
def in_folder(cli_here) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a folder."""
    return lambda folder, *arguments: cli_here(*arguments, folder=folder)


def test_the_choice_and_all_baselines_are_run_and_no_token_differs(ran):
    folder, printed = ran
    assert printed["differing_requests"] == []
    policies = {run["label"].split()[0] for run in printed["runs"]}
    assert policies == set(POLICIES)
    for run in printed["runs"]:
        assert 0 < run["step_pace"] < 1
        stored = read_run(folder / run["directory"])
        assert stored.origin == "measured"
        assert stored.summary["label"] == run["label"]
        assert [len(stored.outputs[i]) for i in range(7)] == [10 + i for i in range(7)]
        assert all(r.finish > r.arrival for r in stored.records.requests)
        assert run["metrics"]["num_finished"] == 7
        # The last arrival is replayed by the wall clock.
        assert stored.records.seconds >= SECONDS


def test_a_policy_of_the_simulator_alone_is_refused_before_models_are_loaded(planned, in_folder):
    plan = Plan.load(planned / "plan.json")
    candidate = Candidate(Deployment(2), parse_policy("eagle-4x2x2"), 2)
    chosen = dataclasses.replace(plan.chosen, candidate=candidate)
    dataclasses.replace(plan, chosen=chosen).save(planned / "eagle.json")
    found = in_folder(planned, "run", "--plan", "eagle.json")
    assert found.returncode == InputError.exit_code
    assert "eagle-4x2x2@0.96 runs in the simulator only" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_speculation_accepts_something_and_plain_decoding_nothing(ran):
    _, printed = ran
    lengths = {r["label"].split()[0]: r["metrics"]["acceptance_length"] for r in printed["runs"]}
    assert lengths.pop("plain") == 1.0
    assert min(lengths.values()) > 1.0


def test_resume_keeps_whole_runs_and_candidate_takes_a_policy(ran, in_folder):
    folder, printed = ran
    (chain,) = (r for r in printed["runs"] if r["label"].startswith("chain-3"))
    files = [folder / run["directory"] / "run.json" for run in printed["runs"]]
    before = [path.stat().st_mtime_ns for path in files]
    words = ("run", "--plan", "plan.json", "--candidate", "chain-3", "--out", "runs", "--resume")
    again = in_folder(folder, *words, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["runs"] == [chain]
    assert [path.stat().st_mtime_ns for path in files] == before


def test_resume_keeps_a_run_with_refusals_and_repeats_one_of_other_flags(ran, in_folder):
    folder, printed = ran
    (plain,) = (r for r in printed["runs"] if r["label"].startswith("plain"))
    requests = read_run(folder / plain["directory"]).records.requests
    needs = [r.prompt_tokens + r.output_tokens for r in requests]
    serving = Serving(max_kv_tokens=max(needs))  # and a row of the round, which it has not
    dataclasses.replace(Plan.load(folder / "plan.json"), serving=serving).save(folder / "few.json")
    words = ("run", "--plan", "few.json", "--candidate", "plain", "--out", "few", "--json")
    first = in_folder(folder, *words)
    assert first.returncode == InputError.exit_code
    (run,) = json.loads(first.stdout)["runs"]
    assert run["refused"]
    file = folder / run["directory"] / "run.json"
    made = file.stat().st_mtime_ns
    again = in_folder(folder, *words, "--resume")
    assert (again.returncode, json.loads(again.stdout)["runs"]) == (first.returncode, [run])
    assert file.stat().st_mtime_ns == made
    in_folder(folder, *words, "--resume", "--max-waiting", "7")
    assert file.stat().st_mtime_ns > made


def test_a_plan_by_data_sheet_runs_with_checkpoints_that_are_named(ran, in_folder, tiny_models):
    folder, printed = ran
    values = json.loads((folder / "plan.json").read_text())
    values |= {"target": "llama-3-70b:int4", "draft": "llama-3.2-1b:int4"}
    (folder / "sheet.json").write_text(json.dumps(values))
    words = ("run", "--plan", "sheet.json", "--candidate", "chain-3", "--out", "named", "--json")
    refused = in_folder(folder, *words)
    assert refused.returncode == 4
    assert "or name one: --target MODEL --draft MODEL" in refused.stderr
    target, draft = map(str, tiny_models)
    named = ("--target", target, "--draft", draft)
    served = in_folder(folder, *words, *named)
    assert served.returncode == 0, served.stderr
    [run] = json.loads(served.stdout)["runs"]
    summary = read_run(folder / run["directory"]).summary
    assert (summary["target"], summary["draft"]) == (target, draft)
    [planned] = (r for r in printed["runs"] if r["label"] == run["label"])
    assert run["metrics"]["acceptance_length"] == planned["metrics"]["acceptance_length"]
    # A run of other models is none of these.
    again = in_folder(folder, *words, "--target", draft, "--draft", draft, "--resume")
    [run] = json.loads(again.stdout)["runs"]
    assert read_run(folder / run["directory"]).summary["target"] == draft


def test_validate_takes_the_runs_and_ends_with_0_or_6(ran, in_folder):
    folder, printed = ran
    runs = [run["directory"] for run in printed["runs"]]
    words = ("validate", "--plan", "plan.json", "--run", *runs, "--json", "--quiet")
    result = in_folder(folder, *words)
    payload = json.loads(result.stdout)
    # The fit is of a made-up machine: only its verdict and the exit code must agree.
    assert result.returncode == (0 if payload["is_within_tolerance"] else 6), result.stderr
    assert [run["origin"] for run in payload["runs"]] == ["measured"] * len(runs)
    assert all(run["num_unfinished"] == 0 for run in payload["runs"])
    assert "Traceback" not in result.stderr


def test_validate_says_of_a_run_that_it_is_of_another_plan(ran, in_folder):
    folder, printed = ran
    (folder / "other.json").write_text((folder / "plan.json").read_text() + "\n")
    plain = next(r["directory"] for r in printed["runs"] if r["label"].startswith("plain"))
    for plan, is_another in (("plan.json", False), ("other.json", True)):
        result = in_folder(folder, "validate", "--plan", plan, "--run", plain, "--json", "--quiet")
        [run] = json.loads(result.stdout)["runs"]
        assert any("another plan" in note for note in run["notes"]) == is_another


# The command with progress lines in a pipe as they come, not each ten seconds, and with a break
# when chain-3 has served something: the rest takes it no longer than a test may be held up.
HELD = """
import re, sys, time
from codesign.cli import main, output

def said(line, say=output.say, breaks=[300.0]):
    is_break = breaks and re.match("chain-3.*: [1-6] of 7", line)
    seconds = breaks.pop() if is_break else 0.0  # before the line is seen and Ctrl-C follows
    say(line)
    time.sleep(seconds)

output.say, output._PIPE_INTERVAL = said, 0
sys.exit(main())
"""


def test_ctrl_c_keeps_what_is_finished_and_resume_completes_it(planned, in_folder, start_process):
    words = (
        "run", "--plan", "plan.json", "--candidate", "plain", "--candidate", "chain-3",
        "--max-waiting", "7", "--out", "cut", "--json",
    )  # fmt: skip
    command = [sys.executable, "-c", HELD, *words]
    running = start_process(command, cwd=planned, env=environment())
    said = ""
    while not re.search(r"^chain-3.*: [1-6] of 7", said, re.MULTILINE):
        line = running.stderr.readline()
        assert line, said
        said += line
    running.send_signal(signal.SIGINT)
    printed, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    (plain,) = (planned / "cut").glob("plain*")
    (chain,) = (planned / "cut").glob("chain-3*")
    stored = read_run(chain)
    assert any(note.startswith("interrupted: ") for note in stored.records.notes)
    num_left = sum(request.finish is None for request in stored.records.requests)
    assert 0 < num_left < 7
    assert json.loads(printed)["runs"][1]["metrics"]["num_finished"] == 7 - num_left

    checked = in_folder(planned, "validate", "--plan", "plan.json", "--run", chain, "--quiet")
    assert checked.returncode == 6
    assert f"{num_left} of 7 requests did not finish" in checked.stderr

    # What validate advises completes the cut run alone, with its flags: all is whole then.
    _, *advised = shlex.split(checked.stderr.partition("Complete it: ")[2])
    assert in_folder(planned, *advised).returncode == 0
    kept = [(folder / "run.json").stat().st_mtime_ns for folder in (plain, chain)]
    again = in_folder(planned, *words, "--resume")
    assert again.returncode == 0, again.stderr
    assert [(folder / "run.json").stat().st_mtime_ns for folder in (plain, chain)] == kept
    assert json.loads(again.stdout)["differing_requests"] == []
    assert all(r.finish is not None for r in read_run(chain).records.requests)
    assert read_run(chain).records.notes == []


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--plan", "nowhere.json"), 4, "nowhere.json does not exist"),
        (("--plan", "plan.json", "--candidate", "chain-9"), 4, "no candidate 'chain-9'"),
        (("--plan", "plan.json", "--workers", "1"), 5, "codesign plan --trace TRACE --workers 1"),
        (("--plan", "plan.json", "--workers", "0"), 2, "a whole number of 1 or above"),
        (("--plan", "plan.json", "--workers", "5000"), 5, "run --plan PLAN"),
        (("--plan", "plan.json", "--padded-rows", "16"), 2, "for --device cuda and cpu-ranks"),
        (
            ("--plan", "plan.json", "--workers", "2", "--device", "cpu-ranks"),
            2,
            "--workers is for --device cpu",
        ),
        (("--plan", "plan.json", "--out", "trace.csv"), 4, "cannot write into trace.csv: "),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(planned, in_folder, flags, code, words):
    result = in_folder(planned, "run", "--out", "refused", *flags, "--quiet")
    assert result.returncode == code
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (planned / "refused").exists()
