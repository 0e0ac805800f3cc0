"""Whether a plan bears the load: the verdict on the queue of a simulated run.

Names as in BLIS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from codesign.records import RequestRecord

STABLE, BACKLOGGED, OVERLOADED = "stable", "backlogged", "overloaded"
VERDICTS = (STABLE, BACKLOGGED, OVERLOADED)  # from good to bad

AT_ONCE = 0.02  # of a request's run: a trace as short has no rate that could be too high
_MAX_LONG_WAITS = 0.05  # share of requests that may wait longer than they run, if stable
_MAX_LEFT = 0.05  # work left at the last arrival, in shares of the trace's length


def saturation(
    requests: Sequence[RequestRecord], queued: Mapping[int, float] = MappingProxyType({})
) -> str:
    """The verdict on one run.

    "overloaded": requests came faster than they could be served, so that the queue grew for as long
    as they came: at the end new requests waited for over 5 % of the length of the trace, and longer
    than those of its middle. Served for longer, they would wait for longer. "backlogged": over 5 %
    of the requests waited for longer than a request runs, but the queue went away, or all came at
    once, within a fiftieth of a request's run. Else "stable".

    Args:
        requests: All of a run; what has not finished waits for ever.
        queued: Seconds that each waited, by number (``RunRecords.queued``); of others, those until
            they were admitted.
    """
    if len(requests) == 0:
        return STABLE
    ordered = sorted(requests, key=lambda r: (r.arrival, r.request_id))
    arrival = np.array([r.arrival for r in ordered])
    finish = np.array([math.inf if r.finish is None else r.finish for r in ordered])
    if not np.isfinite(finish).all():
        return OVERLOADED
    wait = np.array([queued.get(r.request_id, (r.admitted or 0.0) - r.arrival) for r in ordered])
    served = float(np.median(finish - arrival - wait))
    length = float(arrival[-1] - arrival[0])
    num = len(wait)
    middle = np.median(wait[2 * num // 5 : 3 * num // 5 + 1])
    last = np.median(wait[-max(num // 5, 1) :])
    if length > AT_ONCE * served and last > max(_MAX_LEFT * length, served) and last > middle:
        return OVERLOADED
    return BACKLOGGED if float((wait > served).mean()) > _MAX_LONG_WAITS else STABLE


def worst(verdicts: Iterable[str]) -> str:
    """The worst of several runs' verdicts."""
    return max(verdicts, key=VERDICTS.index, default=STABLE)
