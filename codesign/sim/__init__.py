"""Discrete-event model of one deployment: what the engine would do, in predicted seconds.

The policy, the round protocol and the batcher are the engine's own (codesign.policy). Only the
models are replaced: forwards take the fitted time, and the draft model agrees with the target as
often as it did in the recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from codesign.config import SLO, Deployment, Serving
from codesign.errors import InputError
from codesign.policy.batching import Batcher, BatchLimits, QueuedRequest
from codesign.policy.cost import RoundCost
from codesign.policy.protocol import DraftSide
from codesign.policy.speculation import Goodput, SpeculationSpec, build_speculation
from codesign.records import RequestRecord, RunRecords
from codesign.sim.acceptance import SyntheticDrafter
from codesign.sim.cluster import Cluster
from codesign.sim.drafting import DraftWorkers, SimulatedRequest

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit
    from codesign.plan import Candidate

Progress = Callable[[str, int, int], None]


def simulate(
    requests: pd.DataFrame,
    candidate: Candidate,
    fit: Fit,
    *,
    slo: SLO | None = None,
    serving: Serving,
    seed: int,
    progress: Progress | None = None,
) -> RunRecords:
    """The records that the engine is predicted to write. Same arguments, same records.

    Args:
        requests: Rows in any order with arrival (seconds), prompt_tokens, output_tokens and, if
            known, category. A request's number is its row's, from 0. It emits exactly
            output_tokens tokens.
        candidate: Deployment, speculation policy and batch limit.
        fit: Step times, calibration and recorded acceptance.
        slo: Its TPOT target steers SpecServe; nothing else depends on it.
        serving: How memory and steps are shared.
        seed: Of the acceptance draws, which depend on the request and the position alone: two
            candidates are compared on the same draws.
        progress: Called as ``progress("simulate", finished requests, all requests)``.

    Raises:
        InputError: If the fit lacks the deployment, or a request can never run.
    """
    spec = candidate.speculation
    cost = _cost_of(fit, candidate.deployment)
    simulated = _read_requests(requests)
    batcher = _batcher(simulated, BatchLimits(candidate.max_batch, _kv_tokens(serving, cost)), spec)
    draft = None
    if spec.kind != "plain":
        goodput = Goodput(
            cost.draft,
            cost.target,
            overhead=cost.reroot,
            slo_tpot=slo.tpot if slo else None,
        )
        policy = build_speculation(spec, goodput=goodput, calibration=fit.calibration)
        drafter = SyntheticDrafter(fit.acceptance, seed)
        draft = DraftWorkers(DraftSide(policy), drafter, cost, simulated)
    is_apart = candidate.deployment.draft_workers > 0
    counter = _FinishCounter(progress, len(simulated))
    cluster = Cluster(simulated, batcher, cost, draft, is_apart=is_apart, on_finish=counter)
    seconds = cluster.run()
    records = [request.record for request in simulated.values()]
    return RunRecords(records, cluster.rounds, seconds, notes=["simulated"])


class _FinishCounter:
    """Passes the number of finished requests on."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._done = 0
        self._total = total

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress("simulate", self._done, self._total)


def _cost_of(fit: Fit, deployment: Deployment) -> RoundCost:
    if deployment.label not in fit.costs:
        raise InputError(
            f"the fit has no step times for deployment {deployment.label}, only for "
            f"{', '.join(fit.costs)}. Fix: codesign profile, then codesign fit"
        )
    return fit.costs[deployment.label]


def _kv_tokens(serving: Serving, cost: RoundCost) -> int:
    """KV rows of one replica."""
    known = [n for n in (serving.max_kv_tokens, cost.kv_tokens) if n is not None]
    if not known:
        raise InputError("the fit does not say how many KV rows fit. Fix: --max-kv-tokens N")
    return min(known)


def _read_requests(requests: pd.DataFrame) -> dict[int, SimulatedRequest]:
    arrival = np.asarray(requests["arrival"], np.float64).tolist()
    prompt = np.asarray(requests["prompt_tokens"], np.int64).tolist()
    output = np.asarray(requests["output_tokens"], np.int64).tolist()
    category = requests["category"].tolist() if "category" in requests else [""] * len(arrival)
    if prompt and min(*prompt, *output) < 1:
        raise InputError("every request needs at least 1 prompt token and 1 output token")
    rows = zip(category, arrival, prompt, output, strict=True)
    return {
        number: SimulatedRequest(
            RequestRecord(number, kind if isinstance(kind, str) else "", at, num_prompt), num_output
        )
        for number, (kind, at, num_prompt, num_output) in enumerate(rows)
    }


def _batcher(
    requests: dict[int, SimulatedRequest], limits: BatchLimits, spec: SpeculationSpec
) -> Batcher:
    queued = []
    for number, request in requests.items():
        kv_tokens = request.record.prompt_tokens + request.max_new_tokens + spec.max_rows
        if kv_tokens > limits.max_kv_tokens:
            raise InputError(
                f"request {number} needs {kv_tokens} KV rows with {spec.label}, the machine holds "
                f"{limits.max_kv_tokens}. Fix: --max-prompt and --max-output, or --max-kv-tokens"
            )
        queued.append(QueuedRequest(number, request.record.arrival, kv_tokens))
    return Batcher(queued, limits)
