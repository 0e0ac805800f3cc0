"""The policy object that a plan's policy describes, and the public names of the policies.

A policy says how much to speculate this round: see Speculation in policy/interface.py.

Must not import torch or read a clock.
"""

from __future__ import annotations

from codesign.errors import InputError
from codesign.policy.adaptive import SpecServe
from codesign.policy.adaserve import AdaServe
from codesign.policy.batch_tree import BatchTree
from codesign.policy.chains import FixedChain, FreeChain, ParallelChain
from codesign.policy.cost import Calibration
from codesign.policy.features import EagleTree
from codesign.policy.goodput import Goodput
from codesign.policy.host_cost import Drafting
from codesign.policy.interface import MAX_TREE_ROWS, Speculation
from codesign.policy.labels import (
    FAMILIES,
    Family,
    check_runs_in_engine,
    parse_policy,
    summarise_policy,
)
from codesign.policy.parallel import MicroBatches, Outcomes
from codesign.policy.spec import Kind, SpeculationSpec
from codesign.policy.step_time import StepTime
from codesign.policy.trees import BestTree, InFlightTree, StaticTree
from codesign.policy.turbospec import TurboSpec

__all__ = [
    "FAMILIES",
    "MAX_TREE_ROWS",
    "Family",
    "Goodput",
    "Kind",
    "Speculation",
    "SpeculationSpec",
    "build_speculation",
    "check_runs_in_engine",
    "drafting_of",
    "parse_policy",
    "summarise_policy",
]


def build_speculation(
    spec: SpeculationSpec,
    *,
    goodput: Goodput | None = None,
    calibration: Calibration | None = None,
    confidence: float | None = None,
) -> Speculation:
    """The policy object that a plan's ``spec`` describes.

    Args:
        spec: The policy.
        goodput: Step times and the TPOT target, for policies that decide by them.
        calibration: Of the draft's confidences.
        confidence: Mean chance of the draft's likeliest token, for policies that learn it as they
            go; None where it is not known.

    Raises:
        InputError: If the policy needs step times and there are none.
    """
    if spec.needs_step_times:
        if goodput is None:
            raise InputError(
                f"{spec.kind} needs fitted step times: codesign fit PROFILE, then codesign plan "
                "--trace TRACE --fit FIT"
            )
        return _with_step_times(spec, goodput, calibration, confidence)
    shaped = {
        "tree": BestTree,
        "inflight-tree": InFlightTree,
        "pipeinfer": MicroBatches,
        "eagle": EagleTree,
    }
    if spec.kind in shaped:
        return shaped[spec.kind](spec, calibration)
    if spec.kind == "static-tree":
        return StaticTree(spec.widths, calibration)
    if spec.kind == "pearl":
        return ParallelChain(spec.max_depth, calibration)
    if spec.kind == "ssd":
        return Outcomes(spec.max_depth, spec.width, calibration)
    if spec.kind == "plain":
        return Speculation(calibration)
    threshold = spec.threshold if spec.kind == "threshold" else 0.0
    return FixedChain(spec.max_depth, threshold, calibration)


def drafting_of(spec: SpeculationSpec) -> Drafting:
    """How a policy drafts, whatever its step times."""
    step = StepTime.linear(alpha=0.0, gamma=0.0, delta=1.0)
    return build_speculation(spec, goodput=Goodput(step, step)).drafting


def _with_step_times(
    spec: SpeculationSpec,
    goodput: Goodput,
    calibration: Calibration | None,
    confidence: float | None,
) -> Speculation:
    if spec.kind == "turbospec":
        return TurboSpec(spec.max_depth, goodput, calibration)
    if spec.kind == "amusd":
        return FreeChain(spec.max_depth, goodput, calibration)
    if spec.kind == "adaserve":
        return AdaServe(spec, goodput, calibration)
    if spec.kind == "batch-tree":
        return BatchTree(spec, goodput, calibration, confidence)
    return SpecServe(spec, goodput, calibration, confidence)
