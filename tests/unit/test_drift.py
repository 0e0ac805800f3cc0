"""What machines do between a profile and its runs."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from codesign.fit.drift import BATCH, EXPOSURE, HOST, SHARE, drift_error, host_spreads


def test_a_round_drifts_by_a_fixed_time_and_a_share_and_one_of_several_requests_by_another_share():
    assert drift_error(1e-3) == pytest.approx(np.hypot(HOST / 1e-3, SHARE))
    assert drift_error(1e9) == pytest.approx(SHARE)  # a long round too, as all of a machine drifts
    assert drift_error(1e9, requests=8) == pytest.approx(np.hypot(SHARE, BATCH))
    by_three = math.hypot(HOST / 1e-3, SHARE, BATCH)
    assert drift_error(1e-3, requests=2) == pytest.approx(by_three)
    assert drift_error(0.0) == 0.0


def test_a_host_that_was_less_steady_than_others_widens_it():
    wanted = math.hypot(EXPOSURE * 1e-5 / 1e-3, SHARE)
    assert drift_error(1e-3, host_spread=1e-5) == pytest.approx(wanted)
    assert drift_error(1e-3, host_spread=1e-6) == drift_error(1e-3)  # others are no steadier


def test_the_spread_is_that_of_the_paces_of_a_deployment():
    paces = {"2": [1.0, 1.0, 1.0, 3.0], "1+1": [2.0, 2.0]}
    steps = pd.DataFrame(
        [(label, "pace", value) for label, values in paces.items() for value in values]
        + [("2", "loop", 9.0), ("4", "loop", 9.0)],
        columns=["deployment", "op", "seconds"],
    )
    assert host_spreads(steps) == {"2": 0.5, "1+1": 0.0}  # of a mean of four
