"""When the parts of a round run, in seconds: serial on one group of workers, or two in lockstep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from codesign.policy.ahead import asked
from codesign.policy.cost import RoundCost
from codesign.policy.host_cost import SEVERAL
from codesign.sim.tape_batch import LedgerRows
from codesign.sim.work import Prompts, Work

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Spans:
    """What the target waited for and did in a round, in seconds; as in records.RoundRecord."""

    target: float
    link_there: float = 0.0
    link_back: float = 0.0
    reroot: float = 0.0
    draft: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.target + self.link_there + self.link_back + self.reroot + self.draft


def draft_seconds(cost: RoundCost, work: Work) -> tuple[float, float]:
    """Seconds of the draft forwards before the candidates and beside the verification.

    With what deciding about them and choosing the candidates takes. Prompts are in one of the two.
    Whoever sits the round out is drafted for as well.
    A forward of prompts alone costs nothing besides, but where prompts run apart: there the roots
    of all requests share the forward that follows.
    """
    running, look = work.running, cost.look(work.running)
    choosing = 0.0 if work.rests else cost.choices(running, work.rows + work.num_sitting)
    drafting, overlapped = work.drafting, work.overlapped
    prompts = cost.draft_prompt.of_prompts(work.prompts) if work.prompts else 0.0
    if work.prompts and cost.draft_prefill.apart:
        if work.is_prompt_overlapped:
            overlapped = _with_roots(overlapped, work.prompts)
        else:
            drafting = _with_roots(drafting, work.prompts)
    before = _seconds(cost, drafting, running) + choosing + look * work.looks
    beside = _seconds(cost, overlapped, running) + look * work.looks_beside
    return (before, beside + prompts) if work.is_prompt_overlapped else (before + prompts, beside)


def moving_seconds(cost: RoundCost, work: Work) -> float:
    """Seconds of the re-root, which grows with what the draft runs in a round."""
    if work.rests:
        return 0.0
    drafted = sum([rows for rows, _ in (*work.drafting, *work.overlapped)])
    return cost.reroots(work.running, drafted) + cost.keeping(work.kept_trees, work.kept_nodes)


def _step(cost: RoundCost, prefill: float, work: Work) -> float:
    """Seconds of the target's step; ``prefill``: of the prompts before it."""
    step = asked(cost.target) if work.num_sitting or work.is_asked else cost.target
    seconds = step(work.rows, work.context, work.batch)
    return seconds + cost.joining if prefill else seconds


def _with_roots(forwards: Sequence[tuple[int, int]], prompts: Prompts) -> list[tuple[int, int]]:
    """Forwards, of which the first has the roots of new requests, too."""
    (rows, context), *others = forwards or [(0, 0)]
    before = sum([rows - 1 + context for rows, context in prompts])
    return [(rows + len(prompts), context + before), *others]


def _seconds(cost: RoundCost, forwards: Iterable[tuple[int, int]], batch: int) -> float:
    """Seconds of a row of draft forwards."""
    total = 0.0
    for rows, context in forwards:
        if rows:
            total += cost.draft(rows, context, batch)
    return total + cost.first_alone if total and batch < SEVERAL else total


class Timing(Protocol):
    """Says when the parts of a round run."""

    def run_prompts(self, start: float, prompts: Prompts) -> float:
        """The draft runs prompt rows in a step of the target; seconds that the step gets longer.

        Args:
            start: When the step starts, in seconds since the start of the run.
            prompts: (rows, KV rows before them) of each prompt.
        """
        ...

    def spans(self, start: float, prefill: float, work: Work) -> Spans:
        """Spans of a round that starts at ``start`` with ``prefill`` seconds of prompts.

        Args:
            start: Seconds since the start of the run.
            prefill: Seconds of the target's prompts.
            work: What the round runs.
        """
        ...


def timing_of(cost: RoundCost, *, is_apart: bool, is_plain: bool = False) -> Timing:
    """The timing of one replica: target and draft apart, or taking turns on the same workers."""
    return ApartTiming(cost) if is_apart else TogetherTiming(cost, is_plain=is_plain)


