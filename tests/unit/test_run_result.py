"""What ``codesign run`` says to type next."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from codesign.candidate import Interval
from codesign.cli.run_result import next_command, result_text
from codesign.config import SLO

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


@pytest.mark.parametrize(("slo", "is_shown"), [(SLO(), False), (SLO(tpot=0.1), True)])
def test_shares_within_the_slo_are_shown_if_there_is_one(slo, is_shown):
    """Without one "100 (100)" said nothing."""
    figures = dict.fromkeys(("ttft_p50", "tpot_mean", "throughput", "acceptance_length"), 2.5)
    metrics = SimpleNamespace(**figures, slo_attainment=1.0)
    predicted = {"ttft_p50": Interval(1.2345, 1.0, 2.0), "slo_attainment": Interval(1.0, 1.0, 1.0)}
    scored = SimpleNamespace(label="plain on 2, batch 1", predicted=predicted)
    runs = [SimpleNamespace(scored=scored, metrics=metrics)]
    text = result_text(SimpleNamespace(slo=slo, num_requests=1), runs, "next")
    assert ("SLO %" in text) == ("100 (100)" in text) == is_shown
    assert "2,500 (1,234)" in text
