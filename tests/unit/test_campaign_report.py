"""The page of the validation campaign, and what sessions note for it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.campaign import __main__, blind, goals, report, schedule, session_seconds, together

ROOT = Path(__file__).parents[2]


def result(*runs: dict, plans: tuple[dict, ...] = ()) -> dict:
    return {
        "pair": "a+b", "runs": list(runs), "plans": list(plans), "sessions": [],
        "calibration": {"all": [[0.55, 0.5, 40], [0.95, 0.9, 60]]},
    }  # fmt: skip


def run(label: str, *, tpot: tuple, length: tuple = (), seconds: tuple = (2e-3, 2e-3)) -> dict:
    spans = {name: [0.0, 0.0] for name in ("draft", "reroot", "link_there", "link_back")}
    figures = {"tpot_mean": list(tpot), "throughput": [10.0, 9.0, 11.0, 10.0]}
    if length:
        figures["acceptance_length"] = list(length)
    rounds = {"target": list(seconds), "seconds": list(seconds), **spans}
    return {"workload": "stream", "label": label, "figures": figures, "rounds": rounds, "notes": []}


def written(tmp_path: Path, *pairs: dict) -> str:
    file = tmp_path / "results.json"
    hardware = {"cores": 2, "gpus": [{"name": "NVIDIA H200"}] * 2}
    file.write_text(json.dumps({"hardware": hardware, "num_seeds": 8, "pairs": list(pairs)}))
    campaigns = report.read([file])
    return f"{report.document(campaigns)}\n{report.run_document(campaigns)}"


def test_the_same_pair_on_two_gpus_has_two_columns(tmp_path):
    files = []
    for number, name in enumerate(("NVIDIA H200", "NVIDIA H100 80GB HBM3")):
        file = tmp_path / f"{number}.json"
        body = {"hardware": {"gpus": [{"name": name}]}, "num_seeds": 8}
        file.write_text(
            json.dumps(body | {"pairs": [result(run("chain-1 on 1", tpot=(1, 1, 1, 1)))]})
        )
        files.append(file)
    assert "|  | goal | a+b, H200 | a+b, H100 |" in report.document(report.read(files))


def test_requests_of_another_seed_are_told():
    old, other = (report.Result("H200", result() | more) for more in ({}, {"requests_seed": 3}))
    assert report.draws([old]) == ""
    assert "3 (a+b, H200)" in report.draws([other])


def test_a_session_that_is_cut_is_noted_with_the_phase_that_it_was_in(tmp_path, capsys):
    __main__.note_cut(tmp_path, "2", "ended here after 170 s")  # it came to its end
    assert capsys.readouterr().out == ""
    assert not (tmp_path / schedule.SESSIONS).exists()
    cut = {"label": "2", "served": 9, "profile": 29.5, "cut": "runs: batch/plain"}
    schedule.phase_file(tmp_path, "2").write_text(json.dumps(cut))
    __main__.note_cut(tmp_path, "2", "ended here after 170 s")
    assert "ended here after 170 s in its phase runs: batch/plain" in capsys.readouterr().out
    assert json.loads((tmp_path / schedule.SESSIONS).read_text()) == cut
    assert not schedule.phase_file(tmp_path, "2").exists()
    table = session_seconds.seconds_table([report.Result("H200", result() | {"sessions": [cut]})])
    assert "9, cut in runs: batch/plain" in table


def test_a_fit_is_kept_before_the_first_run_and_one_that_changed_since_is_told(
    machine_fit, tmp_path
):
    cost = machine_fit.costs["2"]
    kept = blind.keep_blind(tmp_path, "2", cost, machine_fit.calibration)
    later = replace(cost, reroot=cost.reroot * 1.1)
    assert blind.keep_blind(tmp_path, "2", later, machine_fit.calibration) == kept  # the first one
    rounded = replace(cost, reroot=cost.reroot * (1 + 1e-9))
    for costs, is_same in ((cost, True), (rounded, True), (later, False)):
        fit = replace(machine_fit, costs={"2": costs})
        assert blind.blind_fits(tmp_path, fit) == {"2": {"sha256": kept, "is_same": is_same}}
    assert blind.blind_fits(tmp_path, replace(machine_fit, costs={"4": cost})) == {}
    assert blind._is_same({"a": [1.0]}, {"a": [1.0], "new": 0.0})
    assert not blind._is_same({"a": [1.0]}, {"a": [1.0], "new": 0.5})
    assert not blind._is_same({"a": [1.0], "gone": 0.0}, {"a": [1.0]})
    assert blind._is_same({"each": 0.0, "tile": 4}, {"each": 0.0, "tile": 8})
    assert not blind._is_same({"each": 1e-6, "tile": 4}, {"each": 1e-6, "tile": 8})
    pair = result() | {"blind": {"2": {"sha256": kept, "is_same": False}}}
    said = report.blindness([report.Result("H200", pair)])
    assert "0 of 1 are" in " ".join(said.split())


def test_the_document_states_errors_goals_and_the_cause_of_the_worst(tmp_path):
    runs = (
        run("plain on 2, batch 1", tpot=(2e-3, 1.9e-3, 2.1e-3, 2e-3)),
        run(
            "tree-8x4x2 on 2, batch 1",
            tpot=(1e-3, 0.9e-3, 1.1e-3, 1.25e-3, 1.2e-3),
            length=(2.5, 2.4, 2.6, 2.0),
            seconds=(2.2e-3, 2e-3),
        ),
    )
    plan = {
        "workload": "stream", "workers": 2, "regret": 0.015, "correlation": 0.97, "num_runs": 9
    }  # fmt: skip
    text = written(tmp_path, result(*runs, plans=(plan,)))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert rows["decode speed, one stream, mean error"].endswith("| 12.5 % |")  # 0 and 25 %
    assert rows["the same, worst"].endswith("| 25.0 % |")
    assert rows["the same, acceptance known"].endswith("| 4.2 % |")
    assert rows["acceptance length, mean error"].endswith("| 25.0 % |")
    assert rows["round time, one stream, mean error"].endswith("| 5.0 % |")
    assert rows["span: target, mean error"].endswith("| 5.0 % |")
    assert rows["regret: latency of one stream"].endswith("| 1.5 % of 9 |")
    assert rows["coverage of 80 % intervals"].endswith("| 60 % of 5 |")
    assert "tokens per round +25.0 %, round time +10.0 %" in rows["tree-8x4x2 on 2, batch 1"]
    assert "| a+b, H200 |" in text


def test_pairs_of_a_machine_are_judged_together_by_their_runs():
    right, wrong = (2.0, 1.9, 2.1, 2.0), (1.0, 0.9, 1.1, 1.25)
    one = result(*(run("chain-1 on 1, batch 1", tpot=right) for _ in range(3)))
    other, elsewhere = (result(run("chain-1 on 1, batch 1", tpot=wrong)) for _ in range(2))
    results = [report.Result("H200", one), report.Result("H200", other)]
    text = together.together([*results, report.Result("H100", elsewhere)])
    assert "| all pairs together | goal | H200 | H100 |" in text
    # 25 % in one of four streams
    assert "mean error | 3 % | **6.2 %, missed** | **25.0 %, missed** |" in text
    assert "80 % intervals | 70 to 90 % | 88 %, met | **50 %, missed** |" in text
    assert "| span: reroot, mean error | 10 % | - | - |" in text
    assert "| streams; all runs |  | 4; 4 | 1; 1 |" in text


@pytest.mark.parametrize(
    ("regrets", "correlations", "cells"),
    [
        ([0.0, 0.02], [1.0, 0.95], ("2.0 %, met", "0.950, met", "2")),
        ([0.0, 0.0204], [1.0, 0.9496], ("**2.0 %, missed**", "**0.950, missed**", "2")),
        ([0.021, 0.0], [0.949, 0.99], ("**2.1 %, missed**", "**0.949, missed**", "2")),
        ([None, 0.01], [None, None], ("1.0 %, met", "-", "1")),
    ],
)
def test_the_worst_choice_and_the_worst_order_are_judged(regrets, correlations, cells):
    plan = {"workload": "stream", "workers": 1, "num_runs": 9}
    plans = [
        plan | {"regret": regret, "correlation": correlation}
        for regret, correlation in zip(regrets, correlations, strict=True)
    ]
    alone = plan | {"num_runs": 1, "regret": 0.5, "correlation": 0.1}  # no choice
    text = together.together([report.Result("H200", result(plans=(*plans, alone)))])
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    named = "regret, the most of any choice", "rank correlation, the least", "choices of a plan"
    assert [rows[name].split(" | ")[-1].strip(" |") for name in named] == list(cells)


def test_replays_are_judged_by_the_worst_of_them():
    figures = {"ttft_p99": [1.09, 0, 0, 1.0], "slo_attainment": [0.5, 0, 0, 0.535]}
    tpot = (1.0, 0.9, 1.1, 1.0)
    replays = [run("plain on 1, batch 8", tpot=tpot) | {"workload": "segment"} for _ in range(2)]
    replays[1]["figures"] |= figures
    text = together.together([report.Result("H200", result(*replays))])
    assert "| replay: TTFT P99, worst error | 10 % | 9.0 %, met |" in text
    assert "| replay: SLO attainment, worst error | 3 points | **3.5 points, missed** |" in text


def test_intervals_name_the_drift_that_they_were_made_with(tmp_path):
    older = {"host": 45e-6, "batch": 0.017, "host_spread": {}}
    for drift, said in (
        (older, "(45 us per round, and 1.7 % of a round of several"),
        (older | {"share": 0.012}, "(45 us per round, 1.2 % of its time, and 1.7 % of a round"),
    ):
        pair = result() | {"unsure": {}, "drift": drift}
        text = " ".join(written(tmp_path, pair).split())
        assert said in text


def test_intervals_of_steps_are_judged_where_luck_is_known(tmp_path):
    known = [(2.0, 1.0, 3.0, 2.0, 2.03), (2.0, 1.0, 3.0, 2.0, 2.08), (2.0, 1.0, 3.0, 2.0)]
    runs = [run("plain on 2, batch 1", tpot=each) for each in known]
    length = (2.0, 1.0, 3.0, 2.0, 1.9)  # seconds a round are 1 % off
    runs.append(run("chain-3 on 2, batch 1", tpot=(2.0, 1.0, 3.0, 2.0, 2.08), length=length))
    for each in runs:
        each["parts"] = {"tpot_mean": [0.3, 0.3, 0.3, 0.02]}
    now = written(tmp_path, result(*runs) | {"unsure": {}})
    assert "| of the steps' part alone, acceptance known |  | 67 % of 3 |" in now
    then = written(tmp_path, result(*runs))
    assert "part alone" not in then
    assert ("held-out errors" in then, "held-out errors" in now) == (True, False)


def test_of_a_pair_that_was_run_again_the_last_file_counts():
    hardware = {"cores": 2, "gpus": [{"name": "NVIDIA H200"}] * 2}
    files = [
        {
            "hardware": hardware,
            "pairs": [result() | {"pair": pair, "recorded": n} for pair in pairs],
        }
        for n, pairs in enumerate((("a+b", "c+d"), ("a+b",)))
    ]
    found = goals.newest(files)
    assert [(each.pair["pair"], each.pair["recorded"]) for each in found] == [
        ("a+b", 1),
        ("c+d", 0),
    ]


def test_a_pair_that_was_run_again_on_fewer_deployments_stays_as_it_was():
    def campaign(recorded, *labels):
        runs = [run(f"{policy}, batch 1", tpot=()) for policy in labels]
        return {
            "hardware": {"cores": 2, "gpus": [{"name": "NVIDIA H200"}]},
            "pairs": [result(*runs) | {"recorded": recorded}],
        }

    whole = campaign(1, "plain on 1", "chain-1 on 1", "plain on 2")
    for again, counts in (
        (("plain on 1",), 1),
        (("plain on 1", "async-tree-2x1x1 on 1+1"), 1),
        (("plain on 2", "plain on 1"), 2),
        (("plain on 1", "plain on 2", "async-tree-2x1x1 on 1+1"), 2),
    ):
        [found] = goals.newest([whole, campaign(2, *again)])
        assert found.pair["recorded"] == counts


def shown_on(page: Path) -> str:
    """The generated part of a page."""
    text = page.read_text(encoding="utf-8")
    return text.partition(report.BEGIN)[2].partition(report.END)[0].strip()


def is_whole(campaign) -> bool:
    """Whether it is of several GPUs, with streams, batches and replays."""
    kinds = {run["workload"] for pair in campaign["pairs"] for run in pair["runs"]}
    return len(campaign["hardware"]["gpus"]) > 1 and len(kinds) == 3


def test_the_documents_of_the_repository_are_made_from_its_results():
    text = report.DOCUMENT.read_text(encoding="utf-8")
    shown = shown_on(report.DOCUMENT)
    results = ROOT / "benchmarks" / "results"
    files = [results / name for name in re.findall(r"`results/(campaign_[\w-]+\.json)`", shown)]
    newest = sorted(results.glob("campaign_*.json"))
    whole = [f for f in newest if is_whole(json.loads(f.read_text()))]
    assert files[-1] == whole[-1], "the latest of several GPUs with every kind of run is not in it"
    assert newest[-1].name in text, "the page does not name the latest"
    campaigns = report.read(files)
    assert shown == report.document(campaigns).strip()
    assert shown_on(report.RUNS) == report.run_document(campaigns).strip()
    assert text.count("\n") <= 350, "a page that one reads in ten minutes"
    drawn = report.calibration_svg(report.calibrations(campaigns))
    assert report.CALIBRATION.read_text(encoding="utf-8") == drawn


def test_a_chance_that_holds_is_drawn_on_the_diagonal():
    bins = [[0.25, 0.25, 90], [0.75, 0.5, 900], [0.9, 0.1, 3]]
    drawn = ElementTree.fromstring(report.calibration_svg({"a & b": {"chat": bins}}))
    circles = [e.attrib for e in drawn.iter() if e.tag.endswith("circle")]
    frame = next(e.attrib for e in drawn.iter() if e.tag.endswith("rect"))
    left, top, side = (float(frame[name]) for name in ("x", "y", "width"))
    places = [((float(c["cx"]) - left) / side, 1 - (float(c["cy"]) - top) / side) for c in circles]
    assert places == [pytest.approx((0.25, 0.25)), pytest.approx((0.75, 0.5))]  # three tokens: none
    assert float(circles[1]["r"]) > float(circles[0]["r"])
