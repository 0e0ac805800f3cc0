"""``codesign fit --acceptance-from`` as a user types it, and a simulation with what it wrote."""

from __future__ import annotations

import json

import pytest

COUNTERS = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 20000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40000.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 15000.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 11000.0
"""


@pytest.fixture
def cli(cli_here):
    return cli_here


@pytest.fixture
def metrics(tmp_path):
    (tmp_path / "metrics.txt").write_text(COUNTERS)
    return "metrics.txt"


def test_counters_become_a_fit_that_simulate_reads(cli, metrics):
    made = cli("fit", "--acceptance-from", metrics, "--out", "served.json", "--json")
    assert made.returncode == 0, made.stderr
    payload = json.loads(made.stdout)
    assert payload["summary"]["length"] == pytest.approx(2.3)
    assert payload["acceptance_origin"] == "imported from vLLM counters (metrics.txt)"
    flags = ("--trace", "conv-twin", "--max-requests", "30", "--max-prompt", "64")
    flags += (
        "--max-output",
        "200",
        "--policy",
        "chain-2",
        "--deployment",
        "2",
        "--fit",
        "served.json",
        "--json",
    )
    result = cli("simulate", *flags)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["acceptance"] == payload["acceptance_origin"]
    length = json.loads(result.stdout)["metrics"]["acceptance_length"]
    assert length == pytest.approx(2.3, rel=0.05)


def test_the_text_shows_what_was_measured_beside_what_the_fit_says(cli, metrics):
    result = cli("fit", "--acceptance-from", metrics, "--out", "served.json")
    assert "2.300 tokens per round over 20,000 rounds" in result.stdout
    line = next(row.split() for row in result.stdout.splitlines() if row.strip().startswith("2 "))
    assert line[1] == line[2] == "2.3"


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ((), 2, "give PROFILE"),
        (("profile", "--acceptance-from", "metrics.txt"), 2, "not both"),
        (("profile", "--chain", "3"), 2, "give PROFILE"),
        (("--acceptance-from", "nowhere"), 4, "cannot read nowhere"),
        (("--acceptance-from", "metrics.txt", "--out", "."), 2, "Name a file: --out fit.json"),
        (("no-profile", "--out", "."), 2, "--out . is a folder. Name a file: --out fit.json"),
        (
            ("--acceptance-from", "metrics.txt", "--steps-from", "no.json"),
            4,
            "no.json does not exist",
        ),
    ],
)
def test_mistakes_are_one_line_with_their_exit_code(cli, metrics, arguments, code, reason):
    result = cli("fit", *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert reason in result.stderr


def test_the_fit_of_the_step_times_is_not_replaced(cli, tmp_path, metrics):
    assert cli("fit", "--acceptance-from", metrics, "--out", "fit.json").returncode == 0
    result = cli("fit", "--acceptance-from", metrics)
    assert result.returncode == 2
    assert "would replace" in result.stderr
