"""From a candidate to the nearest setup that an engine with serial drafts can run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.errors import counted
from codesign.export.groups import decoding_group, prefill_group
from codesign.export.lengths import (
    Lengths,
    Shape,
    best_shape,
    chain_of,
    keeps_slo,
    one_length,
    schedule_of,
    tree_of,
    with_siblings,
    within_pool,
)
from codesign.export.models import check_positions
from codesign.export.problem import Problem
from codesign.export.setup import BatchRange, Loss, Setup
from codesign.export.wishes import Wish, wish_of
from codesign.planner.search_space import longest_request
from codesign.records import has_own_targets


@dataclass(frozen=True, slots=True)
class Nearest:
    """The nearest setup.

    Attributes:
        setup: For the engine.
        candidate: What the simulator is asked about it; None where the fit has no step times.
        losses: Of policy and split.
    """

    setup: Setup
    candidate: Candidate | None
    losses: tuple[Loss, ...]


def find_nearest(problem: Problem) -> Nearest:
    """The setup, and what of the policy and the split it leaves out.

    Raises:
        InputError: If no group of the plan's GPUs holds the models and their KV rows.
    """
    candidate, engine = problem.candidate, problem.engine
    longest = longest_request(problem.requests)
    check_positions(problem.target, longest)
    spec, deployment = candidate.speculation, candidate.deployment
    wish = wish_of(spec, batch=problem.batch)
    losses = _split_losses(problem)
    tree = wish.shape if problem.method in engine.trees else None
    size, unit = decoding_group(problem, wish, losses)
    lengths = None if unit is None else Lengths(problem, unit, wish.longest)
    schedule: tuple[BatchRange, ...] = ()
    if tree is not None:
        depth, width, rows = _shape(problem, wish, unit, losses)
    else:
        schedule = schedule_of(problem, wish, lengths)
        depth = schedule[0].length if schedule else one_length(problem, wish, lengths)
        width, rows = 1, depth + 1
        if wish.shape is not None:
            trees = f"trees of {wish.shape[2]} rows, {counted(wish.shape[0], 'forward')} deep"
            losses.append(Loss(trees, f"chains of {'up to ' if schedule else ''}{depth}"))
    if wish.by_batch and not schedule:
        losses.append(Loss("the length depends on how many requests run", f"{depth} at any batch"))
    losses += wish.losses
    if problem.plan.serving.scheduling == "slo":
        losses.append(
            Loss("requests join the batch so that targets are kept", "first come, first served")
        )
    if has_own_targets(problem.requests):
        losses.append(_own_targets_loss(problem, schedule))
    prefill = prefill_group(problem, size, losses)
    draft_positions = None
    if problem.draft is not None and depth and problem.method == "draft":
        draft_positions = problem.draft.positions
    setup = Setup(
        target=problem.target.name,
        draft="" if problem.draft is None or not depth else problem.draft.name,
        method=problem.method if depth else "plain",
        depth=depth,
        width=width,
        rows=rows,
        schedule=schedule,
        tensor_parallel=size,
        replicas=deployment.replicas,
        prefill_gpus=prefill,
        max_batch=candidate.max_batch,
        longest_prompt=int(np.max(problem.requests["prompt_tokens"].to_numpy())),
        longest_request=longest,
        serving=_serving(problem),
        is_vocab_padded=problem.is_vocab_padded,
        positions=problem.target.positions,
        draft_positions=draft_positions,
    )
    return Nearest(setup, _simulated(problem, setup, unit, lengths), tuple(losses))


def _split_losses(problem: Problem) -> list[Loss]:
    deployment, losses = problem.candidate.deployment, []
    if problem.candidate.speculation.is_async:
        number = deployment.draft_workers
        workers = f"{number} worker{'s' if number > 1 else ''} of its own"
        losses.append(
            Loss(
                f"the draft runs on {workers} while the target verifies",
                "both models share the target's GPUs and take turns",
            )
        )
    if problem.is_cpu:
        losses.append(
            Loss(
                f"{deployment.num_workers} threads of a CPU, whose times and memory the plan knows",
                f"{problem.engine.title} on a GPU, of which it knows nothing",
            )
        )
    return losses


def _own_targets_loss(problem: Problem, schedule: tuple[BatchRange, ...]) -> Loss:
    """Engines are told of no target; a schedule is made with the one that all have in common."""
    instead = "the engine is told of no target"
    has_common = problem.plan.slo.tpot is not None
    if schedule and has_common and keeps_slo(problem.candidate.speculation):
        instead = "lengths by batch size that keep to the common target"
    return Loss("requests have TPOT targets of their own (slo_tpot)", instead)


def _serving(problem: Problem) -> Serving:
    """The plan's; a GPU's memory is not the CPU's."""
    serving = problem.plan.serving
    return replace(serving, max_kv_tokens=None) if problem.is_cpu else serving


def _shape(problem: Problem, wish: Wish, unit: int | None, losses: list[Loss]) -> Shape:
    """A tree's size: the plan's where it drafts just so, otherwise the one that decodes fastest."""
    assert wish.shape is not None
    asked, shape = wish.shape, within_pool(with_siblings(wish.shape))
    is_narrow = asked[1] == 1
    if shape[2] < asked[2] and not is_narrow:
        losses.append(
            Loss(f"{asked[2]} rows are verified", f"{shape[2]}, all that the drafting finds")
        )
    spec, deployment = problem.candidate.speculation, problem.candidate.deployment
    is_as_planned = spec.kind in ("tree", "eagle") and deployment.unit.label == str(unit)
    found = shape
    if unit is not None and (is_narrow or not is_as_planned):
        found = best_shape(problem, unit, shape, wish.longest)
    planned = asked if is_narrow else shape
    if found != shape or is_narrow:
        instead = _tree_text(found) if found[1] > 1 else f"chains of {found[0]}"
        if found != shape:
            instead += ", the fastest of up to as many rows by arithmetic at the plan's batch"
        losses.append(Loss(_tree_text(planned), instead))
    return found


def _tree_text(shape: Shape) -> str:
    depth, width, rows = shape
    leaves = "1 leaf" if width == 1 else f"{width} leaves"
    return f"trees of {rows} rows, {counted(depth, 'forward')} of {leaves}"


def _simulated(
    problem: Problem, setup: Setup, unit: int | None, lengths: Lengths | None
) -> Candidate | None:
    """What the simulator knows that is most like the setup."""
    old = problem.candidate
    if unit is None:
        return None
    depth = setup.depth
    if setup.schedule and lengths is not None:
        depth = next(part.length for part in setup.schedule if problem.batch <= part.last)
    spec = chain_of(old.speculation, depth)
    if setup.is_tree:
        spec = tree_of(old.speculation, (setup.depth, setup.width, setup.rows))
    known = str(setup.prefill_gpus) in problem.fit.costs
    prefill = setup.prefill_gpus if known else old.deployment.prefill_workers
    deployment = Deployment(unit, 0, old.deployment.replicas, prefill)
    return Candidate(deployment, spec, old.max_batch)
