"""A queue in closed form: what waits, runs and meets its targets when a trace is served.

For many candidates at once, from their seconds per token at a grid of batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from codesign.config import SLO
from codesign.planner.workload import Workload

Floats = NDArray[np.float64]

_FULL = 0.98  # load at which the queue's wait is capped
_TPOT_SPREAD = 0.12  # of ln TPOT between requests: smooths the share that meets a target
_TTFT_SPREAD = 0.5


def batch_grid(most: float) -> Floats:
    """Batch sizes at which rounds are priced."""
    sizes = [1.0]
    while sizes[-1] < most:
        sizes.append(min(np.ceil(sizes[-1] * 1.4), most))
    return np.array(sizes)


class Queue:
    """N candidates of one deployment that serve a trace.

    Args:
        grid: (B,) batch sizes.
        times: (N, B) seconds per token of all requests together, at each batch size.
        tpots: (N, B) the same on average over requests.
        most: (N,) most requests at once.
        prefill: (N, Q) seconds of a prompt on the workers that decode.
        pool: (N, Q) seconds of a prompt in a pool of its own; 0 without one.
        late: (N, Q) seconds of ``prefill`` that come behind the first token.
    """

    def __init__(
        self,
        grid: Floats,
        times: Floats,
        tpots: Floats,
        most: Floats,
        prefill: Floats,
        pool: Floats,
        late: Floats,
    ) -> None:
        self._grid, self._times, self._tpots, self._most = grid, times, tpots, most
        self._pool, self._first = pool, prefill - late + pool
        self._late = late.mean(axis=1)
        self._own = prefill.mean(axis=1)
        self._apart = pool.mean(axis=1)

    def serve(self, workload: Workload, replicas: int, slo: SLO) -> Floats:
        """(5, N) rows: load, tpot, latency, attained, goodput.

        Args:
            workload: The trace, Q requests that stand for it.
            replicas: That share it.
            slo: Targets.

        Returns:
            As in ``screen.Screened``: shares, seconds, and requests per second.
        """
        tokens = workload.decoded
        # A full batch finishes a request in each ``own + tokens * time / batch`` seconds.
        rates = 1.0 / (self._own[:, None] + tokens * self._times / self._grid)
        full = _at(self._grid, rates, self._most)
        full = np.minimum(full, 1.0 / np.maximum(replicas * self._apart, 1e-12))
        stretch = workload.duration / len(workload.arrivals)
        num = workload.num_requests
        left = np.zeros_like(full)
        sums = np.zeros((3, len(full)))
        for arrivals in workload.arrivals:
            demand = arrivals / replicas + left
            served = np.minimum(demand, full * stretch)
            before, left = left, demand - served
            rate = np.minimum(demand / stretch, full)
            backlog = (before + left) / 2 / full
            sums += arrivals / num * self._stretch(workload, rate, full, backlog, slo, replicas)
        latency, tpot, attained = sums
        last = _at(self._grid, self._times, np.minimum(self._most, np.maximum(left, 1.0)))
        drain = left / full + self._own + workload.last_output * last
        goodput = num * attained / (workload.duration + drain)
        load = num / replicas / workload.duration / full
        return np.stack([load, tpot, latency, attained, goodput])

    def _stretch(
        self,
        workload: Workload,
        rate: Floats,
        full: Floats,
        backlog: Floats,
        slo: SLO,
        replicas: int,
    ) -> Floats:
        """(3, N) mean latency, mean time per token, share within the SLO, at a steady rate.

        Source:
            Wait in a queue with c servers: Sakasegawa, "An approximation formula
            L = a * rho^b / (1 - rho)", 1977, with the usual factor for variable gaps and lengths.
        """
        tokens = workload.decoded
        decoding = np.maximum(1.0 - rate * self._own, 0.02)  # share of time left by prefills
        batch = self._batch_at(rate, tokens)
        token = _at(self._grid, self._times, batch) / decoding
        busy = np.minimum(rate / full, _FULL)
        # Taking turns evens out the gaps that each replica sees.
        variation = (workload.variation / replicas + workload.output_variation) / 2
        service = self._own + tokens * token
        slot = service / self._most * busy ** (np.sqrt(2 * (self._most + 1)) - 1) / (1 - busy)
        slot = slot * variation + backlog
        # Of the first token, where a round is under way, and of the second besides.
        wait, behind = token / 2 * np.minimum(rate * service, 1.0), self._late
        for seconds, load in ((self._own, rate), (self._apart, rate * replicas)):
            used = np.minimum(load * seconds, _FULL)
            wait = wait + used / (1 - used) * seconds / 2
        if self._apart.any():  # the first token comes from the pool, before a slot is free
            behind = behind + slot
        else:
            wait = wait + slot
        first = wait[:, None] + self._first
        tpot = _at(self._grid, self._tpots, batch) / decoding + behind * workload.per_decoded
        attained = np.ones_like(wait)
        if slo.ttft is not None:
            attained = _share_below(first, slo.ttft, _TTFT_SPREAD).mean(axis=1)
        attained = attained * _tpot_share(tpot, slo.tpot, workload.own_targets)
        return np.stack([first.mean(axis=1) + behind + tokens * token, tpot, attained])

    def _batch_at(self, rate: Floats, tokens: float) -> Floats:
        """(N,) requests that run when requests finish at a rate: Little's law, turned round."""
        decoding = np.maximum(1.0 - rate * self._own, 0.02)
        # Requests per second that a batch would finish, against those asked for.
        reached = self._grid / (tokens * self._times) * decoding[:, None]
        right = np.clip((reached < rate[:, None]).sum(axis=1), 1, max(len(self._grid) - 1, 1))
        if len(self._grid) == 1:
            return np.ones_like(rate)
        rows = np.arange(len(rate))
        low, high = reached[rows, right - 1], reached[rows, right]
        share = np.clip((rate - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
        batch = self._grid[right - 1] + share * (self._grid[right] - self._grid[right - 1])
        return np.minimum(batch, self._most)


def _at(grid: Floats, values: Floats, size: Floats) -> Floats:
    """(N,) values of each row at a batch size, linear between those of the grid."""
    if len(grid) == 1:
        return values[:, 0]
    right = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    rows = np.arange(len(values))
    share = (size - grid[right - 1]) / (grid[right] - grid[right - 1])
    return values[rows, right - 1] * (1 - share) + values[rows, right] * share


def _tpot_share(tpot: Floats, common: float | None, own: Sequence[tuple[float, float]]) -> Floats:
    """(N,) share of requests whose TPOT is in time: some by targets of their own."""
    rest = 1.0 - sum(share for _, share in own)
    in_time = rest * (
        np.ones_like(tpot) if common is None else _share_below(tpot, common, _TPOT_SPREAD)
    )
    for target, share in own:
        in_time = in_time + share * _share_below(tpot, target, _TPOT_SPREAD)
    return in_time


def _share_below(values: Floats, limit: float, spread: float) -> Floats:
    """Share below a limit of logistic values around the given ones."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + (values / limit) ** (1.0 / spread * 1.7))
