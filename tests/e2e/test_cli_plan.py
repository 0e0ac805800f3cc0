from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import codesign
from codesign.fit.shipped import DEFAULT_FIT
from codesign.plan import Plan
from codesign.policy.walk import Sampling

TRACE = (
    "--trace", "conv-twin", "--slice", "0:60", "--rate-scale", "0.05",
    "--max-prompt", "120", "--max-output", "32", "--max-requests", "8",
)  # fmt: skip
FEW = ("--policies", "plain,chain-3,tree-8x2x2,async-tree-8x2x2")


@pytest.fixture
def cli(cli_here):
    return cli_here


@pytest.fixture
def fit_file(machine_fit, tmp_path):
    machine_fit.save(tmp_path / "fit.json")
    return tmp_path / "fit.json"


@pytest.fixture
def plan(cli, fit_file, tmp_path):
    """``codesign plan`` on a small trace, with no model in the cache."""

    def run(*arguments, **rest):
        home = str(tmp_path / "home")
        flags = ("--fit", fit_file, "--workers", "2", *arguments)
        return cli("plan", *TRACE, *flags, CODESIGN_HOME=home, **rest)

    return run


def test_plan_writes_a_plan_and_the_prepared_trace_and_prints_one_json_object(plan, tmp_path):
    result = plan("--slo-tpot-ms", "100", "--out", "plans/p.json", "--json")
    assert result.returncode == 0, result.stderr
    payload = json.loads(result.stdout)
    saved = Plan.load(tmp_path / "plans" / "p.json")
    assert payload["chosen"]["candidate"]["label"] == saved.chosen.label
    assert len(saved.requests()) == saved.num_requests == 8
    assert saved.slo.tpot == 0.1
    assert {scored.candidate.family for scored in saved.scored} == {
        "plain", "chain", "threshold", "specserve", "tree", "async-tree",
        "batch-tree", "async-batch-tree",
    }  # fmt: skip
    assert payload["num_feasible"] >= 1


def test_the_result_block_states_prediction_target_reason_and_next_command(plan):
    result = plan(*FEW, "--slo-ttft-ms", "2000", "--slo-tpot-ms", "100")
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for head in ("trace", "fit", "searched", "best", "why", "second", "pays", "data", "next"):
        assert head in lines, result.stdout
    tpot = next(line for line in result.stdout.splitlines() if "TPOT p90  " in line)
    assert tpot.rstrip().endswith("ok")
    assert "100 ms" in tpot
    assert "codesign run --plan plan.json" in lines["next"]
    assert max(map(len, result.stdout.splitlines())) <= 100
    for policy in ("plain on 2", "chain-3 on 2", "tree-8x2x2 on 2", "async-tree-8x2x2 on 1+1"):
        assert policy in result.stdout


def test_the_same_seed_gives_the_same_plan_but_for_the_time_of_day(plan, tmp_path):
    plans = []
    for name in ("a", "b"):
        assert plan(*FEW, "--out", f"{name}/plan.json").returncode == 0
        values = json.loads((tmp_path / name / "plan.json").read_text())
        plans.append({k: values[k] for k in ("chosen", "alternatives", "ties", "reason")})
    assert plans[0] == plans[1]


def test_the_same_requests_are_the_same_file_whenever_and_for_whatever_they_are_planned(
    plan, tmp_path, monkeypatch
):
    assert plan("--policies", "plain").returncode == 0
    monkeypatch.setattr("codesign.artifacts.hardware", lambda: {"cpu": "of another machine"})
    monkeypatch.setattr("codesign.artifacts.datetime", Tomorrow)
    other = ("--policies", "plain,chain-3", "--slo-tpot-ms", "500", "--out", "other.json")
    assert plan(*other).returncode == 0
    files = [tmp_path / f"{name}.trace.parquet" for name in ("plan", "other")]
    assert files[0].read_bytes() == files[1].read_bytes()
    headers = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plan", "other")]
    assert headers[0]["created"] < headers[1]["created"]
    assert headers[1]["hardware"]["cpu"] == "of another machine"


