"""Synthetic twins of published traces: the same statistics, nobody's data, any length.

The numbers below are statistics of the published files (quantiles of lengths and gaps, rates,
prefix hit rate), measured once. Quantiles are sampled stratified: n requests take one draw from
each n-th of the distribution, in random order, so that even ten minutes show the tails in
proportion. Prompt and output lengths are drawn independently (their log correlation in the
published files is -0.00, 0.09 and 0.05). Every stream of random numbers has its own seed.

Sources: Azure LLM inference traces 2023 (CC-BY-4.0; Splitwise, ISCA 2024); Mooncake traces
(Apache-2.0; FAST 2025, arXiv:2407.00079).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from codesign.errors import InputError
from codesign.traces import CATEGORIES, Trace, csv_text, draw_names
from codesign.traces.catalog import TWINS, find_twin
from codesign.traces.checks import BLOCK_TOKENS

Floats = NDArray[np.float64]

_DURATION = 600.0  # seconds
_MOST_REQUESTS = 100_000_000  # some GB of memory

# Levels, in percent, of the length quantiles below.
_LEVELS = (
    *(0, 1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95),
    *(98, 99, 99.5, 99.9, 100),
)
_GAP_LEVELS = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 100)


@dataclass(frozen=True, slots=True)
class Preset:
    """Statistics of one published trace.

    Attributes:
        about: What the twin imitates.
        arrivals: ``renewal``: independent gaps; ``bursts``: silence, calm and bursts; ``ticks``:
            time stamps in steps of 3 s.
        rate: Requests a second.
        cv: Standard deviation over mean of the gaps; None where ticks decide it.
        prompt: Quantiles of prompt tokens at ``_LEVELS``.
        output: Quantiles of output tokens at ``_LEVELS``.
        weights: Weight of each of ``CATEGORIES``. An assumption: the traces do not say.
        prefix_hit_rate: Share of prompt blocks seen before; None for no hash_ids.
    """

    about: str
    arrivals: Literal["renewal", "bursts", "ticks"]
    rate: float
    cv: float | None
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    weights: tuple[float, ...]
    prefix_hit_rate: float | None = None


PRESETS = {
    "steady": Preset(
        "Azure 2023 conversation",
        "renewal",
        5.53,
        1.09,
        (
            *(2, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130),
            *(1189, 1315, 1877, 2735, 4083, 4098, 4142, 4831, 6212, 14050),
        ),
        (
            *(7, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400),
            *(411, 424, 451, 540, 601, 644, 954, 1000),
        ),
        (0.5, 0.1, 0.1, 0.1, 0.1, 0.1),
    ),
    "bursty": Preset(
        "Azure 2023 coding",
        "bursts",
        2.57,
        13.15,
        (
            *(3, 17, 75, 147, 232, 385, 578, 770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433),
            *(2745, 3193, 3923, 5194, 7315, 7436, 7436, 7436, 7437, 7437),
        ),
        (
            *(6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 172),
            *(252, 361, 831, 1899),
        ),
        (0.05, 0.9, 0.05, 0.0, 0.0, 0.0),
    ),
    "low": Preset(
        "Mooncake conversation at a third of its rate",
        "ticks",
        3.4012 / 3,
        None,
        (
            *(891, 894, 901, 964, 1261, 1662, 2306, 3263, 4250, 4993, 5870, 6909, 8187, 9570),
            *(11239, 13196, 15368, 17869, 21467, 27367, 39552, 66484, 85401, 100886, 121301),
            126195,
        ),
        (
            *(1, 3, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504),
            *(543, 597, 698, 893, 1120, 1570, 2000, 2000),
        ),
        (0.4, 0.05, 0.05, 0.05, 0.25, 0.2),
        0.3664,
    ),
}

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
_FEWEST_BURSTY = 100  # gaps; with fewer, few draws of silence decide whether a cv can be reached

# Mooncake: time stamps come in ticks. Of the requests that find more than the common first block
# in the cache, the share of their blocks that they find.
_TICK = 3.0
_FOUND = (0.015, 0.143, 0.286, 0.5, 0.6, 0.7, 0.8, 0.867, 0.917, 0.944, 0.971, 0.983, 1.0)
_FOUND_LEVELS = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 100)


def synthesise(
    preset: str,
    *,
    num_requests: int | None = None,
    duration: float | None = None,
    rate: float | None = None,
    cv: float | None = None,
    seed: int = 1,
) -> Trace:
    """Return a synthetic trace; with the defaults, the bundled twin of the preset.

    Args:
        preset: ``steady``, ``bursty`` or ``low``, or the name of its twin.
        num_requests: Requests; the default follows from duration and rate.
        duration: Seconds; 600 if ``num_requests`` is not given either.
        rate: Requests a second, the preset's if None. Bursts become denser with it.
        cv: Standard deviation over mean of the gaps; None for the preset's, or less, with a note,
            where so few requests cannot reach it.
        seed: Of all random numbers; the same seed gives the same bytes.

    Raises:
        InputError: If a value is out of range, both sizes are given, or cv cannot be reached.
    """
    twin = find_twin(preset)
    if twin is None:
        raise InputError(f"no preset '{preset}'. Fix: one of {', '.join(PRESETS)}")
    name = TWINS[twin]
    known = PRESETS[name]
    rate = known.rate if rate is None else rate
    num_requests = _num_requests(num_requests, duration, rate)
    streams = [np.random.default_rng([seed, number]) for number in range(5)]
    reachable = _default_cv(known, num_requests) if cv is None else cv
    arrival = _arrivals(known, num_requests, rate, reachable, streams[0])
    requests = pd.DataFrame(
        {
            "arrival": np.round(arrival - arrival[0], 6),
            "prompt_tokens": _tokens(known.prompt, num_requests, streams[1]),
            "output_tokens": _tokens(known.output, num_requests, streams[2]),
            "category": draw_names(CATEGORIES, known.weights, num_requests, streams[3]),
        }
    )
    notes = [f"synthetic, seed {seed}: statistics of {known.about}, no request of it"]
    if cv is None and reachable != known.cv:
        notes.append(f"too few requests for the published cv {known.cv:g}: about {reachable:.3g}")
    notes.append("categories are an assumption, the published trace has none")
    if known.prefix_hit_rate is not None:
        prompt = requests["prompt_tokens"].to_numpy()
        requests["hash_ids"] = _prefix_blocks(prompt, known.prefix_hit_rate, streams[4])
        notes.append(f"time stamps in ticks of {_TICK:g} s, as published")
    trace = Trace(twin, requests, f"synthetic:{name}", tuple(notes), "")
    checksum = hashlib.sha256(csv_text(trace).encode()).hexdigest()
    return Trace(twin, requests, trace.source, trace.notes, checksum)


def _num_requests(num_requests: int | None, duration: float | None, rate: float) -> int:
    if not (rate > 0 and math.isfinite(rate)):
        raise InputError(f"the rate must be a positive number of requests/s, not {rate:g}")
    if num_requests is None:
        seconds = _DURATION if duration is None else duration
        if not (seconds > 0 and math.isfinite(seconds)):
            raise InputError(f"the duration must be a positive number of seconds, not {seconds:g}")
        num_requests = max(1, round(min(rate * seconds, 2 * _MOST_REQUESTS)))
    elif duration is not None:
        raise InputError("give the number of requests or the duration, not both")
    if not 1 <= num_requests <= _MOST_REQUESTS:
        raise InputError(f"a trace has 1 to {_MOST_REQUESTS:,} requests, not {num_requests:,}")
    return num_requests


def _default_cv(preset: Preset, num_requests: int) -> float | None:
    """Return the published cv, or half of the largest that so few requests can have."""
    if preset.cv is None or preset.arrivals == "renewal":
        return preset.cv
    return min(preset.cv, max(1.0, 0.5 * math.sqrt(num_requests - 1)))


def _arrivals(
    preset: Preset, num_requests: int, rate: float, cv: float | None, rng: np.random.Generator
) -> Floats:
    if preset.arrivals == "ticks":
        if cv is not None:
            raise InputError("the low preset has ticks of 3 s, which decide its cv. Fix: no --cv")
        return _ticks(num_requests, rate, rng)
    if cv is None or not (cv > 0 and math.isfinite(cv)):
        raise InputError(f"the cv must be a positive number, not {cv}")
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
                f"{num_requests} requests cannot have a cv of {cv:g}. Fix: more requests, or less"
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
    silence = _stratified(_SILENCE_LEVELS, _SILENCE, num_silences, rng)
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
        within = _stratified(_GAP_LEVELS, _IN_BATCH, _BURST_REQUESTS, rng)
        bursts.append(np.where(in_batch, within, _BURST_STEP))
    num_calm = num_gaps - num_bursts * _BURST_REQUESTS
    num_in_bursts = num_bursts * _BURST_REQUESTS * _BURST_IN_BATCH
    num_close = min(max(0, round(_IN_BATCH_SHARE * num_gaps - num_in_bursts)), num_calm)
    close = _stratified(_GAP_LEVELS, _IN_BATCH, num_close, rng)
    apart = _stratified(_GAP_LEVELS, _BETWEEN_BATCHES, num_calm - num_close, rng)
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
    num_ticks = max(1, round(num_requests / rate / _TICK))
    return np.sort(np.floor(rng.random(num_requests) * num_ticks)) * _TICK


def _tokens(quantiles: tuple[int, ...], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    # Geometric between two quantiles: the upper ones are far apart.
    logs = _stratified(_LEVELS, tuple(np.log(quantiles)), count, rng)
    return np.rint(np.exp(logs)).astype(np.int64)


def _stratified(
    levels: tuple[float, ...], quantiles: tuple[float, ...], count: int, rng: np.random.Generator
) -> Floats:
    """Return ``count`` draws, one from each part of the distribution, in random order."""
    chance = (np.arange(count) + rng.random(count)) / max(count, 1)
    return np.interp(100 * rng.permutation(chance), levels, quantiles)


def _prefix_blocks(
    prompt: NDArray[np.int64], hit_rate: float, rng: np.random.Generator
) -> list[list[int]]:
    """Return hash_ids with this share of blocks seen before.

    All prompts share the first block (a system prompt). A follow-up also continues an earlier
    prompt: the latest one that is long enough for the blocks it is to find.
    """
    num_blocks = -(-prompt // BLOCK_TOKENS)
    found = _stratified(_FOUND_LEVELS, _FOUND, len(prompt), rng)
    wanted = np.clip(np.floor(found * num_blocks), 1, np.maximum(num_blocks - 1, 1)).astype(int)
    follows = _take_until(rng.random(len(prompt)), wanted - 1, hit_rate * num_blocks.sum())
    chains: list[list[int]] = []
    next_id = 0
    for blocks, hits in zip(num_blocks.tolist(), np.where(follows, wanted, 1), strict=True):
        earlier = next((chain for chain in reversed(chains) if len(chain) >= hits), [])
        if not earlier and chains:
            earlier = max(chains, key=len)
        kept = earlier[:hits]
        fresh = range(next_id, next_id + blocks - len(kept))
        chains.append([*kept, *fresh])
        next_id += len(fresh)
    return chains


def _take_until(order: Floats, gains: NDArray[np.int64], target: float) -> NDArray[np.bool_]:
    """Return whom to take, in random order, so that one hit each and the gains reach the target."""
    ranked = np.argsort(order, kind="stable")
    reached = np.cumsum(gains[ranked]) + len(gains)
    taken = np.zeros(len(gains), np.bool_)
    taken[ranked[reached <= target]] = True
    return taken
