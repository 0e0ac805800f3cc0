"""A rough score for every candidate, so that only the promising ones are simulated on the trace.

How a policy behaves is found once per policy (codesign.planner.behaviour); what that takes on each
deployment at each batch limit is arithmetic, for all candidates at once. The trace is cut into
stretches, each served as if its rate went on for ever, with what is left over waiting for the next
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign import Progress
from codesign.candidate import Candidate
from codesign.config import SLO, Deployment, Serving
from codesign.planner.behaviour import (
    Behaviour,
    chain_behaviour,
    observe_all,
    request_shares,
    token_shares,
)
from codesign.planner.queueing import Queue, batch_grid
from codesign.planner.round_times import BehaviourTable, round_seconds
from codesign.planner.workload import Workload, cached_share
from codesign.policy.cost import RoundCost
from codesign.policy.speculation import SpeculationSpec, drafting_of

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

Floats = NDArray[np.float64]

_TREES = ((2, 1, 1), (3, 1, 2), (4, 1, 3), (8, 2, 4), (16, 2, 6), (16, 2, 8))  # rows x width x E


@dataclass(frozen=True, slots=True, eq=False)
class Screened:
    """Rough scores of N candidates, in their order.

    Attributes:
        candidates: What they are about.
        load: (N,) demand over capacity of the whole trace; above 1 the queue grows without end.
        tpot: (N,) mean seconds per token behind the first, on average over requests.
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
        shares, each = (f(requests, fit.answers) for f in (token_shares, request_shares))
        behaviours = behaviours_of(specs, fit, shares, each)
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
    specs: Sequence[SpeculationSpec],
    fit: Fit,
    shares: Mapping[str, float],
    each: Mapping[str, float] | None = None,
) -> dict[SpeculationSpec, tuple[Behaviour, ...]]:
    """Per policy what it may do in a round; one that adapts to the batch takes the best of several.

    A policy whose length follows predicted goodput is at least as good as the best fixed length at
    each batch size, no drafting included.

    Args:
        specs: Policies.
        fit: Its recordings and its calibration.
        shares: See ``behaviour.token_shares``.
        each: See ``behaviour.request_shares``; None where they do not matter.
    """
    shapes = {spec: _shapes_of(spec) for spec in specs if spec.kind == "batch-tree"}
    alone = [spec for spec in specs if not spec.needs_step_times]
    observed = observe_all(
        list(dict.fromkeys([*alone, *chain.from_iterable(shapes.values())])), fit, shares, each
    )
    found: dict[SpeculationSpec, tuple[Behaviour, ...]] = {}
    for spec in specs:
        if spec in shapes:
            found[spec] = tuple(observed[shape] for shape in shapes[spec])
        elif spec in observed:
            found[spec] = (observed[spec],)
        else:
            lengths = range(spec.max_depth + 1)
            found[spec] = tuple(chain_behaviour(n, fit.answers, shares, each) for n in lengths)
        if spec.needs_step_times:  # what stands for it has as many children as its shape needs
            own = drafting_of(spec).fanout
            found[spec] = tuple(replace(behaviour, fanout=own) for behaviour in found[spec])
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
        grid = batch_grid(self._most(workload).max())
        options = [behaviours[spec] for spec in self.specs]
        table = BehaviourTable.of([behaviour for each in options for behaviour in each])
        firsts = np.cumsum([0, *map(len, options)])[:-1]

        def fastest(by_token: Floats, per_decoded: float) -> Floats:
            """(N, B) seconds per token of each candidate, of its policy's best behaviour.

            Args:
                by_token: (P,) rounds per token of answers without an end, over the mean.
                per_decoded: Answers per token.
            """
            rounds = by_token + table.unused * per_decoded
            seconds = round_seconds(
                table.with_ends(per_decoded / rounds),
                self.cost,
                batch=grid,
                context=workload.context,
                is_apart=self.deployment.draft_workers > 0,
            )
            times = seconds * (rounds / table.emitted)[:, None]
            return np.minimum.reduceat(times, firsts, axis=0)[self.spec]

        queue = Queue(
            grid,
            fastest(np.ones_like(table.emitted), 1.0 / workload.decoded),
            fastest(table.by_request, workload.per_decoded),
            self._most(workload),
            *self._prefill(workload),
        )
        return queue.serve(workload, self.deployment.replicas, slo)

    def _most(self, workload: Workload) -> Floats:
        """(N,) most requests that can run at once on a replica."""
        most = np.minimum(self.limit, max(workload.num_requests / self.deployment.replicas, 1.0))
        return np.minimum(most, np.maximum(self.room / workload.context, 1.0))

    def _prefill(self, workload: Workload) -> tuple[Floats, Floats, Floats]:
        """(N, Q) seconds of a prompt: where it is decoded, in a pool, behind the first token.

        The first token is the target's; what the draft still takes then delays the second one.
        """
        prompts = workload.prompts
        target = self.prompts.prefill.of_arrays(prompts, 0.0)
        draft = self.cost.draft_prompt.of_arrays(prompts, 0.0)
        drafts = np.array([spec.kind != "plain" for spec in self.specs])[self.spec][:, None]
        drafting = drafts * draft
        if self.deployment.prefill_workers:
            pool = target + self.cost.kv_transfer * prompts
            return drafting, np.broadcast_to(pool, drafting.shape), drafting
        is_apart = self.deployment.draft_workers > 0
        own = np.maximum(target, drafting) if is_apart else target + drafting
        return own, np.zeros_like(own), own - target
