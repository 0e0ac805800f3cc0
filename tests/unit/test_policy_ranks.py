"""The commands that compare policies: the traffic they serve, and names that they refuse."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import compare_policies
from benchmarks.policies.cases import SEGMENTS
from benchmarks.policies.segments import LOAD, segment
from benchmarks.policy_ranks import SERIAL, SPLIT, candidates_of, main
from codesign.errors import InputError
from codesign.fit import Fit
from codesign.fit.shipped import shipped_pair
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
