"""Slow phases of a host are found in the rounds of a run."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.campaign.phases import phases


def rounds_at(paces: list[float]) -> np.ndarray:
    """A hundred rounds at each pace, of steps that vary by 1 %."""
    steps = np.repeat(paces, 100)
    return steps * np.random.default_rng(0).normal(1.0, 0.01, len(steps))


@pytest.mark.parametrize("pace", [0.9, 1.0, 1.2])
def test_a_run_at_one_pace_has_no_slow_phase_whatever_the_fit_says(pace):
    found = phases(rounds_at([pace] * 4), np.full(400, 1))
    assert (found.share, found.longer) == (0.0, 0.0)


def test_a_phase_is_told_by_its_share_of_the_rounds_and_by_how_much_longer_they_take():
    found = phases(rounds_at([1.14, 1.0, 1.0, 1.14, 1.0]), np.full(500, 1))
    assert found.share == pytest.approx(0.4, abs=0.02)
    assert found.longer == pytest.approx(0.15, abs=0.015)


def test_single_late_rounds_are_no_phase():
    ratio = rounds_at([1.0] * 4)
    ratio[::10] *= 1.5
    assert phases(ratio, np.full(400, 1)).share == 0.0


def test_what_the_fit_says_too_much_of_one_number_of_requests_is_no_phase():
    requests = np.repeat([8, 1, 8, 1], 100)
    ratio = rounds_at([1.0] * 4) * np.where(requests == 8, 1.2, 1.0)
    assert phases(ratio, requests).share == 0.0
    assert phases(ratio, np.full(400, 1)).share == pytest.approx(0.5, abs=0.02)
