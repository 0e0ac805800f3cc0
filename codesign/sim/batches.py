"""What makes a replica's batch: the policy's own objects, or tapes that they have played."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from codesign.acceptance import AcceptanceProfile
from codesign.calibration_log import CalibrationLog
from codesign.config import SLO, Serving
from codesign.policy.cost import Calibration, RoundCost
from codesign.policy.protocol import DraftSide
from codesign.policy.speculation import Goodput, SpeculationSpec, build_speculation
from codesign.policy.turns import Turns, turn_prices
from codesign.sim.acceptance import SyntheticDrafter, weighed_profile
from codesign.sim.played import PlayedBatch
from codesign.sim.requests import SimulatedRequest
from codesign.sim.stretches import Luck, Stretches
from codesign.sim.tape_batch import TapedBatch
from codesign.sim.tapes import Tapes, make_tapes
from codesign.sim.turns_batch import TurnsBatch
from codesign.sim.work import Batch

if TYPE_CHECKING:
    from codesign.candidate import Candidate
    from codesign.fit import Fit
    from codesign.policy.speculation import Speculation


def batch_maker(
    candidate: Candidate,
    fit: Fit,
    cost: RoundCost,
    serving: Serving,
    slo: SLO | None,
    requests: Iterable[SimulatedRequest],
    seed: int,
    log: CalibrationLog,
) -> Callable[[], Batch]:
    """What makes the batch of each replica.

    Args:
        candidate: What is simulated.
        fit: Calibration and recorded acceptance.
        cost: Step times of its deployment.
        serving: How steps are shared.
        slo: Steers policies that serve an SLO.
        requests: In order of their numbers.
        seed: Of the acceptance draws.
        log: Where played batches note what the policy believed and what came.
    """
    spec = candidate.speculation
    profile = fit.answers
    sizes = [(request.record.category, request.output_tokens) for request in requests]
    luck = Luck.of(profile, [kind for kind, _ in sizes], [tokens for _, tokens in sizes], seed)
    early = hears_early(candidate, serving)
    rows, prices = spec.kv_rows, turn_prices(cost.target)
    if spec.kind == "plain" and candidate.max_batch >= prices.fewest:
        return lambda: TurnsBatch(Turns(prices), round_rows=rows)
    if spec.kind != "plain" and policy_of(spec, fit, cost, slo, serving).is_batch_coupled:

        def play() -> Batch:
            side = DraftSide(policy_of(spec, fit, cost, slo, serving))
            drafter = SyntheticDrafter(profile, seed, luck.path)
            return PlayedBatch(
                side, drafter, round_rows=rows, hears_early=early, log=log, turns=Turns(prices)
            )

        return play
    tapes = _tapes(spec, profile, fit.calibration, luck.categories, hears_early=early)
    return lambda: TapedBatch(tapes, luck, round_rows=rows, hears_early=early)


def hears_early(candidate: Candidate, serving: Serving) -> bool:
    """Whether a draft on workers of its own answers before a request's first token is known."""
    deployment = candidate.deployment
    is_together = deployment.draft_workers == 0
    return not (is_together or serving.prefill_chunk or deployment.prefill_workers)


def policy_of(
    spec: SpeculationSpec, fit: Fit, cost: RoundCost, slo: SLO | None, serving: Serving
) -> Speculation:
    """The policy's own object, as a replica drives it.

    Args:
        spec: Which policy.
        fit: Its calibration weighs the draft's confidences, which begin at its mean.
        cost: Step times of the deployment, for policies that decide by them.
        slo: Its TPOT target is the policy's; None for no target.
        serving: How long answers are expected to be.
    """
    goodput = Goodput.of_cost(
        cost, slo_tpot=slo.tpot if slo else None, answer_tokens=serving.answer_tokens
    )
    return build_speculation(
        spec, goodput=goodput, calibration=fit.calibration, confidence=fit.acceptance.hit_rate(1)
    )


@functools.lru_cache(maxsize=128)
def _tapes(
    spec: SpeculationSpec,
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
