"""A rough score for every candidate, so that only the promising ones are simulated on the trace.

How a policy behaves is found once per policy (codesign.planner.behaviour); what that takes on each
deployment at each batch limit is arithmetic, for all candidates at once. The trace is cut into
stretches, each served as if its rate went on for ever, with what is left over waiting for the next
one. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.candidate import Candidate
from codesign.config import SLO, Deployment, Serving
from codesign.planner.behaviour import Behaviour, chain_behaviour, observe_all, token_shares
from codesign.planner.round_times import BehaviourTable, round_seconds
from codesign.planner.workload import Workload, cached_share
from codesign.policy.cost import RoundCost
from codesign.policy.speculation import SpeculationSpec

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]

_TREES = ((2, 1, 1), (3, 1, 2), (4, 1, 3), (8, 2, 4), (16, 2, 6), (16, 2, 8))  # rows x width x E
_FULL = 0.98  # load at which the queue's wait is capped
_TPOT_SPREAD = 0.12  # of ln TPOT between requests: smooths the share that meets a target
_TTFT_SPREAD = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Screened:
    """Rough scores of N candidates, in their order.

    Attributes:
        candidates: What they are about.
        load: (N,) demand over capacity of the whole trace; above 1 the queue grows without end.
        tpot: (N,) mean seconds per token.
        latency: (N,) mean seconds from arrival to last token.
        attained: (N,) share of requests that meet the SLO.
        goodput: (N,) requests per second that do.
    """

    candidates: Sequence[Candidate]
    load: Floats
    tpot: Floats
    latency: Floats
    attained: Floats
    goodput: Floats


def screen(
    candidates: Sequence[Candidate],
    requests: pd.DataFrame,
    fit: Fit,
    *,
    slo: SLO,
    serving: Serving,
    behaviours: Mapping[SpeculationSpec, tuple[Behaviour, ...]] | None = None,
    progress: Progress | None = None,
) -> Screened:
    """Score all candidates.

    Args:
        candidates: The search space.
        requests: Prepared trace.
        fit: Step times and acceptance; holds every candidate's deployment.
        slo: Targets.
        serving: Memory limit and prefix cache.
        behaviours: Of each policy; found here if None.
        progress: Called with ("screen", done, total).
    """
    if behaviours is None:
        specs = list(dict.fromkeys(c.speculation for c in candidates))
        behaviours = behaviours_of(specs, fit, token_shares(requests, fit.acceptance))
    groups: dict[Deployment, list[int]] = {}
    for index, candidate in enumerate(candidates):
        groups.setdefault(candidate.deployment, []).append(index)
    workloads: dict[int, Workload] = {}
    columns = np.empty((5, len(candidates)))
    done = 0
    for deployment, indices in groups.items():
        replicas = deployment.replicas
        if replicas not in workloads:
            hits = cached_share(requests, replicas) if serving.prefix_cache else 0.0
            workloads[replicas] = Workload.of(requests, cached_share=hits)
        part = _Part.of(deployment, [candidates[i] for i in indices], fit, serving)
        columns[:, indices] = part.score(workloads[replicas], behaviours, slo)
        done += len(indices)
        if progress:
            progress("screen", done, len(candidates))
    return Screened(candidates, *columns)


def behaviours_of(
    specs: Sequence[SpeculationSpec], fit: Fit, shares: Mapping[str, float]
) -> dict[SpeculationSpec, tuple[Behaviour, ...]]:
    """Per policy what it may do in a round; one that adapts to the batch takes the best of several.

    A policy whose length follows predicted goodput is at least as good as the best fixed length at
    each batch size, no drafting included.
    """
    shapes = {spec: _shapes_of(spec) for spec in specs if spec.kind == "batch-tree"}
    alone = [spec for spec in specs if not spec.needs_step_times]
    observed = observe_all(
        list(dict.fromkeys([*alone, *(s for each in shapes.values() for s in each)])), fit, shares
    )
    found: dict[SpeculationSpec, tuple[Behaviour, ...]] = {}
    for spec in specs:
        if spec in shapes:
            found[spec] = tuple(observed[shape] for shape in shapes[spec])
        elif spec in observed:
            found[spec] = (observed[spec],)
        else:
            lengths = range(spec.max_depth + 1)
            found[spec] = tuple(chain_behaviour(n, fit.acceptance, shares) for n in lengths)
    return found


def _shapes_of(spec: SpeculationSpec) -> list[SpeculationSpec]:
    """Trees of one shape that stand for one that adapts, no draft included."""
    return [
        SpeculationSpec(),
        *[
            SpeculationSpec(
                kind="tree", is_async=spec.is_async, rows=rows, width=width, expansions=expansions
            )
            for rows, width, expansions in _TREES
            if rows <= spec.rows and width <= spec.width and expansions <= spec.expansions
        ],
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Candidates of one deployment.

    Attributes:
        specs: Policies.
        spec: (N,) index of each candidate's policy.
        limit: (N,) most requests at once on a replica.
        room: (N,) KV rows of a replica.
    """

    deployment: Deployment
    cost: RoundCost
    prompts: RoundCost
    specs: Sequence[SpeculationSpec]
    spec: NDArray[np.int64]
    limit: Floats
    room: Floats

    @classmethod
    def of(
        cls, deployment: Deployment, candidates: Sequence[Candidate], fit: Fit, serving: Serving
    ) -> _Part:
        cost = fit.costs[deployment.unit.label]
        pool = deployment.prefill_workers
        numbers: dict[SpeculationSpec, int] = {}
        spec = [numbers.setdefault(c.speculation, len(numbers)) for c in candidates]
        rooms = [cost.kv_room(serving.max_kv_tokens, has_draft=drafts) for drafts in (False, True)]
        rooms = [np.inf if room is None else room for room in rooms]
        return cls(
            deployment,
            cost,
            fit.costs[str(pool)] if pool else cost,
            list(numbers),
            np.array(spec),
            np.array([c.max_batch for c in candidates], np.float64),
            np.array([rooms[c.speculation.has_draft] for c in candidates], np.float64),
        )

    def score(
        self,
        workload: Workload,
        behaviours: Mapping[SpeculationSpec, tuple[Behaviour, ...]],
        slo: SLO,
    ) -> Floats:
        """(5, N) rows: load, tpot, latency, attained, goodput."""
        grid = _batch_grid(self._most(workload).max())
        options = [behaviours[spec] for spec in self.specs]
        table = BehaviourTable.of([behaviour for each in options for behaviour in each])
        seconds = round_seconds(
            table,
            self.cost,
            batch=grid,
            context=workload.context,
            is_apart=self.deployment.draft_workers > 0,
        )
        firsts = np.cumsum([0, *map(len, options)])[:-1]
        times = np.minimum.reduceat(seconds / table.emitted[:, None], firsts, axis=0)
        queue = _Queue(grid, times[self.spec], self._most(workload), *self._prefill(workload))
        return queue.serve(workload, self.deployment.replicas, slo)

    def _most(self, workload: Workload) -> Floats:
        """(N,) most requests that can run at once on a replica."""
        most = np.minimum(self.limit, max(workload.num_requests / self.deployment.replicas, 1.0))
        return np.minimum(most, np.maximum(self.room / workload.context, 1.0))

    def _prefill(self, workload: Workload) -> tuple[Floats, Floats]:
        """(N, Q) seconds of a prompt: on the decoding workers, and in the pool."""
        prompts = workload.prompts
        target = self.prompts.prefill.of_arrays(prompts, 0.0)
        draft = self.cost.draft_prefill.of_arrays(prompts, 0.0)
        drafts = np.array([spec.kind != "plain" for spec in self.specs])[self.spec][:, None]
        if self.deployment.prefill_workers:
            pool = target + self.cost.kv_transfer * prompts
            return drafts * draft, np.broadcast_to(pool, (len(self.spec), len(prompts)))
        if self.deployment.draft_workers:
            own = np.maximum(target, drafts * draft)
        else:
            own = target + drafts * draft
        return own, np.zeros_like(own)


