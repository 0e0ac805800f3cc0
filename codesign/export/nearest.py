"""From a candidate to the nearest setup that an engine with serial drafts can run.

Lengths that the plan leaves open are chosen by the planner's own arithmetic: recorded acceptance
and fitted step times. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import Deployment
from codesign.errors import InputError
from codesign.export.models import EngineModel
from codesign.export.setup import BatchRange, Engine, Loss, Method, Setup
from codesign.export.wishes import Wish, wish_of
from codesign.planner.behaviour import token_shares
from codesign.planner.economics import Decoding
from codesign.planner.screen import behaviours_of
from codesign.planner.search_space import longest_request
from codesign.planner.workload import Workload
from codesign.policy.speculation import SpeculationSpec

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit
    from codesign.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What is to be exported where.

    Attributes:
        plan: It names limits, targets and requests.
        scored: The candidate, and what is predicted for it.
        fit: The plan's.
        requests: The plan's.
        engine: Where to.
        method: How tokens are proposed.
        target: What the engine is to load.
        draft: Draft model or head; None if the method has none.
        is_cpu: Workers of the plan are CPU threads, not GPUs.
        tensor_parallel: GPUs of one copy; None for the best.
        is_vocab_padded: See ``Setup``.
    """

    plan: Plan
    scored: ScoredCandidate
    fit: Fit
    requests: pd.DataFrame
    engine: Engine
    method: Method
    target: EngineModel
    draft: EngineModel | None
    is_cpu: bool = False
    tensor_parallel: int | None = None
    is_vocab_padded: bool = False

    @property
    def candidate(self) -> Candidate:
        """What is to be exported."""
        return self.scored.candidate

    @property
    def running(self) -> float:
        """Requests that run at once on average, on all copies together."""
        each = self.scored.predicted.get("mean_batch")
        mean = self.candidate.max_batch if each is None else max(each.value, 1.0)
        return mean * self.candidate.deployment.replicas


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
    spec, deployment = candidate.speculation, candidate.deployment
    wish = wish_of(spec, max_batch=candidate.max_batch)
    losses = _split_losses(problem)
    tree = wish.shape if problem.method in engine.trees else None
    size, unit = _group(problem, wish, losses)
    lengths = None if unit is None else Lengths(problem, unit, wish.longest)
    schedule: tuple[BatchRange, ...] = ()
    if tree is not None:
        depth, width, rows = _within_pool(tree, losses)
    else:
        schedule = _schedule(problem, wish, lengths)
        depth = schedule[0].length if schedule else _length(problem, wish, lengths)
        width, rows = 1, depth + 1
        if wish.shape is not None:
            trees = f"trees of {wish.shape[2]} rows, {wish.shape[0]} forwards deep"
            losses.append(Loss(trees, f"chains of {'up to ' if schedule else ''}{depth}"))
    if wish.by_batch and not schedule:
        losses.append(Loss("the length depends on how many requests run", f"{depth} at any batch"))
    losses += wish.losses
    prefill = _prefill_group(problem, losses)
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
        longest_request=longest_request(problem.requests),
        serving=problem.plan.serving,
        is_vocab_padded=problem.is_vocab_padded,
    )
    return Nearest(setup, _simulated(problem, setup, unit, lengths), tuple(losses))


