"""When the requests of a synthetic trace arrive: independent gaps, bursts, or ticks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from codesign.errors import InputError, counted
from codesign.traces.presets import Preset

Floats = NDArray[np.float64]

_GAP_LEVELS = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 100)

# Azure coding, gaps in seconds. Silence: the 45 gaps above 10 s (69.2 % of the hour), over their
# mean; second: the share of its mean square in its squared mean. Bursts: seconds with more than
# 30 requests come from a few runs in which 70 % of the gaps are within a batch.
_SILENCE = (0.192, 0.261, 0.328, 0.437, 0.532, 0.729, 0.786, 0.955, 1.501, 2.51, 4.111)
_SILENCE_LEVELS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
_SILENT_SHARE, _SILENCE_SPREAD = 0.692, 1.857
_IN_BATCH = (
    *(0.000006, 0.000035, 0.000066, 0.000128, 0.000219, 0.000816, 0.001007, 0.001239, 0.001934),
    *(0.002622, 0.003568, 0.00416, 0.004612, 0.004782, 0.004915, 0.004998),
)
_BETWEEN_BATCHES = (
    *(0.005023, 0.007578, 0.018975, 0.050437, 0.08518, 0.095181, 0.098847, 0.102215, 0.15944),
    *(0.200792, 0.311556, 0.499272, 0.836134, 1.707204, 2.700246, 8.406083),
)
_IN_BATCH_SHARE = 0.345
_BURST_PEAK, _BURST_REQUESTS, _BURST_SHARE, _BURST_IN_BATCH = 67, 107, 0.08, 0.7
_BURST_STEP = (1 / _BURST_PEAK - _BURST_IN_BATCH * 0.0014) / (1 - _BURST_IN_BATCH)

_LEAST_CV, _LEAST_SUM = 1e-6, 1e-200  # of the gamma distribution; beyond, numbers run out
MOST_CV = 1e4  # 100 million gaps have no more, with all the time in one of them
_FEWEST_BURSTY = 100  # gaps; with fewer, few draws of silence decide whether a cv can be reached

TICK = 3.0  # seconds between time stamps of Mooncake


def reachable_cv(preset: Preset, num_requests: int) -> float | None:
    """Return the published cv, or half of the largest that so few requests can have."""
    if preset.cv is None or preset.arrivals == "renewal":
        return preset.cv
    return min(preset.cv, max(1.0, 0.5 * math.sqrt(num_requests - 1)))


def draw_arrivals(
    preset: Preset, num_requests: int, rate: float, cv: float | None, rng: np.random.Generator
) -> Floats:
    """Return the time of each request's arrival in seconds, in order; the first is 0 or a tick.

    Raises:
        InputError: If the cv cannot be reached, or is given where ticks decide it.
    """
    if preset.arrivals == "ticks":
        if cv is not None:
            raise InputError("the low preset has ticks of 3 s, which decide its cv. Fix: no --cv")
        return _ticks(num_requests, rate, rng)
    if cv is None or not 0 < cv <= MOST_CV:
        raise InputError(f"the cv must be above 0, at most {MOST_CV:,.0f}, not {cv}")
    if num_requests == 1:
        return np.zeros(1)
    num_gaps = num_requests - 1
    if preset.arrivals == "bursts" and num_gaps >= _FEWEST_BURSTY:
        gaps = _burst_gaps(num_gaps, rate, cv, rng)
    else:
        # A gamma renewal process: shape 1 / cv^2, then the mean that was asked for.
        gaps = rng.standard_gamma(1 / max(cv, _LEAST_CV) ** 2, num_gaps)
        if gaps.sum() < _LEAST_SUM:
            raise InputError(
                f"{counted(num_requests, 'request')} cannot have a cv of {cv:g}. "
                "Fix: more requests, or less"
            )
        gaps *= num_gaps / rate / gaps.sum()
    return np.concatenate([[0.0], np.cumsum(gaps)])


def _burst_gaps(num_gaps: int, rate: float, cv: float, rng: np.random.Generator) -> Floats:
    """Return gaps of silence, calm traffic and bursts with exactly this rate and cv.

    The number of silences follows from cv: with a share f of the time in K silences whose mean
    square is s squared means, the n gaps have cv^2 + 1 = f^2 s n / K. Then silence is scaled by x
    and traffic by y: two unknowns for the two equations of the sum and the sum of squares.
    """
    share = _SILENT_SHARE**2 * _SILENCE_SPREAD
    num_silences = min(max(1, round(share * num_gaps / (cv**2 + 1))), num_gaps)
    silence = stratified(_SILENCE_LEVELS, _SILENCE, num_silences, rng)
    blocks = _active_blocks(num_gaps - num_silences, rng)
    active = np.concatenate(blocks) if blocks else np.zeros(0)
    x, y = _match_moments(silence, active, total=num_gaps / rate, mean_square=cv**2 + 1)
    pieces = [np.array([x * gap]) for gap in silence] + [y * block for block in blocks]
    return np.concatenate([pieces[at] for at in rng.permutation(len(pieces))])


def _active_blocks(num_gaps: int, rng: np.random.Generator) -> list[Floats]:
    """Return calm gaps one by one and each burst as one block, seconds."""
    num_bursts = round(_BURST_SHARE * num_gaps / _BURST_REQUESTS)
    if num_gaps >= 4 * _BURST_REQUESTS:
        num_bursts = max(1, num_bursts)
    bursts = []
    for _ in range(num_bursts):
        in_batch = rng.random(_BURST_REQUESTS) < _BURST_IN_BATCH
        within = stratified(_GAP_LEVELS, _IN_BATCH, _BURST_REQUESTS, rng)
        bursts.append(np.where(in_batch, within, _BURST_STEP))
    num_calm = num_gaps - num_bursts * _BURST_REQUESTS
    num_in_bursts = num_bursts * _BURST_REQUESTS * _BURST_IN_BATCH
    num_close = min(max(0, round(_IN_BATCH_SHARE * num_gaps - num_in_bursts)), num_calm)
    close = stratified(_GAP_LEVELS, _IN_BATCH, num_close, rng)
    apart = stratified(_GAP_LEVELS, _BETWEEN_BATCHES, num_calm - num_close, rng)
    return [*bursts, *np.concatenate([close, apart]).reshape(-1, 1)]


def _match_moments(
    silence: Floats, active: Floats, *, total: float, mean_square: float
) -> tuple[float, float]:
    """Return the scales of silence and active gaps for a total and E[gap^2] / E[gap]^2."""
    num_gaps = len(silence) + len(active)
    s1, s2 = silence.sum(), (silence**2).sum()
    a1, a2 = active.sum(), (active**2).sum()
    square_sum = mean_square * total**2 / num_gaps
    # x = (total - y a1) / s1 in x^2 s2 + y^2 a2 = square_sum, a quadratic in y.
    a = a2 + a1**2 * s2 / s1**2
    b = -2 * total * a1 * s2 / s1**2
    c = total**2 * s2 / s1**2 - square_sum
    root = b**2 - 4 * a * c
    y = (-b - math.sqrt(root)) / (2 * a) if root >= 0 and a > 0 else -1.0
    if y <= 0 or total - y * a1 <= 0:
        raise InputError(
            f"{num_gaps + 1} bursty requests cannot have a cv of {math.sqrt(mean_square - 1):.3g}. "
            "Fix: more requests, or another cv (13.15 is published)"
        )
    return (total - y * a1) / s1, y


def _ticks(num_requests: int, rate: float, rng: np.random.Generator) -> Floats:
    """Return time stamps in ticks; arrivals inside the span are uniform, as measured (the
    variance of the requests in a tick is 1.10 times their mean).
    """
    num_ticks = max(1, round(num_requests / rate / TICK))
    return np.sort(np.floor(rng.random(num_requests) * num_ticks)) * TICK


def stratified(
    levels: tuple[float, ...], quantiles: tuple[float, ...], count: int, rng: np.random.Generator
) -> Floats:
    """Return ``count`` draws, one from each part of the distribution, in random order."""
    chance = (np.arange(count) + rng.random(count)) / max(count, 1)
    return np.interp(100 * rng.permutation(chance), levels, quantiles)
