"""Discrete-event model of a deployment: what the engine would do, in predicted seconds.

The policy, the round protocol and the batcher are the engine's own (codesign.policy). Only the
models are replaced: forwards take the fitted time, and the draft model agrees with the target as
often as it did in the recordings.

    requests    what a trace asks for
    cluster     arrivals, a pool for prompts
    replica     admission, prompts, rounds, eviction: one event per step
    prefill     who is admitted and does not decode yet
    steps       what a replica does now, and the row that is written of it
    played      the policy's objects in every round
    taped       rounds that these objects made before, for policies that treat requests one by one
    acceptance  the draft model and the target model that agree as the recorded ones did
    stretches   which recorded tokens each request plays
    timing      when the parts of a round run
    ahead       rounds between which nothing happens, run together
    replay      one request again, with its draft trees
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import simpy

from codesign.acceptance import AcceptanceProfile
from codesign.calibration_log import CalibrationLog
from codesign.config import SLO, Deployment, Serving
from codesign.errors import InputError
from codesign.policy.batching import Batcher, BatchLimits
from codesign.policy.cost import Calibration, RoundCost
from codesign.policy.kv_memory import PrefixCache
from codesign.policy.protocol import DraftSide
from codesign.policy.routing import Router
from codesign.policy.speculation import Goodput, SpeculationSpec, build_speculation
from codesign.records import RoundLog, RunRecords
from codesign.sim.acceptance import SyntheticDrafter, weighed_profile
from codesign.sim.cluster import Arrivals, PromptPool
from codesign.sim.played import PlayedBatch
from codesign.sim.replica import Replica, Shared
from codesign.sim.requests import SimulatedRequest, check_prompts, check_sizes, read_requests
from codesign.sim.stretches import Luck, Stretches
from codesign.sim.taped import TapedBatch
from codesign.sim.tapes import Tapes, make_tapes
from codesign.sim.timing import timing_of
from codesign.sim.work import Batch

if TYPE_CHECKING:
    import pandas as pd

    from codesign.candidate import Candidate
    from codesign.fit import Fit
    from codesign.policy.speculation import Speculation

Progress = Callable[[str, int, int], None]
_REPORTS = 200  # of progress in a simulation


def simulate(
    requests: pd.DataFrame,
    candidate: Candidate,
    fit: Fit,
    *,
    serving: Serving,
    slo: SLO | None = None,
    seed: int,
    progress: Progress | None = None,
) -> RunRecords:
    """The records that the engine is predicted to write. Same arguments, same records.

    Args:
        requests: Rows in any order with arrival (seconds), prompt_tokens, output_tokens and, if
            known, category, hash_ids and speculates (false: decoded plainly). A request's number
            is its row's, from 0. It emits exactly output_tokens tokens.
        candidate: Deployment, speculation policy and batch limit of each replica.
        fit: Step times, calibration and recorded acceptance.
        serving: How memory and steps are shared.
        slo: Its TPOT target steers policies that serve an SLO; nothing else depends on it.
        seed: Of the acceptance draws, which depend on the request and the position alone: two
            candidates are compared on the same draws.
        progress: Called as ``progress("simulate", finished requests, all requests)``.

    Raises:
        InputError: If the fit lacks the deployment, or a request can never run.
    """
    deployment, spec = candidate.deployment, candidate.speculation
    cost = cost_of(fit, deployment.unit.label)
    max_kv_tokens = _kv_tokens(serving, cost, has_draft=spec.has_draft)
    simulated = read_requests(requests, with_blocks=serving.prefix_cache)
    check_sizes(simulated, spec, max_kv_tokens)
    env = simpy.Environment(initial_time=0.0)
    counter = _FinishCounter(env, progress, len(simulated))
    arrivals = Arrivals(env, simulated.values())
    pool = None
    # Between arrivals replicas do not hear of each other.
    shared = Shared(
        env,
        simulated,
        RoundLog(),
        counter,
        next_event=lambda: arrivals.next_at,
        num_arriving=lambda start, end: arrivals.between(start, end) // deployment.replicas,
    )
    if deployment.prefill_workers:  # sends requests any time
        pool = _prompt_pool(env, fit, deployment, cost, serving, counter)
        check_prompts(simulated, pool.max_kv_tokens)
        shared = replace(shared, next_event=env.peek, on_taken=pool.taken)
    log = CalibrationLog()
    make_batch = _batch_maker(candidate, fit, cost, serving, slo, simulated, seed, log)
    replicas = [
        _replica(number, shared, candidate, serving, cost, max_kv_tokens, make_batch())
        for number in range(deployment.replicas)
    ]
    for replica in replicas:
        env.process(replica.run())
    router = Router([replica.batcher for replica in replicas], serving.routing)

    def route(request: SimulatedRequest) -> None:
        replicas[router.choose(request.blocks)].give(request)

    give = route
    if pool is not None:
        env.process(pool.run(route))
        give = pool.give
    env.process(arrivals.run(give))
    if simulated:
        env.run(counter.all_finished)
    records = [request.record for request in simulated.values()]
    seconds = max((record.finish or 0.0 for record in records), default=0.0)
    return RunRecords(
        records, shared.rounds, seconds, notes=["simulated"], calibration=log.errors()
    )


def _replica(
    number: int,
    shared: Shared,
    candidate: Candidate,
    serving: Serving,
    cost: RoundCost,
    max_kv_tokens: int,
    batch: Batch,
) -> Replica:
    deployment, spec = candidate.deployment, candidate.speculation
    keeps_prefixes = serving.prefix_cache and not deployment.prefill_workers
    batcher = Batcher(
        (),
        BatchLimits(candidate.max_batch, max_kv_tokens),
        PrefixCache() if keeps_prefixes else None,
    )
    return Replica(
        number,
        shared,
        batcher,
        batch,
        timing_of(cost, is_apart=deployment.draft_workers > 0, is_plain=not spec.has_draft),
        cost,
        round_rows=spec.kv_rows,
        prefill_chunk=serving.prefill_chunk,
        takes_rows=serving.preemption,
    )


class _FinishCounter:
    """Counts finished requests, passes their number on, and knows when all are."""

    def __init__(self, env: simpy.Environment, progress: Progress | None, total: int) -> None:
        self.all_finished = env.event()
        self._progress = progress
        self._done = 0
        self._total = total
        self._every = max(total // _REPORTS, 1)

    def __call__(self) -> None:
        self._done += 1
        if self._progress and (self._done % self._every == 0 or self._done == self._total):
            self._progress("simulate", self._done, self._total)
        if self._done == self._total:
            self.all_finished.succeed()


def _batch_maker(
    candidate: Candidate,
    fit: Fit,
    cost: RoundCost,
    serving: Serving,
    slo: SLO | None,
    requests: dict[int, SimulatedRequest],
    seed: int,
    log: CalibrationLog,
) -> Callable[[], Batch]:
    """What makes the batch of each replica."""
    spec = candidate.speculation
    policy = None if spec.kind == "plain" else policy_of(spec, fit, cost, slo)
    profile = fit.acceptance
    kinds = [request.record.category for request in requests.values()]
    outputs = [request.output_tokens for request in requests.values()]
    luck = Luck.of(profile, kinds, outputs, seed)
    early = hears_early(candidate, serving)
    rows = spec.kv_rows
    if policy is not None and policy.is_batch_coupled:

        def play() -> Batch:
            side = DraftSide(policy_of(spec, fit, cost, slo))
            drafter = SyntheticDrafter(profile, seed, luck.path)
            return PlayedBatch(side, drafter, round_rows=rows, hears_early=early, log=log)

        return play
    overlap = 0 if policy is None else policy.overlap
    tapes = _tapes(spec, overlap, profile, fit.calibration, luck.categories, hears_early=early)
    return lambda: TapedBatch(tapes, luck, round_rows=rows, hears_early=early)


def hears_early(candidate: Candidate, serving: Serving) -> bool:
    """Whether a draft on workers of its own answers before a request's first token is known."""
    deployment = candidate.deployment
    is_together = deployment.draft_workers == 0
    return not (is_together or serving.prefill_chunk or deployment.prefill_workers)


