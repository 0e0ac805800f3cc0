"""Fits recover what measurements were made from, whatever that was."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.fit.step_forms import Shapes, fit_line, fit_piecewise, fit_quadratic, fit_table
from codesign.fit.steps import HeldOut, left_out

SHAPES = [(n, c) for n in (1, 2, 4, 8, 12, 16, 32) for c in (32, 128, 512)]
ROWS = np.array([n for n, _ in SHAPES], np.float64)
CONTEXT = np.array([c for _, c in SHAPES], np.float64)
KNOTS = sorted(set(ROWS.tolist()))

slopes = st.floats(0.0, 1e-4)


@given(alpha=slopes, gamma=slopes, delta=st.floats(1e-3, 1.0))
def test_a_noiseless_line_is_recovered_everywhere(alpha, gamma, delta):
    seconds = alpha * CONTEXT + gamma * ROWS + delta
    time = fit_line(Shapes(ROWS, CONTEXT, np.ones_like(ROWS), seconds))
    for rows, context in ((1, 0), (5, 300), (64, 2048)):
        wanted = alpha * context + gamma * rows + delta
        assert time(rows, context) == pytest.approx(wanted, rel=1e-3)


@given(
    alpha=slopes,
    increments=st.lists(st.floats(0.0, 0.1), min_size=len(KNOTS), max_size=len(KNOTS)),
    base=st.floats(1e-3, 1.0),
)
def test_any_noiseless_rising_table_is_recovered_at_its_knots(alpha, increments, base):
    truth = dict(zip(KNOTS, base + np.cumsum(increments), strict=True))
    seconds = alpha * CONTEXT + np.array([truth[n] for n in ROWS.tolist()])
    time = fit_table(Shapes(ROWS, CONTEXT, np.ones_like(ROWS), seconds))
    for (rows, context), wanted in zip(SHAPES, seconds, strict=True):
        assert time(rows, context) == pytest.approx(wanted, rel=1e-3)


@given(
    alpha=st.floats(1e-6, 1e-4),
    gamma=st.floats(1e-5, 1e-3),
    delta=st.floats(1e-3, 0.1),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_noisy_line_is_recovered_within_a_few_times_the_noise(alpha, gamma, delta, seed):
    noise = np.random.default_rng(seed).normal(0.0, 0.02, len(SHAPES))
    truth = alpha * CONTEXT + gamma * ROWS + delta
    shapes = Shapes(ROWS, CONTEXT, np.ones_like(ROWS), truth * np.exp(noise))
    time = fit_line(shapes)
    fitted = np.array([time(n, c) for n, c in SHAPES])
    assert np.abs(fitted / truth - 1.0).max() < 0.1
    assert HeldOut.of(left_out(shapes, fit_line)).median < 0.08


@given(st.lists(st.floats(1e-4, 1.0), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_whatever_was_measured_times_are_above_zero_and_rise_with_rows_and_context(seconds):
    shapes = Shapes(ROWS, CONTEXT, np.ones_like(ROWS), np.array(seconds))
    for time in [fit(shapes) for fit in (fit_line, fit_quadratic, fit_piecewise, fit_table)]:
        at = [time(n, 100) for n in range(1, 65)]
        assert at[0] >= 0
        assert all(b >= a - 1e-12 for a, b in itertools.pairwise(at))
        assert time(4, 200) >= time(4, 100)