class Tomorrow(datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + timedelta(days=1)


@pytest.mark.slow
def test_ray_makes_the_same_plan(plan, tmp_path):
    pytest.importorskip("ray")
    plans = []
    for executor in ("local", "ray"):
        out = f"{executor}/plan.json"
        result = plan(*FEW, "--executor", executor, "--processes", "2", "--out", out)
        assert result.returncode == 0, result.stderr
        values = json.loads((tmp_path / out).read_text())
        plans.append({k: values[k] for k in ("chosen", "alternatives", "ties", "reason")})
    assert plans[0] == plans[1]


def test_the_fewest_workers_are_found_and_said(plan):
    result = plan(*FEW, "--slo-tpot-ms", "500", "--objective", "fewest")
    assert result.returncode == 0, result.stderr
    words = "2 workers are the fewest that meet the SLO (the fit has no plan for 1)"
    assert words in " ".join(result.stdout.split())
    assert plan(*FEW, "--objective", "fewest").returncode == 2


def test_that_the_prompts_could_not_be_bound_is_said_in_the_notes(plan, tmp_path):
    assert "models fetch" in plan(*FEW).stderr
    assert any("models fetch" in note for note in Plan.load(tmp_path / "plan.json").notes)


def test_an_slo_that_nothing_meets_is_exit_code_3_with_the_nearest_miss(plan, tmp_path):
    result = plan(*FEW, "--slo-tpot-ms", "1", "--json")
    assert result.returncode == 3
    message = result.stderr.splitlines()[-1]
    payload = json.loads(result.stdout)
    assert (payload["plan"], payload["chosen"]) == (None, None)
    assert message == f"codesign plan: {payload['reason']}"
    assert "Nearest miss" in message
    assert "TPOT p90" in message
    assert not (tmp_path / "plan.json").exists()


def test_without_a_fit_the_shipped_one_is_taken_and_said(cli, tmp_path):
    lengths = ("--max-prompt", "64", "--max-output", "16", "--max-requests", "8")
    result = cli("plan", "--trace", "conv-twin", *lengths, "--policies", "plain,chain-3")
    assert result.returncode == 0, result.stderr
    assert "ships with the package" in result.stderr
    assert "codesign profile --out profile" in result.stderr
    assert Plan.load(tmp_path / "plan.json").fit.path.resolve() == DEFAULT_FIT.resolve()


def test_the_plan_samples_as_the_profile_did(plan, machine_fit, tmp_path):
    sampled = dataclasses.replace(machine_fit, temperature=0.7, top_k=40, top_p=0.9)
    sampled.save(tmp_path / "fit.json")
    flags = ("--fit", "fit.json", "--policies", "plain,chain-3", "--seed", "3")
    assert plan(*flags).returncode == 0
    assert Plan.load(tmp_path / "plan.json").sampling == Sampling(0.7, 40, 0.9, 3)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--policies", "chain-three"), 4, "unknown policy 'chain-three'"),
        (("--policies", ""), 4, "unknown policy ''"),
        (("--workers", "3"), 4, "--workers 3 --out profile"),
        (("--max-kv-tokens", "100"), 4, "--max-prompt"),
        (("--objective", "fun"), 2, "--objective"),
        (("--slo-percentile", "0"), 2, "--slo-percentile: must be a number above 0, at most 100"),
        (("--slo-percentile", "nan"), 2, "--slo-percentile: must be a number above 0"),
        (("--max-batch", "0"), 2, "--max-batch"),
        (("--processes", "0"), 2, "--processes"),
        (("--workers", "0"), 2, "--workers"),
        (("--out", "."), 2, "--out plan.json"),
        (("--out", "fit.json"), 2, "--out fit.json is a file that is read. Name another: --out"),
        (("--trace", "own.csv", "--out", "./own.csv"), 2, "own.csv is a file that is read"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(plan, tmp_path, flags, code, words):
    (tmp_path / "own.csv").write_text("arrival,prompt_tokens,output_tokens\n0,5,5\n")
    result = plan(*flags, "--quiet")
    assert result.returncode == code
    assert words in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_plan_is_not_written_over_the_trace_that_it_is_made_of(plan, cli, fit_file, tmp_path):
    assert plan("--policies", "plain").returncode == 0
    before = (tmp_path / "plan.trace.parquet").read_bytes()
    words = ("plan", "--trace", "plan.trace.parquet", "--fit", fit_file, "--max-requests", "5")
    again = cli(*words, "--policies", "plain", CODESIGN_HOME=str(tmp_path / "home"))
    assert again.returncode == 2
    words_of_it = "--out plan.json would overwrite plan.trace.parquet, which is read. Name another"
    assert words_of_it in again.stderr.splitlines()[-1]
    assert (tmp_path / "plan.trace.parquet").read_bytes() == before
    other = cli(*words, "--policies", "plain", "--out", "other.json")
    assert other.returncode == 0, other.stderr


def test_a_search_that_finds_nothing_to_resume_says_so(plan):
    again = plan("--policies", "plain,chain-3", "--resume")
    assert again.returncode == 0, again.stderr
    assert "resume: there is no plan.search.jsonl, in which a search keeps" in again.stderr


def test_the_next_search_begins_with_what_the_last_one_kept(plan, tmp_path, monkeypatch):
    """Also for another SLO, and whether the last one has found a plan or not."""
    few = ("--policies", "plain,chain-3")
    missed = plan(*few, "--slo-tpot-ms", "1")
    assert missed.returncode == 3
    kept = len((tmp_path / "plan.search.jsonl").read_text().splitlines())
    words = f"{kept} simulations kept in plan.search.jsonl: with --resume another SLO"
    assert words in missed.stderr.splitlines()[-1]
    met = plan(*few, "--slo-tpot-ms", "500", "--resume", "--json")
    assert met.returncode == 0, met.stderr
    assert f"plan.search.jsonl has {kept} simulations that hold for this trace" in met.stderr
    assert f"{kept + 4} simulations kept in" in met.stderr  # two more seeds of both
    fresh = plan(*few, "--slo-tpot-ms", "500", "--json", "--out", "fresh.json")
    same = ("chosen", "alternatives", "ties", "reason", "doubts")
    found = [json.loads(each.stdout) for each in (met, fresh)]
    assert [found[0][name] for name in same] == [found[1][name] for name in same]
    monkeypatch.setattr("codesign.planner.search_cache.SearchCache.put", None)
    text = plan(*few, "--slo-tpot-ms", "500", "--resume")
    assert "best " in text.stdout, text.stderr


def test_plans_that_differ_in_their_ending_alone_have_files_of_their_own(plan, tmp_path):
    few = ("--policies", "plain", "--seed")
    for name, seed in (("x.json", "1"), ("x.plan", "2")):
        assert plan(*few, seed, "--out", name).returncode == 0
    first, other = (Plan.load(tmp_path / name) for name in ("x.json", "x.plan"))
    assert first.trace.check() != other.trace.check()
    again = plan(*few, "1", "--out", "x.json", "--resume")
    assert "resume: x.search.jsonl has 6 simulations that hold" in again.stderr


def test_a_full_disk_ends_no_search_whose_simulations_are_only_kept(plan, tmp_path, monkeypatch):
    opened, calls = Path.open, []

    def full(path, mode="r", *arguments, **rest):
        if mode == "a":
            calls.append(path)
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *arguments, **rest)

    monkeypatch.setattr(Path, "open", full)
    result = plan("--policies", "plain,chain-3", "--quiet")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "plan.json").exists()
    words = "cannot write plan.search.jsonl: No space left on device; the search goes on and keeps"
    assert result.stderr.count("No space left") == result.stderr.count(words) == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("1 simulation kept in plan.search.jsonl, ")
    assert last.endswith(" more could not be")