class Lengths:
    """Seconds per token of chains of each length, drafted in turn with the target.

    Args:
        problem: Its fit, method and requests.
        unit: Workers of one copy; the fit has step times for them.
        longest: Draft tokens.
    """

    def __init__(self, problem: Problem, unit: int, longest: int) -> None:
        fit, requests, old = problem.fit, problem.requests, problem.candidate
        specs = [chain_of(old.speculation, length) for length in range(longest + 1)]
        behaviours = behaviours_of(specs, fit, token_shares(requests, fit.acceptance))
        context = Workload.of(requests).context
        deployment = Deployment(unit, 0, old.deployment.replicas)
        self._chains = [
            Decoding(Candidate(deployment, s, old.max_batch), fit, behaviours[s], context)
            for s in specs
        ]

    def best(self, running: float, *, least: int = 0, slo_tpot: float | None = None) -> int:
        """The length that decodes fastest with so many requests on all copies.

        Args:
            running: Requests.
            least: Shortest length to consider.
            slo_tpot: Seconds that no round may take but one without a draft; None for no limit.
        """
        seconds = self.seconds(running)
        if slo_tpot is not None:
            late = [chain.round_seconds(running) > slo_tpot for chain in self._chains]
            seconds = np.where([False, *late[1:]], np.inf, seconds)
        return least + int(np.argmin(seconds[least:]))

    def seconds(self, running: float) -> NDArray[np.float64]:
        """(longest + 1,) seconds per token of one request."""
        batch = np.array([running])
        return np.array([chain.seconds_per_token(batch)[0] for chain in self._chains])


def chain_of(spec: SpeculationSpec, length: int) -> SpeculationSpec:
    """The chain of a length that a policy's drafter can propose; plain decoding for 0."""
    if length == 0:
        return SpeculationSpec()
    if spec.kind == "eagle":
        return replace(spec, is_async=False, rows=length + 1, width=1, expansions=length)
    return SpeculationSpec(kind="chain", max_depth=length)


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
                f"{deployment.num_workers} threads of a CPU, whose times the plan is made of",
                f"{problem.engine.title} on a GPU, of which the plan knows nothing",
            )
        )
    return losses


def _group(problem: Problem, wish: Wish, losses: list[Loss]) -> tuple[int, int | None]:
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
    if not fits and (any(str(size) in known for size in sizes) or _knows_memory(problem.fit)):
        raise InputError(_no_room(problem, sizes))
    if not fits:
        size, unit = sizes[-1], None
    elif len(fits) == 1:
        size = unit = fits[0]
    else:
        size = unit = min(fits, key=lambda s: _seconds(problem, wish, s))
    idle = (have - size) * deployment.replicas
    if idle:
        losses.append(Loss(f"{have} GPUs for each copy", f"{size}, and {idle} idle"))
    return size, unit


def _sizes(problem: Problem, have: int) -> list[int]:
    """Sizes of a group that the models can be cut for, small ones first."""
    deployment, asked = problem.candidate.deployment, problem.tensor_parallel
    models = [m for m in (problem.target, problem.draft) if m is not None]
    if asked is not None and asked > have:
        raise InputError(
            f"{deployment.replicas} x {asked} GPUs are more than the plan has "
            f"({deployment.label}): --tensor-parallel {have} at most"
        )
    least = 1 if problem.candidate.speculation.is_async else have
    wanted = [asked] if asked is not None else list(range(least, have + 1))
    sizes = [size for size in wanted if all(model.runs_on(size) for model in models)]
    if not sizes and asked is None:  # the planned size cannot be cut: the next smaller one
        sizes = [s for s in range(have, 0, -1) if all(m.runs_on(s) for m in models)][:1]
    if not sizes:
        names = " and ".join(model.name for model in models)
        raise InputError(
            f"{names} cannot be cut for {asked} GPUs, which must divide their heads: "
            "--tensor-parallel N"
        )
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


def _knows_memory(fit: Fit) -> bool:
    return all(cost.kv_tokens is not None for cost in fit.costs.values())


def _no_room(problem: Problem, sizes: Sequence[int]) -> str:
    spec, longest = problem.candidate.speculation, longest_request(problem.requests)
    known = [size for size in sizes if str(size) in problem.fit.costs]
    what = "the target" if not spec.has_draft else "target and draft together"
    if not known:
        return (
            f"the weights of {what} do not fit {sizes[-1]} GPUs. Export a candidate without a "
            "draft: --candidate plain"
        )
    room = longest + spec.kv_rows + _room(problem, known[-1])
    return (
        f"{what} on {known[-1]} GPUs leave room for {room:,} KV rows, the longest request needs "
        f"{longest:,} and a round's {spec.kv_rows}. Export a candidate without a draft: "
        "--candidate plain"
    )


