"""The traffic that benchmarks/policy_ranks.py serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policy_ranks import LOAD, segment
from codesign.fit import Fit

FITS = Path(__file__).parents[2] / "codesign" / "data" / "fits"
FIT = FITS / "h200-llama-3-70b-int4+llama-3.2-1b-int4" / "fit.json"


def test_a_load_in_a_segments_name_sets_its_rate(tmp_path: Path) -> None:
    cost = Fit.load(FIT).costs["2"]
    usual, busy = (segment(name, tmp_path, cost, 10.0) for name in ("conv", "conv@1.4"))
    assert len(busy) / len(usual) == pytest.approx(1.4 / LOAD, rel=0.2)  # of a few requests
    assert busy["arrival"].iloc[-1] == usual["arrival"].iloc[-1] == pytest.approx(10.0)
