"""Synthetic twins of published traces: the same statistics, nobody's data, any length.

Quantiles are sampled stratified: n requests take one draw from each n-th of the distribution, in
random order, so that even ten minutes show the tails in proportion. Prompt and output lengths are
drawn independently (their log correlation in the published files is -0.00, 0.09 and 0.05). Every
stream of random numbers has its own seed.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from codesign.errors import InputError, counted
from codesign.prompts import CATEGORIES
from codesign.traces.arrivals import TICK, Floats, draw_arrivals, reachable_cv, stratified
from codesign.traces.catalog import TWINS, find_twin
from codesign.traces.checks import BLOCK_TOKENS, LONGEST
from codesign.traces.files import csv_text
from codesign.traces.presets import LENGTH_LEVELS, PRESETS
from codesign.traces.trace import Trace, draw_names

_DURATION = 600.0  # seconds
_MOST_REQUESTS = 100_000_000  # some GB of memory

# Mooncake: of the requests that find more than the common first block in the cache, the share of
# their blocks that they find.
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
    reachable = reachable_cv(known, num_requests) if cv is None else cv
    arrival = draw_arrivals(known, num_requests, rate, reachable, streams[0])
    requests = pd.DataFrame(
        {
            "arrival": np.round(arrival - arrival[0], 6),
            "prompt_tokens": _tokens(known.prompt, num_requests, streams[1]),
            "output_tokens": _tokens(known.output, num_requests, streams[2]),
            "category": draw_names(CATEGORIES, known.weights, num_requests, streams[3]),
        }
    )
    notes = [f"synthetic, seed {seed}: the statistics of {known.about}, none of its requests"]
    if cv is None and reachable != known.cv:
        notes.append(f"too few requests for the published cv {known.cv:g}: about {reachable:.3g}")
    notes.append("categories are an assumption, the published trace has none")
    if known.prefix_hit_rate is not None:
        prompt = requests["prompt_tokens"].to_numpy()
        requests["hash_ids"] = _prefix_blocks(prompt, known.prefix_hit_rate, streams[4])
        notes.append(f"time stamps in ticks of {TICK:g} s, as published")
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
    if num_requests > LONGEST * rate:
        raise InputError(
            f"at {rate:g} requests/s {counted(num_requests, 'request')} would last "
            f"{LONGEST:,.0f} s or more. Fix: a larger --rate"
        )
    return num_requests


def _tokens(quantiles: tuple[int, ...], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    # Geometric between two quantiles: the upper ones are far apart.
    logs = stratified(LENGTH_LEVELS, tuple(np.log(quantiles)), count, rng)
    return np.rint(np.exp(logs)).astype(np.int64)


def _prefix_blocks(
    prompt: NDArray[np.int64], hit_rate: float, rng: np.random.Generator
) -> list[list[int]]:
    """Return hash_ids with this share of blocks seen before.

    All prompts share the first block (a system prompt). A follow-up also continues an earlier
    prompt: the latest one that is long enough for the blocks it is to find.
    """
    num_blocks = -(-prompt // BLOCK_TOKENS)
    found = stratified(_FOUND_LEVELS, _FOUND, len(prompt), rng)
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
