"""Discrete-event model of a deployment: what the engine would do, in predicted seconds.

The policy, the round protocol and the batcher are the engine's own (codesign.policy). Only the
models are replaced: forwards take the fitted time, and the draft model agrees with the target as
often as it did in the recordings.

    requests      what a trace asks for
    cluster       arrivals, a pool for prompts
    batches       what makes a replica's batch, of one of three kinds (work: what all are asked):
    played        the policy's objects in every round
    tape_batch    rounds that these objects made before (tapes), for policies that take requests
                  one by one
    turns_batch   plain decoding of requests that take turns
    replica       admission, prompts, rounds, eviction: one event per step (shared: what all have)
    prefill       who is admitted and does not decode yet
    steps         what a replica does now, and the row that is written of it
    acceptance    the draft model and the target model that agree as the recorded ones did
    stretches     which recorded tokens each request plays
    timing        when the parts of a round run
    quiet_rounds  rounds between which nothing happens, run together
    under_way     steps that ranks begin before their host has read the last one
    replay        one request again, with its draft trees
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import simpy

from codesign import Progress
from codesign.calibration_log import CalibrationLog
from codesign.config import SLO, Deployment, Routing, Serving
from codesign.errors import InputError
from codesign.fit import SHEETS
from codesign.fit.profile_command import profile_command
from codesign.policy.ahead import asked
from codesign.policy.batching import Batcher, BatchLimits
from codesign.policy.cost import RoundCost
from codesign.policy.kv_memory import PrefixCache
from codesign.policy.on_time import on_time_of
from codesign.policy.routing import Router
from codesign.policy.speculation import drafting_of
from codesign.records import RoundLog, RunRecords
from codesign.sim.batches import batch_maker
from codesign.sim.cluster import Arrivals, PromptPool
from codesign.sim.replica import Replica
from codesign.sim.requests import SimulatedRequest, check_prompts, check_sizes, read_requests
from codesign.sim.shared import Shared
from codesign.sim.tape_batch import TapedBatch
from codesign.sim.timing import timing_of
from codesign.sim.work import Batch

if TYPE_CHECKING:
    import pandas as pd

    from codesign.candidate import Candidate
    from codesign.fit import Fit

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
        slo: Its TPOT target steers policies that serve an SLO; with ``serving.scheduling`` "slo"
            both targets say who joins the batch next. Nothing else depends on it.
        seed: Of the acceptance draws, which depend on the request and the position alone: two
            candidates are compared on the same draws.
        progress: Called as ``progress("simulate", finished requests, all requests)``.

    Raises:
        InputError: If the fit lacks the deployment, a request can never run, or its scheduling has
            no target.
    """
    deployment, spec = candidate.deployment, candidate.speculation
    cost = cost_of(fit, deployment.unit.label)
    if spec.has_draft:
        cost = cost.drafting(drafting_of(spec))
    max_kv_tokens = _kv_tokens(serving, cost, has_draft=spec.has_draft)
    simulated = read_requests(requests, with_blocks=serving.prefix_cache)
    check_sizes(simulated, spec, max_kv_tokens)
    env = simpy.Environment(initial_time=0.0)
    counter = _FinishCounter(env, progress, len(simulated))
    arrivals = Arrivals(env, simulated.values())
    pool = _prompt_pool(env, simulated, fit, deployment, cost, serving, counter)
    shared = _shared(env, simulated, counter, arrivals, pool, deployment.replicas, serving.routing)
    log = CalibrationLog()
    make_batch = batch_maker(candidate, fit, cost, serving, slo, simulated.values(), seed, log)
    replicas = [
        _replica(number, shared, candidate, serving, slo, cost, max_kv_tokens, make_batch())
        for number in range(deployment.replicas)
    ]
    _start(env, arrivals, pool, replicas, serving.routing)
    if simulated:
        env.run(counter.all_finished)
    records = [request.record for request in simulated.values()]
    seconds = max((record.finish or 0.0 for record in records), default=0.0)
    return RunRecords(
        records,
        shared.rounds,
        seconds,
        notes=["simulated"],
        calibration=log.errors(),
        queued={number: request.queued for number, request in simulated.items()},
    )


