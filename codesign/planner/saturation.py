"""Whether a plan bears the load: the verdict on the queue of a simulated run.

Names as in BLIS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from codesign.records import RequestRecord

STABLE, BACKLOGGED, OVERLOADED = "stable", "backlogged", "overloaded"
VERDICTS = (STABLE, BACKLOGGED, OVERLOADED)  # from good to bad

_MAX_LONG_WAITS = 0.05  # share of requests that may wait longer than they run, if stable
_FAST = 0.05  # share of requests that are the fast ones
_SLOW = 5.0  # times the fast requests' seconds per token
_MAX_LEFT = 0.05  # work left at the last arrival, in shares of the trace's length


def saturation(requests: Sequence[RequestRecord]) -> str:
    """The verdict on one run.

    "overloaded": requests came faster than they could be served, so that the queue grew for as long
    as they came: at the end new requests waited for over 5 % of the length of the trace, and longer
    than those of its middle. Served for longer, they would wait for longer. "backlogged": over 5 %
    of the requests waited for longer than a request runs, but the queue went away. Else "stable".

    Args:
        requests: All of a run; what was not admitted waits for ever.
    """
    if len(requests) == 0:
        return STABLE
    ordered = sorted(requests, key=lambda r: (r.arrival, r.request_id))
    arrival = np.array([r.arrival for r in ordered])
    admitted = _times([r.admitted for r in ordered])
    finish = _times([r.finish for r in ordered])
    if not np.isfinite(finish).all():
        return OVERLOADED
    stalled = _stalled(ordered, finish)
    wait = admitted - arrival + stalled
    ran = finish - admitted - stalled
    length = float(arrival[-1] - arrival[0])
    num = len(wait)
    middle = np.median(wait[2 * num // 5 : 3 * num // 5 + 1])
    last = np.median(wait[-max(num // 5, 1) :])
    served = float(np.median(ran))
    if last > max(_MAX_LEFT * length, served) and last > middle:
        return OVERLOADED
    return BACKLOGGED if float((wait > served).mean()) > _MAX_LONG_WAITS else STABLE


def _stalled(requests: Sequence[RequestRecord], finish: np.ndarray) -> np.ndarray:
    """Seconds after its first token in which a request had no place, as far as its pace shows.

    A prompt pool hands over more than can be decoded, and evicted requests wait again. What is
    slower than five times the pace of the fastest twentieth is no batch, but a queue.
    """
    decoding = finish - _times([r.first_token for r in requests])
    tokens = np.array([r.output_tokens - 1 for r in requests], np.float64)
    if not (tokens > 0).any():
        return np.zeros_like(finish)
    pace = np.quantile(decoding[tokens > 0] / tokens[tokens > 0], _FAST)
    return np.maximum(decoding - _SLOW * pace * tokens, 0.0)


def worst(verdicts: Iterable[str]) -> str:
    """The worst of several runs' verdicts."""
    return max(verdicts, key=VERDICTS.index, default=STABLE)


def _times(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.inf if value is None else value for value in values], np.float64)
