"""Steps that a profile times, and in which order.

A pass times each shape once, in a new random order, so that a machine that slows down or speeds up
does so for all alike. Which shapes: grids.py. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np

from codesign.fit.children import NODES, WIDE

Op = Literal["target", "prefill", "draft", "draft_prefill", "reroot", "choice", "drafted", "wide"]

LEAST_SHARE = 0.1  # of the mean context
_MOST_LEAVES = 4  # that one forward runs of a tree
_WIDE_ROWS = 16  # of the widest trees that campaigns and plans have


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step to time.

    Attributes:
        op: Which step.
        requests: Requests in it.
        rows: Rows of each request; for prefills its prompt tokens, for "drafted" forwards in a row.
        context: KV rows of each request before it; of several, their mean.
    """

    op: Op
    requests: int
    rows: int
    context: int = 0

    @property
    def contexts(self) -> tuple[int, ...]:
        """KV rows of each request, (requests,): they differ, as those of traffic do.

        A step takes longer than one of equal contexts, as the longest are attended last. They are
        what requests drawn evenly from ``LEAST_SHARE`` of the mean to as much above it are expected
        to have, least first.
        """
        shares = [(i + 1) / (self.requests + 1) for i in range(self.requests // 2)]
        least = [int(self.context * (LEAST_SHARE + 2 * (1 - LEAST_SHARE) * s)) for s in shares]
        most = [2 * self.context - rows for rows in reversed(least)]
        return (*least, *[self.context] * (self.requests % 2), *most)

    @property
    def tree_rows(self) -> int:
        """Rows of the tree that a draft's forward is timed of; each gets one child less than these.

        Two to four leaves are staged as trees have them: of twice as many rows, or of ``WIDE``.
        """
        if self.op == WIDE:
            return _WIDE_ROWS
        return 2 * self.rows if self.is_tree else self.rows + 1

    @property
    def is_tree(self) -> bool:
        """Whether a draft's forward is of a tree of some levels."""
        return 1 < self.rows <= _MOST_LEAVES


@dataclass(frozen=True, slots=True)
class Group:
    """Shapes that are timed under the same circumstances.

    Attributes:
        shapes: What to time.
        beside: The partner runs at the same time.
        prepare: Brings the circumstances about.
        in_order: Times the shapes as they stand, in every pass.
    """

    shapes: tuple[StepShape, ...]
    beside: bool
    prepare: Callable[[], None]
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: passes go on until the seconds are used up, within bounds.

    Prompts are long: they are timed in the fewest passes only.
    """

    seconds: float
    min_passes: int
    max_passes: int

    def of_each(self, visits: int) -> Effort:
        """What one of so many visits takes."""
        least, most = (math.ceil(n / visits) for n in (self.min_passes, self.max_passes))
        return Effort(self.seconds / visits, least, most)


def prompts_last(groups: Sequence[Group]) -> list[Group]:
    """The same with each pass's prompts behind all else, from short to long.

    A long prompt takes more power than a GPU may: its clock falls, and stays low for a while.
    """
    steps, prompts = [], []
    for group in groups:
        long = sorted([s for s in group.shapes if "prefill" in s.op], key=_size)
        others = tuple([s for s in group.shapes if s not in long])
        steps.append(replace(group, shapes=others))
        prompts.append(replace(group, shapes=tuple(long), in_order=True))
    return [group for group in (*steps, *prompts) if group.shapes]


def time_groups(
    groups: Sequence[Group],
    seconds_of: Callable[[StepShape], float],
    *,
    effort: Effort,
    seed: int | np.random.Generator,
    tick: Callable[[float], None],
) -> Iterator[dict[str, Any]]:
    """Time every group once per pass; the rows of steps.parquet, but for the deployment.

    Args:
        groups: What to time.
        seconds_of: Runs one step and returns its seconds.
        effort: When to stop.
        seed: Of the order within a pass; or what draws it, so that visits differ.
        tick: Called after each timing with the share of the work done, 0 to 1.
    """
    generator = np.random.default_rng(seed)
    start = perf_counter()
    for group in groups:  # warm up: the largest of each kind, not recorded
        group.prepare()
        for shape in {s.op: s for s in sorted(group.shapes, key=_size)}.values():
            seconds_of(shape)
    for number in range(effort.max_passes):
        if number >= effort.min_passes and perf_counter() - start > effort.seconds:
            break
        for group in groups:
            group.prepare()
            is_early = number < effort.min_passes
            chosen = [s for s in group.shapes if is_early or "prefill" not in s.op]
            order = range(len(chosen)) if group.in_order else generator.permutation(len(chosen))
            for shape in [chosen[index] for index in order]:
                yield _row(shape, group.beside, seconds_of(shape))
                used = (perf_counter() - start) / effort.seconds
                tick(min(max(used, number / effort.max_passes), 1.0))


def _row(shape: StepShape, beside: bool, seconds: float) -> dict[str, Any]:
    row = {
        "op": shape.op,
        "rows": shape.requests * shape.rows,
        "requests": shape.requests,
        "context": sum(shape.contexts),
        "beside": beside,
        "seconds": seconds,
    }
    if shape.op in ("draft", WIDE):
        row[NODES] = row["rows"] * (shape.tree_rows - 1)
    return row


def _size(shape: StepShape) -> int:
    return shape.requests * (shape.rows + shape.context)
