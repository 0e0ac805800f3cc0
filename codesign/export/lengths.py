"""Lengths of chains and sizes of trees that a policy leaves open, by the planner's own arithmetic.

Recorded acceptance and fitted step times, as in the planner's screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.export.problem import Problem
from codesign.export.setup import BatchRange
from codesign.export.wishes import Wish
from codesign.planner.behaviour import token_shares
from codesign.planner.economics import Decoding
from codesign.planner.ranking import NOTICEABLE
from codesign.planner.screen import behaviours_of
from codesign.planner.search_space import TREE_ROWS, TREE_WIDTHS
from codesign.planner.workload import Workload
from codesign.policy.speculation import SpeculationSpec

Shape = tuple[int, int, int]  # depth, width and rows of a tree, root included


class Lengths:
    """Seconds per token of chains of each length, drafted in turn with the target."""

    def __init__(self, problem: Problem, unit: int, longest: int) -> None:
        self._problem, self._unit, self._longest = problem, unit, longest

    @cached_property
    def _chains(self) -> list[Decoding]:
        """Of each length; trees and lengths that are set need none."""
        old = self._problem.candidate.speculation
        specs = [chain_of(old, length) for length in range(self._longest + 1)]
        return _decodings(self._problem, self._unit, specs)

    def best(self, running: float, *, least: int = 0, slo_tpot: float | None = None) -> int:
        """The length that decodes fastest with so many requests on all copies.

        Args:
            running: Requests.
            least: Shortest length to consider.
            slo_tpot: Seconds that no round may take but one without a draft; None for no limit.
        """
        seconds = self.seconds(running)
        if slo_tpot is not None:
            late = [chain.fastest_round(running)[0] > slo_tpot for chain in self._chains]
            seconds = np.where([False, *late[1:]], np.inf, seconds)
        return least + int(np.argmin(seconds[least:]))

    def seconds(self, running: float) -> NDArray[np.float64]:
        """(longest + 1,) seconds per token of one request."""
        batch = np.array([running])
        return np.array([chain.seconds_per_token(batch)[0] for chain in self._chains])


def _decodings(problem: Problem, unit: int, specs: Sequence[SpeculationSpec]) -> list[Decoding]:
    """Policies on one group of GPUs for each copy."""
    fit, requests, old = problem.fit, problem.requests, problem.candidate
    behaviours = behaviours_of(specs, fit, token_shares(requests, fit.answers))
    context = Workload.of(requests).context
    deployment = Deployment(unit, 0, old.deployment.replicas)
    return [
        Decoding(Candidate(deployment, spec, old.max_batch), fit, behaviours[spec], context)
        for spec in specs
    ]


def best_shape(problem: Problem, unit: int, asked: Shape, deepest: int) -> Shape:
    """The tree or chain that decodes fastest; the one asked for if none is noticeably faster.

    Of drafts that take turns with the target each forward is waited for, so that the size that was
    best beside the target may be far from it.

    Args:
        problem: With the plan's mean batch.
        unit: GPUs of one copy.
        asked: With the most rows and leaves that are considered.
        deepest: Most forwards of a round.
    """
    depths = range(1, max(asked[0], deepest) + 1)
    widths = {*(width for width in TREE_WIDTHS if width < asked[1]), asked[1]}
    rows = {*range(2, TREE_ROWS[0]), *TREE_ROWS, asked[2]}
    sizes = product(depths, sorted(widths), sorted(n for n in rows if n <= asked[2]))
    shapes = [asked, *(shape for shape in sizes if shape == within_pool(shape))]
    old = problem.candidate.speculation
    # Chains as trees of one leaf too: two ways to reckon differ by more than siblings pay.
    decodings = _decodings(problem, unit, [tree_of(old, shape) for shape in shapes])
    batch = np.array([problem.running])
    seconds = [float(each.seconds_per_token(batch)[0]) for each in decodings]
    best = int(np.argmin(seconds))
    return shapes[best] if seconds[best] < (1.0 - NOTICEABLE) * seconds[0] else asked


def within_pool(shape: Shape) -> Shape:
    """As deep as a path of so many rows, and with no more rows than drafting by levels finds.

    The first forward gives ``width`` nodes, each later one as many below each of ``width`` leaves.
    """
    depth, width, rows = shape
    depth = min(depth, rows - 1)
    return depth, width, min(rows, 1 + width + (depth - 1) * width**2)


def with_siblings(shape: Shape) -> Shape:
    """With two leaves a forward at least: engines that draft by levels make a chain of one leaf."""
    depth, width, rows = shape
    return depth, max(width, 2), rows


def tree_of(spec: SpeculationSpec, shape: Shape) -> SpeculationSpec:
    """The tree of a shape that a policy's drafter can propose, in turn with the target."""
    depth, width, rows = shape
    return SpeculationSpec(
        kind="eagle" if spec.kind == "eagle" else "tree",
        rows=rows,
        width=width,
        expansions=depth,
        feature_decay=spec.feature_decay,
    )


def chain_of(spec: SpeculationSpec, length: int) -> SpeculationSpec:
    """The chain of a length that a policy's drafter can propose; plain decoding for 0."""
    if length == 0:
        return SpeculationSpec()
    if spec.kind == "eagle":
        return replace(spec, is_async=False, rows=length + 1, width=1, expansions=length)
    return SpeculationSpec(kind="chain", max_depth=length)


def one_length(problem: Problem, wish: Wish, lengths: Lengths | None) -> int:
    """The length of all rounds: the plan's, the best predicted, or what the plan expects."""
    if wish.is_fixed:
        return wish.longest
    if lengths is not None:
        return lengths.best(problem.running, least=1)
    tokens = problem.scored.predicted.get("acceptance_length")
    expected = wish.longest if tokens is None else max(round(tokens.value), 1)
    return min(expected, wish.longest)


def keeps_slo(spec: SpeculationSpec) -> bool:
    """Whether no round of a policy's schedule may take longer than the TPOT target."""
    return spec.kind == "specserve" and spec.slo_aware


def schedule_of(problem: Problem, wish: Wish, lengths: Lengths | None) -> tuple[BatchRange, ...]:
    """The length of most goodput at each batch size, never longer at a larger one."""
    if not wish.by_batch or lengths is None or problem.method not in problem.engine.schedules:
        return ()
    replicas = problem.candidate.deployment.replicas
    slo_tpot = problem.plan.slo.tpot if keeps_slo(problem.candidate.speculation) else None
    found: list[BatchRange] = []
    shortest = wish.longest
    for batch in range(1, problem.candidate.max_batch + 1):
        length = lengths.best(float(batch * replicas), slo_tpot=slo_tpot)
        if wish.max_rows is not None:
            length = min(length, max(wish.max_rows // batch - 1, 0))
        shortest = min(shortest, length)
        if found and found[-1].length == shortest:
            found[-1] = replace(found[-1], last=batch)
        else:
            found.append(BatchRange(batch, batch, shortest))
    return tuple(found) if found[0].length else ()
