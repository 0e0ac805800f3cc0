"""``codesign run`` with replicas, as typed: a process each, and requests routed between them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import codesign
from codesign.artifacts import header, write_table
from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.file_ref import FileRef
from codesign.plan import Plan
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.run_directory import StoredRun, read_run

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(codesign.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
}
# The command with progress lines in a pipe as they come, not each ten seconds.
TALKATIVE = (
    "import sys; from codesign.cli import main, output; output._PIPE_INTERVAL = 0; sys.exit(main())"
)
CANDIDATES = ("plain on 1", "plain on 2x1", "chain-3 on 2x1", "async-tree-4x2x2 on 2x1+1")


def scored(label: str) -> ScoredCandidate:
    policy, _, split = label.partition(" on ")
    candidate = Candidate(parse_deployment(split), parse_policy(policy), 2)
    return ScoredCandidate(candidate, {}, {}, "fitted", True)


@pytest.fixture(scope="module")
def folder(machine_fit, tiny_models, tmp_path_factory) -> Path:
    """With a fit of the tiny pair."""
    folder = tmp_path_factory.mktemp("replicas")
    target, draft = map(str, tiny_models)
    dataclasses.replace(machine_fit, target=target, draft=draft).save(folder / "fit.json")
    return folder


def save_plan(folder: Path, name: str, columns: dict, serving: Serving) -> list[str]:
    """Write a plan of ``columns`` of a trace; the first words of a command that runs it."""
    import pandas as pd

    trace = pd.DataFrame({"category": "chat", **columns})
    write_table(folder / f"{name}.parquet", trace, header("trace", seed=0))
    fit = json.loads((folder / "fit.json").read_text())
    chosen, *others = map(scored, CANDIDATES)
    plan = Plan(
        target=fit["target"], draft=fit["draft"], slo=SLO(), objective="latency",
        sampling=Sampling(), serving=serving, trace=FileRef.of(folder / f"{name}.parquet"),
        num_requests=len(trace), fit=FileRef.of(folder / "fit.json"), seed=0, num_seeds=1,
        chosen=chosen, alternatives=tuple(others),
    )  # fmt: skip
    plan.save(folder / f"{name}.json")
    return ["run", "--plan", f"{name}.json", "--out", name, "--json"]


def wanted(*labels: str) -> list[str]:
    return [word for label in labels for word in ("--candidate", f"{label}, batch 2")]


def run(folder: Path, words: list[str]) -> tuple[dict, list[StoredRun]]:
    done = subprocess.run(
        [sys.executable, "-m", "codesign", *words, "--quiet"], cwd=folder, env=ENVIRONMENT,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    return printed, [read_run(folder / found["directory"]) for found in printed["runs"]]


@pytest.fixture
def begin(folder, start_process) -> Callable[[list[str]], subprocess.Popen[str]]:
    """Start a run and wait until it has served something."""

    def begin(words: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TALKATIVE, *words]
        running = start_process(command, cwd=folder, env=ENVIRONMENT)
        said = ""
        while not re.search(r": [1-4] of 5", said):
            line = running.stderr.readline()
            assert line, said
            said += line
        return running

    return begin


def endless(folder: Path, name: str) -> list[str]:
    """Words of a run that only ends when it is ended: the last request comes late."""
    columns = {
        "arrival": [0.0, 0.0, 0.0, 0.0, 300.0],
        "prompt_tokens": [9, 10, 11, 12, 13],
        "output_tokens": [4, 4, 4, 4, 4],
    }
    serving = Serving(max_kv_tokens=512)
    return [*save_plan(folder, name, columns, serving), *wanted("plain on 2x1")]


def test_the_least_loaded_replica_serves_and_no_token_differs(folder):
    columns = {
        "arrival": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        "prompt_tokens": [20, 9, 31, 14, 12, 17],
        "output_tokens": [16, 8, 12, 20, 9, 11],
    }
    serving = Serving(max_kv_tokens=512, routing="least-loaded")
    words = save_plan(folder, "least", columns, serving)
    printed, runs = run(folder, [*words, *wanted("plain on 1", "chain-3 on 2x1")])
    assert printed["differing_requests"] == []
    one, two = runs
    assert {r.replica for r in one.records.requests} == {0}
    assert [r.replica for r in two.records.requests][:4] == [0, 1, 0, 1]
    assert two.records.notes == []
    assert [len(two.outputs[i]) for i in range(6)] == columns["output_tokens"]
    assert set(two.records.rounds.column("replica")) == {0.0, 1.0}
    starts = two.records.rounds.column("start")
    assert (starts[1:] >= starts[:-1]).all()
    for replica in (0, 1):
        own = two.records.rounds.column("replica") == replica
        emitted = two.records.rounds.column("num_emitted_tokens")[own].sum()
        served = [r for r in two.records.requests if r.replica == replica]
        # A prompt's forward emits the first token of its request.
        assert emitted == sum(r.output_tokens - 1 for r in served)
    metrics = printed["runs"][1]["metrics"]
    assert metrics["num_finished"] == 6
    assert 0.0 <= metrics["calibration_error"]["all"] <= 1.0


def test_replicas_of_rank_groups_get_the_prompts_whose_start_they_know(folder):
    columns = {
        "arrival": [0.0, 0.0, 0.01, 0.02],
        "prompt_tokens": [600, 600, 600, 600],
        "output_tokens": [12, 12, 6, 6],
        "hash_ids": [[1, 2], [3, 4], [3, 5], [1, 6]],
    }
    serving = Serving(max_kv_tokens=4096, prefix_cache=True, routing="prefix-aware")
    words = save_plan(folder, "prefix", columns, serving)
    words += ["--device", "cpu-ranks", "--padded-rows", "8"]
    printed, runs = run(folder, [*words, *wanted("plain on 1", "async-tree-4x2x2 on 2x1+1")])
    assert printed["differing_requests"] == []
    requests = runs[1].records.requests
    assert [r.replica for r in requests] == [0, 1, 1, 0]
    assert [r.cached_tokens for r in requests] == [0, 0, 512, 512]


def test_ctrl_c_keeps_what_every_replica_has_finished(folder, begin):
    running = begin(endless(folder, "cut"))
    running.send_signal(signal.SIGINT)
    printed, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    (found,) = json.loads(printed)["runs"]
    (note,) = found["notes"]
    stored = read_run(folder / found["directory"])
    left = sum(r.finish is None for r in stored.records.requests)
    assert note == f"interrupted: {left} of 5 requests unfinished"
    assert 1 <= left <= 4


def test_a_lost_replica_ends_the_run_with_what_the_others_finished(folder, begin):
    running = begin(endless(folder, "lost"))
    os.kill(replica_process(running.pid, 1), signal.SIGKILL)
    printed, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    (found,) = json.loads(printed)["runs"]
    (note,) = found["notes"]
    assert note.startswith("replica 1 ended, exit code -9: ")
    stored = read_run(folder / found["directory"])
    lost = [r for r in stored.records.requests if r.replica == 1]
    assert lost
    assert all(r.finish is None for r in lost)


def replica_process(parent: int, number: int) -> int:
    """Process number of a replica."""
    for found in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{found}/cmdline").read_bytes().decode().split("\0")
        if "codesign.engine.replica_process" in words and words[4] == str(number):
            return int(found)
    raise AssertionError(f"no process of replica {number}")


def test_a_pool_for_prompts_is_refused(folder, cli_here):
    words = endless(folder, "pool")
    plan = Plan.load(folder / "pool.json")
    chosen = scored("plain on 2x1/p1")
    dataclasses.replace(plan, chosen=chosen).save(folder / "pool.json")
    done = cli_here(*words[:-2], folder=folder)
    assert done.returncode == 4
    assert "has a pool for prompts, which the engine does not run yet" in done.stderr
    assert len(done.stderr.splitlines()) == 1
