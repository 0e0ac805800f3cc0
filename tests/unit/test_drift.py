"""What machines do between a profile and its runs."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from codesign.fit.drift import (
    BATCH,
    EXPOSURE,
    HOST,
    SHARE,
    drift_error,
    host_spreads,
    visit_spreads,
)


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


def visited(paces: dict[int, float], label: str = "2") -> pd.DataFrame:
    """Two passes of four shapes in each visit, whose own times differ far more than the paces."""
    rows = [
        (label, op, rows, 1, 0, False, pace * rows * (1.0 + 0.002 * repeat), visit)
        for visit, pace in paces.items()
        for op in ("target", "draft")
        for rows in (1, 8)
        for repeat in range(2)
    ]
    names = ["deployment", "op", "rows", "requests", "context", "beside", "seconds", "visit"]
    return pd.DataFrame(rows, columns=names)


def test_visits_that_differ_as_a_whole_say_how_far_off_a_further_one_is():
    steps = pd.concat([visited({1: 1.0, 2: 1.06}), visited({1: 2.0, 2: 2.0}, "1+1")])
    spreads = visit_spreads(steps)
    assert spreads["1+1"] == pytest.approx(0.0, abs=1e-12)
    # Two visits that are d apart: their deviation is d / sqrt(2), of a further one from their mean.
    assert spreads["2"] == pytest.approx(math.log(1.06) * math.sqrt(0.75))
    more = visit_spreads(visited({1: 1.0, 2: 1.06, 3: 1.0, 4: 1.06}))
    assert more["2"] == pytest.approx(math.log(1.06) * math.sqrt(1 / 3 * 5 / 4))


def test_a_step_that_took_no_time_says_nothing_of_visits():
    steps = visited({1: 1.0, 2: 1.06})
    none = steps.assign(rows=99, seconds=0.0)
    assert visit_spreads(pd.concat([steps, none])) == visit_spreads(steps)


def test_what_was_visited_once_says_nothing_of_further_visits():
    once = visited({1: 1.0})
    assert visit_spreads(once) == visit_spreads(once.drop(columns="visit")) == {}
    other = visited({2: 1.0}).assign(rows=3)  # no shape of both
    assert visit_spreads(pd.concat([once, other])) == {}


def test_visits_further_apart_than_machines_are_widen_it_and_others_do_not_narrow_it():
    assert drift_error(1e9, visit_spread=0.05) == pytest.approx(0.05)
    assert drift_error(1e9, visit_spread=0.001) == pytest.approx(SHARE)
    several = drift_error(1e9, requests=8, visit_spread=0.05)
    assert several == pytest.approx(math.hypot(0.05, BATCH))
