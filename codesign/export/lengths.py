"""Lengths of chains that a policy leaves open, by the planner's own arithmetic.

Recorded acceptance and fitted step times, as in the planner's screen.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.export.problem import Problem
from codesign.export.setup import BatchRange
from codesign.export.wishes import Wish
from codesign.planner.behaviour import token_shares
from codesign.planner.economics import Decoding
from codesign.planner.screen import behaviours_of
from codesign.planner.workload import Workload
from codesign.policy.speculation import SpeculationSpec


class Lengths:
    """Seconds per token of chains of each length, drafted in turn with the target."""

    def __init__(self, problem: Problem, unit: int, longest: int) -> None:
        fit, requests, old = problem.fit, problem.requests, problem.candidate
        specs = [chain_of(old.speculation, length) for length in range(longest + 1)]
        behaviours = behaviours_of(specs, fit, token_shares(requests, fit.answers))
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
            late = [chain.fastest_round(running)[0] > slo_tpot for chain in self._chains]
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