def policy_of(spec: SpeculationSpec, fit: Fit, cost: RoundCost, slo: SLO | None) -> Speculation:
    """The policy's own object, as a replica drives it."""
    goodput = Goodput(
        cost.draft, cost.target, overhead=cost.reroot, slo_tpot=slo.tpot if slo else None
    )
    return build_speculation(spec, goodput=goodput, calibration=fit.calibration)


@functools.lru_cache(maxsize=128)
def _tapes(
    spec: SpeculationSpec,
    overlap: int,
    profile: AcceptanceProfile,
    calibration: Calibration,
    categories: tuple[str, ...],
    *,
    hears_early: bool,
) -> Tapes:
    """Tapes of a policy, kept because a planner simulates it on many deployments."""
    weighed = weighed_profile(profile, calibration)
    return make_tapes(
        None if spec.kind == "plain" else build_speculation(spec),
        weighed,
        Stretches(weighed, categories),
        hears_early=hears_early,
    )


def _prompt_pool(
    env: simpy.Environment,
    fit: Fit,
    deployment: Deployment,
    cost: RoundCost,
    serving: Serving,
    on_finish: Callable[[], None],
) -> PromptPool:
    prompts = cost_of(fit, str(deployment.prefill_workers))
    return PromptPool(
        env,
        prompts,
        transfer=cost.kv_transfer,
        cache=PrefixCache() if serving.prefix_cache else None,
        max_kv_tokens=_kv_tokens(serving, prompts, has_draft=False),
        on_finish=on_finish,
    )


def cost_of(fit: Fit, label: str) -> RoundCost:
    """Step times of a deployment.

    Raises:
        InputError: If the fit lacks it.
    """
    if label not in fit.costs:
        labels = ", ".join(fit.costs)
        if fit.origin == "roofline":
            raise InputError(
                f"these GPUs hold the models as {labels}, not as {label}. Fix: one of these with "
                "--deployment, or --gpus N, or int4 weights (--target NAME:int4)"
            )
        raise InputError(
            f"the fit has no step times for deployment {label}, only for {labels}. Fix: one of "
            "these with --deployment; or measure it: codesign profile, then codesign fit"
        )
    return fit.costs[label]


def _kv_tokens(serving: Serving, cost: RoundCost, *, has_draft: bool) -> int:
    """KV rows of one replica."""
    rows = cost.kv_room(serving.max_kv_tokens, has_draft=has_draft)
    if rows is None:
        raise InputError("the fit does not say how many KV rows fit. Fix: --max-kv-tokens N")
    return rows
