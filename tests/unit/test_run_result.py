"""What ``codesign run`` says to type next."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from codesign.cli.run_result import next_command

RUNS = [SimpleNamespace(directory=Path("runs/a b"))]


@pytest.fixture(autouse=True)
def typed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["codesign", "run", "--plan", "my plan.json"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def test_runs_that_are_whole_are_validated():
    command = next_command(Path("my plan.json"), RUNS, is_whole=True, resumes=False)
    assert command == "codesign validate --plan 'my plan.json' --run 'runs/a b'"


def test_a_run_that_was_cut_is_resumed_and_not_validated():
    again = "codesign run --plan 'my plan.json'"
    assert next_command(Path("p"), RUNS, is_whole=False, resumes=False) == f"{again} --resume"
    assert next_command(Path("p"), RUNS, is_whole=False, resumes=True) == again


@pytest.mark.parametrize(("hosts", "flags"), [("1", []), ("2", ["--nnodes", "2"])])
def test_a_run_of_torchrun_that_was_cut_is_started_again_by_it(monkeypatch, hosts, flags):
    told = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": hosts}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    command = next_command(Path("p"), RUNS, is_whole=False, resumes=False)
    words = ["torchrun", *flags, "--nproc-per-node", "4", "-m", "codesign", "run"]
    assert shlex.split(command, comments=True) == [*words, "--plan", "my plan.json"]
    assert ("each host" in command) == (hosts == "2")
    whole = next_command(Path("p"), RUNS, is_whole=True, resumes=False)
    assert whole.startswith("codesign validate --plan p --run ")
