"""Whether a machine kept its pace while it was profiled: small steps are timed again later.

A host has slow phases of some seconds in which small steps take several percent more, and a profile
may lie in one as a whole. They only add: where these steps are faster later, all are timed anew
and the second series counts. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from codesign.fit.drift import SHAPE
from codesign.profiler.steps import Effort, Group, StepShape

if TYPE_CHECKING:
    import pandas as pd

CHECK = Effort(0.4, 3, 3)
TOLERANCE = 0.03  # change from which a phase is called slow
_ROWS = 8  # more are less of the host's


def small_steps(groups: Sequence[Group]) -> list[Group]:
    """What is timed again: steps of one request, of target and draft, nothing beside them."""
    return _those([group for group in groups if not group.beside], _is_small)


def without_prompts(groups: Sequence[Group]) -> list[Group]:
    """What is timed anew after a slow phase: prompts are long, and not the host's."""
    return _those(groups, lambda shape: "prefill" not in shape.op)


def _those(groups: Sequence[Group], wanted: Callable[[StepShape], bool]) -> list[Group]:
    chosen = [replace(g, shapes=tuple([s for s in g.shapes if wanted(s)])) for g in groups]
    return [group for group in chosen if group.shapes]


def change(first: pd.DataFrame, again: pd.DataFrame) -> float:
    """By how much shapes of ``again`` took longer than in ``first``, relative to it.

    The median over the shapes of target or draft, of whichever changed more: the host is a small
    part of a large target's steps.
    """
    before, after = (frame.groupby(SHAPE)["seconds"].median() for frame in (first, again))
    changes = (after / before).dropna().groupby("op").median() - 1.0
    return float(max(changes, key=abs, default=0.0))


def _is_small(shape: StepShape) -> bool:
    return shape.op in ("target", "draft") and shape.requests == 1 and shape.rows <= _ROWS
