"""A request may bring a TPOT target of its own: from the trace's file to attainment."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest

from codesign.artifacts import read_table, write_table
from codesign.candidate import Candidate
from codesign.cli import main
from codesign.config import SLO, Serving, parse_deployment
from codesign.dashboard.choices import Machine, Traffic
from codesign.dashboard.plan_tables import figures_of
from codesign.dashboard.what_if import Asked, predict
from codesign.dashboard.words import tiles, verdict
from codesign.errors import InputError
from codesign.fit.what_if import what_if_fit
from codesign.metrics import meets_slo, slo_values, summarise
from codesign.planner.workload import Workload
from codesign.policy.speculation import parse_policy
from codesign.prompts import Prompt, bind_prompts
from codesign.records import RequestRecord, RoundLog, RunRecords
from codesign.run_directory import read_run, write_run
from codesign.sim import simulate
from codesign.traces import load_trace, write_csv, write_parquet

OWN = [0.02, None, 0.5]


def trace_file(folder, values=("0.02", "", "0.5")):
    rows = [f"{number},5,3,chat,{value}" for number, value in enumerate(values)]
    path = folder / "mine.csv"
    path.write_text("\n".join(["arrival,prompt_tokens,output_tokens,category,slo_tpot", *rows, ""]))
    return path


def finished(tpot: float, own: float | None) -> RequestRecord:
    return RequestRecord(
        0, "", 0.0, 5, 11, admitted=0.0, first_token=1.0, finish=1.0 + 10 * tpot, slo_tpot=own
    )


@pytest.mark.parametrize(("write", "name"), [(write_csv, "a.csv"), (write_parquet, "a.parquet")])
def test_targets_come_from_the_file_and_reach_the_engine(tmp_path, write, name):
    trace = load_trace(trace_file(tmp_path))
    write(trace.slice(0, 99), tmp_path / name)
    again = load_trace(tmp_path / name)
    prompts = [Prompt("a", "chat", "run", "Hello")]
    bound = bind_prompts(again.requests, prompts, lambda text: [*text.encode()], seed=0)
    assert [request.slo_tpot for request in bound] == OWN


@pytest.mark.parametrize("value", ["0", "-1", "50ms", "inf", "nan?", "20", "True"])
def test_a_target_that_is_no_time_is_named(tmp_path, value):
    with pytest.raises(InputError, match=r"line 3.*slo_tpot is .*divide milliseconds by 1000"):
        load_trace(trace_file(tmp_path, ("0.02", value, "0.5")))


def test_a_request_is_held_to_its_own_target():
    slo = SLO(tpot=0.1)
    assert meets_slo(finished(0.3, 0.5), slo)
    assert not meets_slo(finished(0.3, None), slo)
    assert not meets_slo(finished(0.05, 0.02), slo)
    assert meets_slo(finished(0.05, None), slo)
    assert not meets_slo(finished(0.05, 0.02), SLO())  # also where the others have none


def test_targets_are_scaled_together():
    assert meets_slo(finished(0.05, 0.04), SLO(ttft=0.5), 2.0)
    assert not meets_slo(finished(0.05, 0.04), SLO(ttft=0.4), 2.0)
    assert not meets_slo(finished(0.05, 0.02), SLO(ttft=0.5), 2.0)


def test_the_percentile_is_of_what_was_asked():
    requests = [finished(0.3, 0.5), finished(0.03, 0.02), finished(0.05, None)]
    assert slo_values(requests, SLO(tpot=0.1, percentile=100))["tpot"] == pytest.approx(0.15)
    assert slo_values(requests, SLO(percentile=100))["tpot"] == pytest.approx(0.3)


def test_runs_keep_targets_and_older_runs_have_none(tmp_path):
    records = RunRecords(
        [finished(0.3, 0.5), replace(finished(0.3, None), request_id=1)], RoundLog(), 5.0, []
    )
    write_run(tmp_path, records, origin="measured", summary={}, seed=0)
    assert [r.slo_tpot for r in read_run(tmp_path).records.requests] == [0.5, None]
    path = tmp_path / "requests.parquet"
    frame, head = read_table(path, kind="requests")
    write_table(path, frame.drop(columns="slo_tpot"), head)
    assert [r.slo_tpot for r in read_run(tmp_path).records.requests] == [None, None]


@pytest.fixture(scope="module")
def fit():
    return what_if_fit("h100", 2, "llama-3.1-70b:int4", "llama-3.2-1b:int4")


def simulated(fit, policy: str, own: list[float | None], serving: Serving, slo: SLO):
    count = len(own)
    requests = pd.DataFrame(
        {
            "arrival": [0.0] * count,
            "prompt_tokens": [300] * count,
            "output_tokens": [40] * count,
            "slo_tpot": pd.Series(own, dtype=float),
        }
    )
    candidate = Candidate(parse_deployment("2"), parse_policy(policy), 4)
    return simulate(requests, candidate, fit, serving=serving, slo=slo, seed=3)


def test_attainment_counts_own_targets(fit):
    slo, own = SLO(tpot=1.0), [1e-6, None, None, 1e-6]
    records = simulated(fit, "chain-3", own, Serving(), slo)
    assert summarise(records, slo).slo_attainment == 0.5
    assert [r.slo_tpot for r in records.requests] == own


def test_a_policy_verifies_more_for_whom_it_hurries(fit):
    slo = SLO(tpot=1.0)
    drafted = [
        [r.num_draft_tokens for r in simulated(fit, "adaserve-4x2x8", own, Serving(), slo).requests]
        for own in ([None] * 4, [1e-6, None, None, None])
    ]
    assert drafted[1][0] > drafted[0][0]


def test_who_joins_next_is_told_of_own_targets(fit):
    slo = SLO(ttft=0.3, tpot=1.0)
    serving = Serving(scheduling="slo")
    admitted = [
        [r.admitted for r in simulated(fit, "plain", own, serving, slo).requests]
        for own in ([None] * 12, [0.012] * 4 + [None] * 8)
    ]
    assert admitted[0] != admitted[1]


def test_commands_say_that_requests_have_targets_of_their_own(tmp_path, capsys):
    file = trace_file(tmp_path)
    assert main(["trace", "show", str(file)]) == 0
    assert "2 requests with TPOT targets of their own, 20 ms at least" in capsys.readouterr().out
    assert main(["trace", "show", str(file), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["own_targets"], summary["tightest_target"]) == (2, 0.02)
    words = ["simulate", "--trace", str(file), "--device", "h100", "--gpus", "1"]
    words += ["--target", "llama-3.1-8b:int4", "--draft", "llama-3.2-1b:int4"]
    words += ["--policy", "plain", "--slo-tpot-ms", "100"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert "requests have TPOT targets of their own" in said.err
    assert "own, or 100" in said.out
    kept = read_run(tmp_path / "run").records.requests
    assert [request.slo_tpot for request in kept] == OWN
    assert main(["trace", "show", str(file), "--out", str(tmp_path / "t.jsonl")]) == 0
    assert "does not say which requests have targets of their own" in capsys.readouterr().err


PAIR = ["--device", "h200", "--gpus", "1", "--target", "llama-3-70b:int4"]
PAIR += ["--draft", "llama-3.2-1b:int4", "--policies", "plain"]


def asking(folder, *values, tokens: int = 20) -> str:
    rows = [f"{0.3 * i},60,{tokens},chat,{value}" for i, value in enumerate(values)]
    path = folder / "asking.csv"
    path.write_text("\n".join(["arrival,prompt_tokens,output_tokens,category,slo_tpot", *rows, ""]))
    return str(path)


@pytest.mark.parametrize("verb", [["plan"], ["simulate", "--policy", "plain"]])
def test_the_others_need_a_target_too(tmp_path, capsys, verb):
    words = PAIR[:-2] if verb[0] == "simulate" else PAIR
    trace = asking(tmp_path, "0.5", "")
    out = str(tmp_path / "out")
    assert main([*verb, "--trace", trace, *words, "--out", out]) == 2
    assert "--slo-tpot-ms MS" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_fewest_workers_are_counted_by_what_requests_ask_for(tmp_path, capsys):
    found = []
    for value, common in (("0.5", "4"), ("", "500")):
        words = ["--trace", asking(tmp_path, *[value] * 12), "--objective", "fewest"]
        pair = [*PAIR[:3], "2", *PAIR[4:]]
        out = str(tmp_path / "plan.json")
        assert main(["plan", *words, *pair, "--slo-tpot-ms", common, "--out", out, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["reason"].partition(";")[0])
    assert found == ["1 worker is the fewest that meet the SLO"] * 2


def test_without_others_nobody_needs_a_common_target(tmp_path, capsys):
    """The longest of their own stands for it, and changes nothing."""
    trace, found = asking(tmp_path, *["0.5", "0.02"] * 4), []
    command = ["plan", "--trace", trace, *PAIR, "--json", "--out", str(tmp_path / "plan.json")]
    for words in ([], ["--slo-tpot-ms", "500"], ["--slo-tpot-ms", "90"]):
        assert main([*command, *words]) == 0
        chosen = json.loads(capsys.readouterr().out)["chosen"]["predicted"]
        found.append([chosen[name] for name in ("goodput", "ttft_p90")])
    assert found[0] == found[1] == found[2]


def test_what_no_machine_keeps_is_to_be_changed_in_the_trace(tmp_path, capsys):
    trace = asking(tmp_path, *["0.0001"] * 8)
    words = ["--slo-tpot-ms", "50", "--out", str(tmp_path / "plan.json")]
    assert main(["plan", "--trace", trace, *PAIR, *words]) == 3
    said = capsys.readouterr().err
    assert "times the TPOT targets (slo_tpot in the trace, --slo-tpot-ms of others)" in said
    assert "TPOT / target p90 is " in said
    assert "would meet --slo-tpot-ms" not in said


def test_what_is_held_to_own_targets_is_no_tpot_in_milliseconds(tmp_path, capsys):
    trace = asking(tmp_path, *["4", "0.5", "4", "0.25"] * 3)
    words = ["--slo-tpot-ms", "50", "--out", str(tmp_path / "plan.json")]
    assert main(["plan", "--trace", trace, *PAIR, *words]) == 0
    said, _, table = capsys.readouterr().out.partition("plan (times in ms)")
    (line,) = [line for line in said.splitlines() if line.startswith("  TPOT / target p90")]
    assert line.endswith("100 %     ok")
    assert "TPOT p90" not in said
    assert "TPOT / target p90 has the least room, at " in said
    of_target = float(line.split()[4])
    slowest = float(table.splitlines()[1].split()[6])  # milliseconds
    assert of_target == pytest.approx(slowest / 250 * 100, rel=0.05)


def test_the_dashboard_shows_shares_of_own_targets_by_another_name(tmp_path):
    trace = Traffic(asking(tmp_path, "0.5", "0.25", ""))
    slo = SLO(tpot=0.05)
    asked = Asked(trace, Machine(), "plain", "8", 4, slo, Serving(preemption=True))
    prediction = predict(asked, is_coarse=True)
    shown = {tile.label: tile for tile in tiles(prediction, slo)}
    assert "TPOT / target p90, %" in shown
    assert "own target" in shown["TPOT / target p90, %"].explanation
    assert "TPOT / target p90 " in verdict(prediction, slo)
    assert " of 100 %" in verdict(prediction, slo)
    figure = figures_of(slo, has_own=True)["tpot_slo"]
    assert (figure.title, figure.factor * 0.05) == ("TPOT / target at the percentile, %", 100.0)
    assert figures_of(slo, has_own=False)["tpot_slo"].title == "TPOT at the percentile, ms"


def test_the_note_on_targets_stays_one_note(tmp_path):
    trace = load_trace(trace_file(tmp_path))
    write_parquet(trace, tmp_path / "a.parquet")
    again = load_trace(tmp_path / "a.parquet")
    assert sum("targets of their own" in note for note in again.notes) == 1


def test_the_screen_counts_own_targets_by_their_share():
    rows = {"arrival": [0.0, 1.0, 2.0, 3.0], "prompt_tokens": 9, "output_tokens": 9}
    requests = pd.DataFrame({**rows, "slo_tpot": [0.02, float("nan"), 0.02, 0.5]})
    assert Workload.of(requests).own_targets == ((0.02, 0.5), (0.5, 0.25))
