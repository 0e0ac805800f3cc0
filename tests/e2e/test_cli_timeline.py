"""``codesign timeline`` as a user types it."""

from __future__ import annotations

import json

import pytest

from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords
from codesign.run_directory import write_run


@pytest.fixture
def cli(cli_here):
    return cli_here


@pytest.fixture
def runs(tmp_path):
    request = RequestRecord(0, "chat", 0.5, 10, 4, 0.5, 0.75, 1.5, 2, 6, 1)
    rounds = [RoundRecord(0, 0.5, 1, 4, 10, 3, 13, 3, 1, 2, 0.25, 10, 0.2, 0.0, 0.0, 0.1, 0.03)]
    records = RunRecords([request], RoundLog(rounds), 1.5, [])
    for origin in ("simulated", "measured"):
        summary = {"label": "chain-3 on 2, batch 1"}
        write_run(tmp_path / origin, records, origin=origin, summary=summary, seed=0)
    return "simulated", "measured"


def test_simulated_and_measured_runs_lie_side_by_side(cli, tmp_path, runs):
    result = cli("timeline", *runs, "--out", "t.json", "--json")
    assert result.returncode == 0, result.stderr
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert json.loads(result.stdout)["num_events"] == len(events)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"chain-3 on 2, batch 1 ({run}, {run})" for run in runs]
    of = [
        [(e["name"], e["ts"], e["dur"]) for e in events if (e["ph"], e["pid"]) == ("X", pid)]
        for pid in (1, 2)
    ]
    assert of[0] == of[1] != []


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("nowhere",), 4, "nowhere/run.json does not exist"),
        (("simulated", "--slice", "3"), 2, "--slice takes START:DURATION in numbers"),
        (("simulated", "--slice", "nan:3"), 2, "--slice takes START:DURATION in numbers"),
        (("simulated", "--slice", "9:3"), 4, "nothing happens from 9 s for 3 s; the longest run"),
        (("simulated", "--slice", "1:-3"), 4, "nothing happens from 1 s for -3 s"),
        (("simulated", "--out", "simulated/run.json/t.json"), 4, "takes no files. Name another: "),
        (("simulated", "--out", "."), 2, "--out . is a folder. Name a file: --out timeline.json"),
        (("simulated", "--out", "simulated"), 2, "--out simulated/timeline.json"),
        (("simulated", "--out", "simulated/run.json"), 2, "simulated/run.json is a file that is"),
        ((), 2, "RUNDIR"),
    ],
)
def test_mistakes_are_one_line_with_their_exit_code(cli, runs, arguments, code, reason):
    result = cli("timeline", *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
