"""Groups of GPUs: which sizes the models can be cut for, hold them, and decode fastest."""

from __future__ import annotations

from collections.abc import Sequence

from codesign.errors import InputError, counted
from codesign.export.lengths import Lengths
from codesign.export.problem import Problem
from codesign.export.setup import Loss
from codesign.export.wishes import Wish
from codesign.fit import SHEETS
from codesign.planner.search_space import longest_request


def decoding_group(problem: Problem, wish: Wish, losses: list[Loss]) -> tuple[int, int | None]:
    """GPUs of one copy, and the workers whose step times stand for them, if there are any.

    A split is joined: the size of its GPUs that decodes fastest and holds the models.
    """
    deployment = problem.candidate.deployment
    have = deployment.target_workers + deployment.draft_workers
    known = problem.fit.costs
    if problem.is_cpu:
        size = 1 if problem.tensor_parallel is None else _sizes(problem, have)[0]
        return size, have if str(have) in known else None
    sizes = _sizes(problem, have)
    fits = [size for size in sizes if str(size) in known and _room(problem, size) >= 0]
    if not fits and (any(str(size) in known for size in sizes) or problem.fit.origin in SHEETS):
        raise InputError(_no_room(problem, sizes))
    if not fits:
        size, unit = sizes[-1], None
    elif len(fits) == 1:
        size = unit = fits[0]
    else:
        size = unit = min(fits, key=lambda s: _seconds(problem, wish, s))
    if size != have:
        losses.append(Loss(f"{counted(have, 'GPU')} for each copy", str(size)))
    return size, unit


def _sizes(problem: Problem, have: int) -> list[int]:
    """Sizes of a group that the models can be cut for, small ones first."""
    deployment, asked = problem.candidate.deployment, problem.tensor_parallel
    possible = [size for size in range(1, have + 1) if problem.can_cut(size)]
    choices = f"--tensor-parallel {' or '.join(map(str, possible))}"
    if asked is not None and asked > have:
        copies = f"{deployment.replicas} copies" if deployment.replicas > 1 else "one copy"
        raise InputError(
            f"{asked} GPUs are more than the plan has for {copies} ({deployment.label}): {choices}"
        )
    least = 1 if problem.candidate.speculation.is_async else have
    wanted = [asked] if asked is not None else list(range(least, have + 1))
    sizes = [size for size in wanted if problem.can_cut(size)]
    if not sizes and asked is None:  # the planned size cannot be cut: the next smaller one
        sizes = possible[-1:]
    if not sizes:
        raise InputError(f"the models' heads cannot be divided among {asked} GPUs: {choices}")
    return sizes


def _seconds(problem: Problem, wish: Wish, size: int) -> float:
    lengths = Lengths(problem, size, wish.longest)
    return float(lengths.seconds(problem.running).min())


def _room(problem: Problem, size: int) -> int:
    """KV rows that the longest request leaves, below 0 if it does not fit; 0 if nobody knows."""
    cost, spec = problem.fit.costs[str(size)], problem.candidate.speculation
    room = cost.kv_room(problem.plan.serving.max_kv_tokens, has_draft=spec.has_draft)
    if room is None:
        return 0
    return room - longest_request(problem.requests) - spec.kv_rows


def _no_room(problem: Problem, sizes: Sequence[int]) -> str:
    spec, longest = problem.candidate.speculation, longest_request(problem.requests)
    known = [size for size in sizes if str(size) in problem.fit.costs]
    what = "target and draft together" if spec.has_draft else "the target"
    fix = (
        "Export a candidate without a draft: --candidate plain"
        if spec.has_draft
        else "Plan again with more GPUs, or for shorter requests: codesign plan --trace TRACE "
        "--max-prompt N"
    )
    if not known:
        return f"the weights of {what} do not fit {counted(sizes[-1], 'GPU')}. {fix}"
    room = longest + spec.kv_rows + _room(problem, known[-1])
    return (
        f"{what} on {counted(known[-1], 'GPU')} leave room for {room:,} KV rows, the longest "
        f"request needs {longest:,} and a round's {spec.kv_rows}. {fix}"
    )


def prefill_group(problem: Problem, size: int, losses: list[Loss]) -> int:
    """GPUs of the group that only runs prompts; 0 without one.

    With a draft both sides must be told of it, so that both are cut for it. GPUs that the copies
    leave over may join.

    Raises:
        InputError: If no group that is left holds the models.
    """
    deployment = problem.candidate.deployment
    asked = deployment.prefill_workers
    if problem.is_cpu:
        return asked
    left = deployment.num_workers - deployment.replicas * size
    group = _nearest_group(problem, asked, left) if asked else 0
    if group != asked:
        losses.append(Loss(f"{counted(asked, 'GPU')} for prompts", str(group)))
    if left > group:
        losses.append(Loss(f"all {deployment.num_workers} GPUs work", f"{left - group} idle"))
    return group


def _nearest_group(problem: Problem, asked: int, left: int) -> int:
    sizes = [size for size in range(1, left + 1) if problem.can_cut(size)]
    if problem.fit.origin in SHEETS:
        sizes = [size for size in sizes if str(size) in problem.fit.costs]
    if not sizes:
        raise InputError(
            f"prompts have {counted(asked, 'GPU')}: no group of at most so many divides the "
            "models' heads and holds the weights. Export a candidate without them: "
            "--candidate LABEL"
        )
    return next((size for size in sizes if size >= asked), sizes[-1])
