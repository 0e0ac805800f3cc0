"""``codesign profile`` and ``codesign fit`` as a user types them, on a tiny random pair."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from codesign.artifacts import read_table
from codesign.fit import STEP_COLUMNS, Fit
from codesign.fit.children import NODES
from codesign.fit.drift import VISIT
from codesign.fit.round_costs import FORWARDS


@pytest.fixture(scope="module")
def profile(tiny_models, tmp_path_factory, brief_codesign) -> tuple[Path, dict]:
    """A quick profile of the tiny pair on two workers, and what the command printed."""
    out = tmp_path_factory.mktemp("profile") / "profile"
    target, draft = tiny_models
    words = ["--target", target, "--draft", draft, "--workers", "2", "--temperature", "0.5"]
    done = subprocess.run(
        [*brief_codesign, "profile", *words, "--quick", "--out", out, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


needs_two_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPU cores")


@needs_two_cores
def test_a_profile_holds_every_step_of_every_deployment(profile):
    out, printed = profile
    steps = read_table(out / "steps.parquet", kind="profile")[0]
    assert tuple(steps.columns) == (*STEP_COLUMNS, NODES, VISIT)
    assert set(steps.loc[steps[NODES].notna(), "op"]) == {"draft"}
    assert set(steps["deployment"]) == {"2", "1+1"}
    found = {tuple(row) for row in steps[["deployment", "op", "beside"]].drop_duplicates().values}
    wanted = {("2", op, False) for op in (*FORWARDS, "reroot", "choice")}
    wanted |= {("1+1", "target", False), ("1+1", "target", True), ("1+1", "prefill", False)}
    wanted |= {("1+1", op, True) for op in ("draft", "draft_prefill", "reroot", "choice")}
    wanted |= {("1+1", "draft", False), ("1+1", "link", False)}
    assert found == wanted
    assert steps["seconds"].gt(0).all()
    # Each shape is timed at least three times.
    times = steps.groupby(["deployment", "op", "rows", "requests", "context", "beside"]).size()
    assert times.min() >= 3
    # In each visit of a deployment, of which the last comes after the first of every other.
    visits = steps.loc[steps["op"] != "link"].groupby("deployment")[VISIT].unique()
    assert {label: sorted(found) for label, found in visits.items()} == {
        "2": [1, 2, 3],
        "1+1": [1, 2, 3],
    }
    assert printed["num_timings"] == len(steps)
    assert printed["temperature"] == 0.5
    assert printed["next"] == f"codesign fit {out}"


@needs_two_cores
def test_recorded_acceptance_covers_the_profile_prompts(profile, brief_tokens):
    out, printed = profile
    recorded = read_table(out / "acceptance.parquet", kind="profile")[0]
    assert recorded["request"].nunique() == 24
    assert set(recorded["category"]) >= {"chat", "code", "mathematics"}
    assert recorded.groupby("request").size().eq(brief_tokens).all()
    assert recorded["log_probs"].map(len).eq(printed["K"]).all()


@needs_two_cores
def test_a_profile_becomes_a_fit_that_loads(cli_here, profile, tmp_path):
    out, _ = profile
    result = cli_here("fit", out, "--out", "fit.json", "--json")
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    fit = Fit.load(tmp_path / "fit.json")
    assert list(fit.costs) == list(printed["costs"]) == ["2", "1+1"]
    assert fit.costs["1+1"].link > 0
    assert 0 <= fit.costs["1+1"].slowdown < 1
    assert fit.temperature == 0.5
    assert 0 < printed["acceptance"]["top_1"] <= printed["acceptance"]["top_4"] <= 1
    assert {f"{label}/{op}" for label in fit.costs for op in FORWARDS} <= set(fit.errors)


@needs_two_cores
def test_the_text_of_a_fit_names_each_step_and_each_kind_of_prompt(cli_here, profile):
    out, _ = profile
    result = cli_here("fit", out)
    assert result.returncode == 0, result.stderr
    for word in ("target", "draft_prefill", "1+1", "held-out", "translation", "calibration error"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines()[1:-1])) <= 100


@needs_two_cores
def test_resuming_a_complete_profile_measures_nothing(cli_here, profile, tiny_models):
    out, printed = profile
    target, draft = tiny_models
    words = ["--target", target, "--draft", draft, "--workers", "2", "--temperature", "0.5"]
    result = cli_here("profile", *words, "--quick", "--out", out, "--resume", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["created"] == printed["created"]
    changed = cli_here("profile", *words[:-2], "--quick", "--out", out, "--resume")
    assert changed.returncode == 4
    assert "measured with another sampling" in changed.stderr


@needs_two_cores
def test_ctrl_c_keeps_the_finished_parts_and_says_how_to_go_on(
    tiny_models, tmp_path, start_process
):
    target, draft = tiny_models
    words = ["--target", target, "--draft", draft, "--workers", "2", "--quick", "--out", tmp_path]
    running = start_process(
        [sys.executable, "-m", "codesign", "profile", *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    first = tmp_path / "parts" / "2.1.parquet"
    for _ in range(2400):
        if first.exists() or running.poll() is not None:
            break
        sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert f"parts in {tmp_path}. Go on with the same command and --resume" in errors
    assert "Traceback" not in errors
    assert first.exists()
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--target", "smollm2-135m"], 4, "codesign models fetch smollm2-135m"),
        (["--target", "nowhere", "--draft", "ngram"], 4, "nowhere"),
        (["--target", "nowhere"], 4, "no model and no directory is called 'nowhere'"),
        (["--workers", "0"], 2, "--workers: must be a whole number of 1 or above"),
        (["--workers", "5000", "--draft", "ngram"], 5, "5000 workers"),
        (["--draft", "ngram", "--temperature", "-1"], 2, "--temperature: must be a number of 0 or"),
        (["--draft", "ngram", "--top-p", "0"], 2, "--top-p: must be a number above 0, at most 1,"),
        (["--draft", "ngram", "--top-k", "-1"], 2, "--top-k: must be a whole number of 0 or above"),
    ],
)
def test_what_is_missing_is_said_in_one_line(cli_here, tmp_path, words, code, message):
    home = str(tmp_path / "empty")
    result = cli_here("profile", *words, "--out", "profile", CODESIGN_HOME=home)
    assert result.returncode == code
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_target_without_a_draft_of_its_own_asks_for_one(cli_here, tiny_models):
    result = cli_here("profile", "--target", tiny_models[0], "--out", "profile")
    assert result.returncode == 2
    assert "Name one, or use --draft ngram" in result.stderr


def test_without_torch_the_extra_to_install_is_named(tmp_path, monkeypatch, capsys):
    import importlib.util

    from codesign.cli import main

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["profile", "--draft", "ngram", "--out", str(tmp_path)]) == 5
    assert "pip install 'codesign[engine]'" in capsys.readouterr().err


@needs_two_cores
def test_a_fit_of_several_machines_says_so(cli_here, profile, tmp_path):
    shutil.copytree(profile[0], tmp_path / "mixed")
    about = json.loads((tmp_path / "mixed" / "profile.json").read_text())
    [own] = about["measured"]
    about["measured"].append({**own, "machine": "another", "parts": ["1+1"]})
    (tmp_path / "mixed" / "profile.json").write_text(json.dumps(about))
    result = cli_here("fit", "mixed", "--out", "fit.json")
    assert result.returncode == 0
    assert f"1+1 on another, {own['day']}. These are step times of different" in result.stderr


def test_fitting_what_is_no_profile_names_the_command_that_makes_one(cli_here, tmp_path):
    result = cli_here("fit", tmp_path)
    assert result.returncode == 4
    assert "codesign profile" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