def _shared(
    env: simpy.Environment,
    requests: dict[int, SimulatedRequest],
    counter: _FinishCounter,
    arrivals: Arrivals,
    pool: PromptPool | None,
    num_replicas: int,
    routing: Routing,
) -> Shared:
    # Between arrivals replicas do not hear of each other. Whose turn one is depends on nothing else
    # where they take turns: then each need only look out for its own.
    turns = num_replicas if routing == "round-robin" else 1
    shared = Shared(
        env,
        requests,
        RoundLog(),
        counter,
        next_event=lambda replica: arrivals.next_at(replica % turns, turns),
        num_arriving=lambda start, end: arrivals.between(start, end) // num_replicas,
    )
    # A pool sends requests any time.
    return (
        shared
        if pool is None
        else replace(shared, next_event=lambda _: env.peek(), on_taken=pool.taken)
    )


def _start(
    env: simpy.Environment,
    arrivals: Arrivals,
    pool: PromptPool | None,
    replicas: Sequence[Replica],
    routing: Routing,
) -> None:
    """Connect all, so that each knows whom it gives a request to."""
    router = Router([replica.batcher for replica in replicas], routing)

    def route(request: SimulatedRequest) -> None:
        replicas[router.choose(request.blocks)].give(request)

    for replica in replicas:
        env.process(replica.run())
    if pool is not None:
        env.process(pool.run(route))
    env.process(arrivals.run(route if pool is None else pool.give))


def _replica(
    number: int,
    shared: Shared,
    candidate: Candidate,
    serving: Serving,
    slo: SLO | None,
    cost: RoundCost,
    max_kv_tokens: int,
    batch: Batch,
) -> Replica:
    deployment, spec = candidate.deployment, candidate.speculation
    is_apart = deployment.draft_workers > 0
    if is_apart or (isinstance(batch, TapedBatch) and not batch.rests):  # all steps are asked for
        cost = replace(cost, target=asked(cost.target))
    keeps_prefixes = serving.prefix_cache and not deployment.prefill_workers
    batcher = Batcher(
        (),
        BatchLimits(candidate.max_batch, max_kv_tokens),
        PrefixCache() if keeps_prefixes else None,
        on_time_of(serving, slo, cost),
    )
    return Replica(
        number,
        shared,
        batcher,
        batch,
        timing_of(cost, is_apart=is_apart, is_plain=not spec.has_draft),
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


def _prompt_pool(
    env: simpy.Environment,
    requests: dict[int, SimulatedRequest],
    fit: Fit,
    deployment: Deployment,
    cost: RoundCost,
    serving: Serving,
    on_finish: Callable[[], None],
) -> PromptPool | None:
    """Whoever runs prompts apart from the replicas, if anyone does; the requests fit into it."""
    if not deployment.prefill_workers:
        return None
    if serving.scheduling != "fcfs":
        raise InputError(
            f"{deployment.label} has a pool for prompts, which serves who comes first. "
            "Fix: --scheduling fcfs"
        )
    prompts = cost_of(fit, str(deployment.prefill_workers))
    max_kv_tokens = _kv_tokens(serving, prompts, has_draft=False)
    check_prompts(requests, max_kv_tokens)
    return PromptPool(
        env,
        prompts,
        transfer=cost.kv_transfer,
        cache=PrefixCache() if serving.prefix_cache else None,
        max_kv_tokens=max_kv_tokens,
        on_finish=on_finish,
    )


def cost_of(fit: Fit, label: str) -> RoundCost:
    """Step times of a deployment.

    Raises:
        InputError: If the fit lacks it.
    """
    if label not in fit.costs:
        labels = ", ".join(fit.costs)
        if fit.origin in SHEETS:
            raise InputError(
                f"these GPUs hold the models as {labels}, not as {label}. Fix: one of these with "
                "--deployment, or --gpus N, or int4 weights (--target NAME:int4)"
            )
        raise InputError(
            f"the fit has no step times for deployment {label}, only for {labels}. Fix: one of "
            f"these with --deployment; or measure it: {profile_command(fit)}, then codesign fit "
            "profile"
        )
    return fit.costs[label]


def _kv_tokens(serving: Serving, cost: RoundCost, *, has_draft: bool) -> int:
    """KV rows of one replica."""
    rows = cost.kv_room(serving.max_kv_tokens, has_draft=has_draft)
    if rows is None:
        raise InputError("the fit does not say how many KV rows fit. Fix: --max-kv-tokens N")
    return rows