class TogetherTiming:
    """Draft and target take turns on the same workers."""

    def __init__(self, cost: RoundCost, *, is_plain: bool) -> None:
        self._cost = cost
        self._is_plain = is_plain

    def spans(self, start: float, prefill: float, work: Work) -> Spans:
        target = _step(self._cost, prefill, work)
        if self._is_plain:
            return Spans(target)
        drafting, _ = draft_seconds(self._cost, work)
        return Spans(target, reroot=moving_seconds(self._cost, work), draft=drafting)

    def of_sums(
        self,
        rows: int,
        context: int,
        forwards: Sequence[int],
        batch: int,
        kept: tuple[int, int] = (0, 0),
    ) -> tuple[float, float, float]:
        """Seconds of the target, the draft and the re-root in a round without prompts.

        Args:
            rows: That the target verifies.
            context: KV rows before them.
            forwards: Of each draft forward its rows, then the KV rows before them.
            batch: Requests.
            kept: Trees that the re-root kept, and nodes but their roots.
        """
        target = self._cost.target(rows, context, batch)
        if self._is_plain:
            return target, 0.0, 0.0
        pairs = zip(forwards[::2], forwards[1::2], strict=True)
        drafting = _seconds(self._cost, pairs, batch) + self._cost.choices(batch, rows)
        moving = self._cost.reroots(batch, sum(forwards[::2])) + self._cost.keeping(*kept)
        return target, drafting, moving

    def spans_ahead(self, rounds: LedgerRows) -> tuple[Floats, Floats, Floats]:
        """(N,) target, draft and re-root seconds of many rounds."""
        cost, batch = self._cost, rounds.batch
        target = cost.target.of_arrays(rounds.rows, rounds.context, batch)
        drafting = np.zeros(len(target))
        if self._is_plain:
            return target, drafting, drafting
        forward_rows = rounds.forward_rows
        forwards = cost.draft.of_arrays(forward_rows, rounds.forward_context, batch)
        for seconds in np.where(forward_rows > 0, forwards, 0.0).T:  # one by one, as they are run
            drafting += seconds
        drafted = forward_rows.sum(axis=1)
        if batch < SEVERAL:
            drafting += cost.first_alone * (drafted > 0)
        moving = cost.reroots(batch) + cost.reroot_row * drafted
        trees, nodes = (kept.astype(np.float64) for kept in (rounds.kept_trees, rounds.kept_nodes))
        moving += cost.keeping(trees, nodes)
        choosing = cost.choices(batch) + cost.choice_row * rounds.rows
        return target, drafting + choosing, moving

    def run_prompts(self, start: float, prompts: Prompts) -> float:
        return 0.0 if self._is_plain else self._cost.draft_prompt.of_prompts(prompts)


class ApartTiming:
    """Draft and target on workers of their own, one verdict and one answer a round.

    The verdict leaves at the start of the round. The draft takes it once its overlapped forwards
    are done, re-roots, makes the forwards that it must, answers, and goes on to the overlapped
    forwards of this round. The target runs prompts meanwhile, then waits for the answer.
    """

    def __init__(self, cost: RoundCost) -> None:
        self._cost = cost
        self._draft_free = 0.0

    def spans(self, start: float, prefill: float, work: Work) -> Spans:
        cost = self._cost
        late = max(self._draft_free - start, 0.0)
        link = link_there = cost.message(work.batch if work.rests else work.running)
        heard = start + late + link  # what it is busy with, it takes up afterwards
        drafting, overlapped = draft_seconds(cost, work)
        moving = moving_seconds(cost, work)
        answered = heard + moving + drafting
        ready = start + prefill
        received = max(answered + link, ready)
        self._draft_free = answered + overlapped
        target = _step(cost, prefill, work)
        if overlapped:
            target = slowed(target, max(self._draft_free - received, 0.0), cost.slowdown)
        # What a prefill has hidden is what came first.
        left = received - ready
        spans = []
        for seconds in (link, drafting, moving, link_there, late):
            spans.append(min(left, seconds))
            left -= spans[-1]
        link_back, waiting, reroot, link_there, late = spans
        return Spans(target, link_there, link_back, reroot, waiting + late)

    def run_prompts(self, start: float, prompts: Prompts) -> float:
        seconds = self._cost.draft_prompt.of_prompts(prompts)
        self._draft_free = max(self._draft_free, start) + seconds
        return 0.0


def slowed(seconds: float, beside: float, slowdown: float) -> float:
    """Seconds of a forward that shares the machine with ``beside`` seconds of the other model.

    Args:
        seconds: Of the forward alone.
        beside: Seconds for which the other model will go on from now.
        slowdown: Seconds lost for each second of both.
    """
    stretched = seconds + slowdown * beside
    return stretched if beside <= stretched else seconds / (1.0 - slowdown)


def shared_step(cost: RoundCost, work: Work | None, prompts: Prompts) -> float:
    """Seconds that prompt rows add to the forward of a round which they share.

    Weights are read once for both, so a forward of all rows costs what a prefill of as many does,
    and the decoding rows' context on top; where engines run both in one forward, that is.

    Args:
        cost: Of the deployment.
        work: The round; None if nobody decodes.
        prompts: Rows of each prompt in the step, and KV rows before them.
    """
    if work is None or cost.prefill.apart or not cost.shares_forwards:
        return cost.prefill.of_prompts(prompts)
    alone = _step(cost, 0.0, work)
    together = cost.prefill.of_prompts(prompts, work.rows)
    return max(together + cost.target.alpha * work.context - alone, 0.0)