def test_a_plan_that_cannot_be_written_leaves_the_one_before_whole(plan, tmp_path, monkeypatch):
    few = ("--policies", "plain", "--quiet")
    assert plan(*few, "--max-requests", "8").returncode == 0
    before, names = Plan.load(tmp_path / "plan.json"), set(tmp_path.iterdir())
    written = Path.write_text

    def full(path, text, *arguments, **rest):
        if "plan.json" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, text, *arguments, **rest)

    monkeypatch.setattr(Path, "write_text", full)
    result = plan(*few, "--max-requests", "5")
    assert result.returncode == 4, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last == "codesign plan: cannot write plan.json: No space left on device"
    assert set(tmp_path.iterdir()) == names
    assert len(Plan.load(tmp_path / "plan.json").requests()) == len(before.requests()) == 8


# The command that makes a break after what it keeps first: a search is over in a few seconds.
HELD = """
import sys, time
from codesign.cli import main
from codesign.planner.search_cache import SearchCache
put = SearchCache.put
SearchCache.put = lambda *arguments: (put(*arguments), time.sleep(300))
sys.exit(main())
"""


STOPPED_TWICE = """\
import os, signal, sys
from codesign import cli
from codesign.planner.search_cache import SearchCache
put, say = SearchCache.put, cli.say
def stop():
    os.kill(os.getpid(), signal.SIGTERM)
SearchCache.put = lambda *arguments: (put(*arguments), stop())
cli.say = lambda message: (stop(), say(message))
sys.exit(cli.main())
"""


def test_a_second_sigterm_does_not_come_before_what_was_kept_is_said(fit_file, tmp_path):
    flags = ("--fit", str(fit_file), "--workers", "2", "--max-batch", "4", "--processes", "1")
    answer = subprocess.run(
        [sys.executable, "-c", STOPPED_TWICE, "plan", *TRACE, *flags, *FEW],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(codesign.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 130, answer.stderr
    assert "kept 1 simulation in plan.search.jsonl" in answer.stderr.splitlines()[-1]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_says_what_it_kept_and_can_go_on(
    stop, fit_file, tmp_path, start_process
):
    flags = ("--fit", str(fit_file), "--workers", "2", "--max-batch", "4")
    words = ["plan", *TRACE, *flags, *FEW]
    home = str(Path(codesign.__file__).parents[1])
    environment = {**os.environ, "CODESIGN_HOME": str(tmp_path / "home"), "PYTHONPATH": home}
    command = [sys.executable, "-c", HELD, *words]
    process = start_process(command, cwd=tmp_path, env=environment)
    kept = tmp_path / "plan.search.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (kept.exists() and kept.stat().st_size):
        time.sleep(0.02)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in errors.splitlines()[-1]
    num_kept = len(kept.read_text().splitlines())
    assert num_kept >= 1
    said = int(errors.rpartition("kept ")[2].split()[0])
    assert num_kept - said in (0, 1)  # the signal may come between the file and the count
    again = subprocess.run(
        [sys.executable, "-m", "codesign", *words, "--resume"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    word = "simulation" if num_kept == 1 else "simulations"
    assert f"plan.search.jsonl has {num_kept} {word} that hold for this trace" in again.stderr
    assert (tmp_path / "plan.json").exists()
