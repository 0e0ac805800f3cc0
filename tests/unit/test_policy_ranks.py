"""The traffic that benchmarks/policy_ranks.py serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policy_ranks import LOAD, segment
from codesign.fit import Fit
from codesign.fit.shipped import shipped_pair

PAIR = ("llama-3-70b:int4", "llama-3.2-1b:int4")


def test_a_load_in_a_segments_name_sets_its_rate(tmp_path: Path) -> None:
    path = shipped_pair("h200", *PAIR)
    assert path is not None
    cost = Fit.load(path).costs["2"]
    usual, busy = (segment(name, tmp_path, cost, 10.0) for name in ("conv", "conv@1.4"))
    assert len(busy) / len(usual) == pytest.approx(1.4 / LOAD, rel=0.2)  # of a few requests
    assert busy["arrival"].iloc[-1] == usual["arrival"].iloc[-1] == pytest.approx(10.0)