def _batch_grid(most: float) -> Floats:
    """Batch sizes at which rounds are priced."""
    sizes = [1.0]
    while sizes[-1] < most:
        sizes.append(min(np.ceil(sizes[-1] * 1.4), most))
    return np.array(sizes)


class _Queue:
    """N candidates of one deployment that serve a trace.

    Args:
        grid: (B,) batch sizes.
        times: (N, B) seconds per token of a request, at each batch size.
        most: (N,) most requests at once.
        prefill: (N, Q) seconds of a prompt on the workers that decode.
        pool: (N, Q) seconds of a prompt in a pool of its own; 0 without one.
    """

    def __init__(
        self, grid: Floats, times: Floats, most: Floats, prefill: Floats, pool: Floats
    ) -> None:
        self._grid, self._times, self._most = grid, times, most
        self._prefill, self._pool = prefill, pool
        self._own = prefill.mean(axis=1)
        self._apart = pool.mean(axis=1)

    def serve(self, workload: Workload, replicas: int, slo: SLO) -> Floats:
        """(5, N) rows: load, tpot, latency, attained, goodput."""
        tokens = max(workload.output - 1.0, 1e-9)
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
        tokens = max(workload.output - 1.0, 1e-9)
        decoding = np.maximum(1.0 - rate * self._own, 0.02)  # share of time left by prefills
        batch = self._batch_at(rate, tokens)
        tpot = _at(self._grid, self._times, batch) / decoding
        busy = np.minimum(rate / full, _FULL)
        # Taking turns evens out the gaps that each replica sees.
        variation = (workload.variation / replicas + workload.output_variation) / 2
        service = self._own + tokens * tpot
        slot = service / self._most * busy ** (np.sqrt(2 * (self._most + 1)) - 1) / (1 - busy)
        slot = slot * variation + backlog
        wait = tpot / 2
        for seconds, load in ((self._own, rate), (self._apart, rate * replicas)):
            used = np.minimum(load * seconds, _FULL)
            wait = wait + used / (1 - used) * seconds / 2
        if self._apart.any():  # the first token comes from the pool, before a slot is free
            tpot = tpot + slot / tokens
        else:
            wait = wait + slot
        first = wait[:, None] + self._prefill + self._pool
        attained = np.ones_like(wait)
        if slo.ttft is not None:
            attained = _share_below(first, slo.ttft, _TTFT_SPREAD).mean(axis=1)
        if slo.tpot is not None:
            attained = attained * _share_below(tpot, slo.tpot, _TPOT_SPREAD)
        return np.stack([first.mean(axis=1) + tokens * tpot, tpot, attained])

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


def _share_below(values: Floats, limit: float, spread: float) -> Floats:
    """Share below a limit of logistic values around the given ones."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + (values / limit) ** (1.0 / spread * 1.7))
