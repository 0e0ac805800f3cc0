"""The commands that compare policies: the traffic they serve, and names that they refuse."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import compare_policies
from benchmarks.pages import reflow
from benchmarks.policies import crowds, goal_rows, gpu_runs, ranks, splits
from benchmarks.policies.cases import SEGMENTS
from benchmarks.policies.measured_rows import rows_of
from benchmarks.policies.pairs import requests_at
from benchmarks.policies.run_figures import figures_of
from benchmarks.policies.segments import LOAD, segment, target_of
from benchmarks.policy_ranks import SERIAL, SPLIT, candidates_of, main
from codesign.artifacts import header, write_json, write_table
from codesign.config import Serving
from codesign.errors import InputError
from codesign.fit import Fit
from codesign.fit.shipped import shipped_pair
from codesign.run_directory import write_run
from codesign.sim import simulate
from codesign.traces.catalog import bundled_path

PAIR = ("llama-3-70b:int4", "llama-3.2-1b:int4")


def test_a_load_in_a_segments_name_sets_its_rate(tmp_path: Path) -> None:
    path = shipped_pair("h200", *PAIR)
    assert path is not None
    cost = Fit.load(path).costs["2"]
    shutil.copy(bundled_path("conv-twin"), tmp_path / "AzureLLMInferenceTrace_conv.csv")
    usual, busy = (segment(name, tmp_path, cost, 10.0) for name in ("conv", "conv@1.4"))
    assert len(busy) / len(usual) == pytest.approx(1.4 / LOAD, rel=0.2)  # of a few requests
    assert busy["arrival"].iloc[-1] == usual["arrival"].iloc[-1] == pytest.approx(10.0)


def test_the_same_load_with_more_at_once_is_more_requests_a_second(tmp_path: Path) -> None:
    path = shipped_pair("h200", *PAIR)
    assert path is not None
    cost = Fit.load(path).costs["4"]
    shutil.copy(bundled_path("conv-twin"), tmp_path / "AzureLLMInferenceTrace_conv.csv")
    seconds = []
    for batch in (8, 24):
        requests = requests_at("conv", tmp_path, cost, 1.2, num=40, batch=batch)
        assert len(requests) == 40
        prompt, output = (
            float(requests[f"{kind}_tokens"].to_numpy().mean()) for kind in ("prompt", "output")
        )
        step = cost.target(batch, batch * (prompt + output / 2), batch)
        each = cost.prefill(prompt) + output * step / batch
        seconds.append(requests["arrival"].iloc[-1])
        assert seconds[-1] == pytest.approx(40 * each / 1.2)
    assert seconds[1] < 0.9 * seconds[0]


def test_crowds_fill_batches_and_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(bundled_path("conv-twin"), tmp_path / "AzureLLMInferenceTrace_conv.csv")
    few = {"PAIRS": crowds.PAIRS[:1], "SEGMENTS": ("conv",), "LOADS": (2.0,), "SEEDS": (1, 2)}
    for name, value in {**few, "SIZES": {16: 30}}.items():
        monkeypatch.setattr(crowds, name, value)
    out = tmp_path / "policies.json"
    flags = ["crowds", "--traces", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["compare_policies.py", *flags])
    compare_policies.main()
    assert len(capsys.readouterr().err.splitlines()) == 6
    compare_policies.main()
    assert not capsys.readouterr().err
    cases = crowds.cases_of(json.loads(out.read_text()))
    assert [(case.at_once, case.load, case.seed) for case in cases] == [
        (16, "2.0", 1),
        (16, "2.0", 2),
    ]
    first, second = cases.values()
    assert first["plain"] == second["plain"]
    for policy in crowds.OURS:
        assert first[policy] != second[policy]
        assert first[policy]["peak_batch"] == 16
    assert crowds.crowds_section(json.loads(out.read_text()))


def test_a_trace_that_is_not_there_is_an_error_that_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    for folder in (tmp_path, None):
        with pytest.raises(InputError, match="codesign trace fetch mooncake-conversation"):
            SEGMENTS["mooncake"].load(folder, seed=0)


def test_the_usual_policies_have_candidates() -> None:
    assert tuple(candidates_of(SERIAL, "2")) == SERIAL
    assert tuple(candidates_of(SPLIT, "1+1")) == SPLIT


@pytest.mark.parametrize(
    ("flag", "names", "wrong"),
    [
        ("--serial", "plain,chain-1,specserve", "specserve"),
        ("--serial", "plain,async-tree-8x4x6", "async-tree-8x4x6"),
        ("--serial", "plain,eagle-8x4x4", "eagle-8x4x4"),
        ("--split", "chain-1", "chain-1"),
        ("--segments", "mooncake,cove", "cove"),
        ("--segments", "conv@fast", "conv@fast"),
        ("--segments", "conv@0", "conv@0"),
    ],
)
def test_a_wrong_name_ends_in_one_line_before_anything_starts(
    flag: str, names: str, wrong: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    folder = tmp_path / "runs"
    flags = ["serve", str(folder), "--device", "cpu-ranks", "--fit", "nowhere.json", flag, names]
    monkeypatch.setattr(sys, "argv", ["/somewhere/policy_ranks.py", *flags])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == InputError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("policy_ranks.py: ")
    assert wrong in line
    assert not folder.exists()


def _serve(folder: Path, traces: Path) -> None:
    """Write what ``serve`` does on four GPUs, with the simulator in their place."""
    path = shipped_pair("h200", "llama-3.1-8b:int4", "llama-3.2-1b:int4")
    assert path is not None
    fit = Fit.load(path)
    folder.mkdir()
    for file in (path, path.with_name("fit.acceptance.parquet")):
        shutil.copy(file, folder)
    slo = target_of(fit.costs["4"])
    requests = segment("conv@0.3", traces, fit.costs["4"], 1.0, 8)
    write_table(folder / "conv@0.3.parquet", requests, header("trace", seed=1))
    about = {"slo": asdict(slo), "segments": ["conv@0.3"], "fit": path.name, "batch": 8}
    write_json(folder / "about.json", {**header("policies", seed=1), **about, "ships": True})
    for way, labels in (("4", ("plain", *SERIAL[1:3], "plain again")), ("3+1", SPLIT[:1])):
        for policy, candidate in candidates_of(labels, way).items():
            records = simulate(requests, candidate, fit, serving=Serving(), slo=slo, seed=7)
            summary = {"label": policy, "candidate": candidate.to_dict()}
            outputs = {i: [int(way == "4" or i > 0)] for i in range(len(requests))}
            write_run(
                folder / "runs" / "conv@0.3" / policy.replace(" ", "_"), records, origin="measured",
                summary={**summary, "metrics": figures_of(records, slo)}, seed=1, outputs=outputs,
            )  # fmt: skip


def test_runs_on_four_gpus_are_joined_and_shown_beside_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(bundled_path("conv-twin"), tmp_path / "AzureLLMInferenceTrace_conv.csv")
    _serve(tmp_path / "runs", tmp_path)
    monkeypatch.setattr(ranks, "NUM_SEEDS", 1)
    out, key = tmp_path / "policies.json", "ranks-8b-24-h100x4"
    flags = ["join", str(tmp_path / "runs"), "--out", str(out), "--key", key]
    monkeypatch.setattr(sys, "argv", ["policy_ranks.py", *flags])
    main()
    assert "async-batch-tree-16x2x8 on 3+1" in capsys.readouterr().out
    results = json.loads(out.read_text())
    (row,) = splits.measured_rows(results)
    assert (row.gpus, row.split, row.label) == (4, "3+1", "8B + 1B, 4 GPUs, conv at 0.3")
    measured, simulated = row.speedup("async-batch-tree-16x2x8") or (0.0, 0.0)
    assert measured == pytest.approx(simulated, rel=0.1)  # another seed
    assert 1.0 < measured < 1.09  # a draft on a GPU of its own pays, by the steps that ship
    page = gpu_runs.runs_section(results)
    assert "SOME OUTPUTS DIFFER" not in page
    count = row.found["plain"]["num_requests"]
    assert f"On 3+1 a target rounds differently: {count - 1} of {count} outputs are equal." in page
    assert "| async-batch-tree-16x2x8 on 3+1 | apart |" in page
    ours, plain = row.found["async-batch-tree-16x2x8"], row.found["plain"]
    results |= {f"splits/8b-int4+1b-int4/conv/0.3/{way}": plain for way in splits.WAYS}
    said = reflow(splits.splits_section(results))
    lead = ours["goodput"] / row.found["specserve-8"]["goodput"]
    assert "in 1 of 1 points" in said.replace("\n", " ")
    assert f"8B + 1B, conv at 0.3 {lead:.2f} (" in said.replace("\n", " ")


def _row(seconds: dict[str, float]) -> dict[str, dict[str, float]]:
    return {f"{label} on 1": {"latency_mean": mean} for label, mean in seconds.items()}


def _results(run: str, segments: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict]:
    about = {
        "target": "llama-3-8b",
        "draft": "llama-3.2-1b",
        "created": "2026-11-28",
        "machine": "H",
    }
    found = {f"{name}/{way}": f for name, ways in segments.items() for way, f in ways.items()}
    return {f"{run}/about": about} | {f"{run}/{key}": figures for key, figures in found.items()}


def test_a_second_run_counts_only_where_every_policy_has_one() -> None:
    run = "ranks-8b-1"
    once = _row({"plain": 1.0, "chain-1": 2.0, "plain again": 0.8})
    twice = once | _row({"chain-1 again": 1.9})
    (row,) = rows_of(_results(run, {"conv": once}), [run])
    assert (row.found["plain"]["latency_mean"], row.apart) == (1.0, pytest.approx(0.25))
    (row,) = rows_of(_results(run, {"conv": twice}), [run])
    assert {policy: f["latency_mean"] for policy, f in row.found.items()} == {
        "plain": 0.8,
        "chain-1": 1.9,
    }
    assert row.apart == pytest.approx(0.25)
    (row,) = rows_of(_results(run, {"conv": _row({"plain": 1.0})}), [run])
    assert row.apart is None


def test_over_the_loads_of_a_trace_one_length_has_to_be_the_best_at_all() -> None:
    def case(chain_1: float, chain_3: float | None = None) -> dict[str, dict[str, float]]:
        seconds = {"specserve-8": 1.0, "chain-1": chain_1, "chain-3": chain_3}
        return {policy: {"latency_mean": s} for policy, s in seconds.items() if s is not None}

    cases = {
        "8B + 1B, 1 GPU, conv at 0.2": case(0.98, 0.9),
        "8B + 1B, 1 GPU, conv at 0.7": case(1.10, 1.4),
        "8B + 1B, 1 GPU, code at 0.2": case(0.9),  # at one load only
        "own rate": case(0.5),
        "h100x1 conv at 0.25": case(0.99, 0.5),  # the other length at one load only
        "h100x1 conv at 0.5": case(0.99),
        "h100x1 conv at 1": case(0.99),
    }
    *_, found, met = goal_rows.over_loads_row("asked", ({}, {}, cases))
    assert found == "0.990: h100x1 conv (missed in 1 of 2)"
    assert met == "simulated: -, measured: no"
    del cases["h100x1 conv at 0.25"], cases["h100x1 conv at 0.5"]
    assert "1.040: 8B + 1B, 1 GPU, conv" in goal_rows.over_loads_row("asked", ({}, {}, cases))


@pytest.mark.parametrize(("flag", "wrong"), [("--segments", "cove"), ("--machines", "b300x3")])
def test_the_comparison_refuses_an_unknown_name_in_one_line(
    flag: str, wrong: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "policies.json"
    flags = ["traces", "--out", str(out), flag, wrong]
    monkeypatch.setattr(sys, "argv", ["/somewhere/compare_policies.py", *flags])
    with pytest.raises(SystemExit) as stop:
        compare_policies.main()
    assert stop.value.code == InputError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compare_policies.py: ")
    assert wrong in line
    assert not out.exists()