def _prefill_group(problem: Problem, losses: list[Loss]) -> int:
    asked = problem.candidate.deployment.prefill_workers
    if problem.is_cpu or not asked:
        return asked
    # With a draft both sides must be told of it, so both are cut for it.
    models = [m for m in (problem.target, problem.draft) if m is not None]
    size = next(s for s in range(asked, 0, -1) if s == 1 or all(m.runs_on(s) for m in models))
    if size < asked:
        losses.append(
            Loss(f"{asked} GPUs for prompts", f"{size}: the models cannot be cut for more")
        )
    return size


def _within_pool(shape: tuple[int, int, int], losses: list[Loss]) -> tuple[int, int, int]:
    """A tree's (depth, width, rows), with no more rows than level by level drafting finds.

    The first forward gives ``width`` nodes, each later one as many below each of ``width`` leaves.
    """
    depth, width, rows = shape
    depth = min(depth, rows - 1)  # no path of the tree is longer
    most = 1 + width + (depth - 1) * width**2
    if rows > most:
        losses.append(Loss(f"{rows} rows are verified", f"{most}, all that the drafting finds"))
    return depth, width, min(rows, most)


def _length(problem: Problem, wish: Wish, lengths: Lengths | None) -> int:
    """The length of all rounds: the plan's, the best predicted, or what the plan expects."""
    if wish.is_fixed:
        return wish.longest
    if lengths is not None:
        return lengths.best(problem.running, least=1)
    tokens = problem.scored.predicted.get("acceptance_length")
    expected = wish.longest if tokens is None else max(round(tokens.value), 1)
    return min(expected, wish.longest)


def _schedule(problem: Problem, wish: Wish, lengths: Lengths | None) -> tuple[BatchRange, ...]:
    """The length of most goodput at each batch size, never longer at a larger one."""
    if not wish.by_batch or lengths is None or problem.method not in problem.engine.schedules:
        return ()
    spec, replicas = problem.candidate.speculation, problem.candidate.deployment.replicas
    keeps_slo = spec.kind == "specserve" and spec.slo_aware
    found: list[BatchRange] = []
    shortest = wish.longest
    for batch in range(1, problem.candidate.max_batch + 1):
        length = lengths.best(
            float(batch * replicas), slo_tpot=problem.plan.slo.tpot if keeps_slo else None
        )
        if wish.max_rows is not None:
            length = min(length, max(wish.max_rows // batch - 1, 0))
        shortest = min(shortest, length)
        if found and found[-1].length == shortest:
            found[-1] = replace(found[-1], last=batch)
        else:
            found.append(BatchRange(batch, batch, shortest))
    return tuple(found) if found[0].length else ()


def _simulated(
    problem: Problem, setup: Setup, unit: int | None, lengths: Lengths | None
) -> Candidate | None:
    """What the simulator knows that is most like the setup."""
    old = problem.candidate
    if unit is None:
        return None
    depth = setup.depth
    if setup.schedule and lengths is not None:
        each = max(round(problem.running / old.deployment.replicas), 1)
        depth = next(part.length for part in setup.schedule if each <= part.last)
    spec = chain_of(old.speculation, depth)
    if setup.is_tree:
        spec = SpeculationSpec(
            kind="eagle" if old.speculation.kind == "eagle" else "tree",
            rows=setup.rows,
            width=setup.width,
            expansions=setup.depth,
            feature_decay=old.speculation.feature_decay,
        )
    known = str(setup.prefill_gpus) in problem.fit.costs
    prefill = setup.prefill_gpus if known else old.deployment.prefill_workers
    deployment = Deployment(unit, 0, old.deployment.replicas, prefill)
    return Candidate(deployment, spec, old.max_batch)
