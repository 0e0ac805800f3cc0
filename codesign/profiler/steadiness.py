"""Whether a machine kept its pace while it was profiled: small steps are timed again later.

A host has slow phases of some seconds in which small steps take several percent more, and a profile
may lie in one as a whole. They only add: where these steps are faster later, all are timed anew
and the second series counts. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from codesign.profiler.steps import Effort, Group, StepShape

if TYPE_CHECKING:
    import pandas as pd

CHECK = Effort(0.4, 3, 3)
TOLERANCE = 0.03  # change from which a phase is called slow
_ROWS = 8  # more are less of the host's
_OF_HOST = {"loop", "reroot", "link"}
_SHAPE = ["op", "rows", "requests", "context", "beside"]


def small_steps(groups: Sequence[Group]) -> list[Group]:
    """What is timed again: steps of one request, of target and draft, nothing beside them."""
    chosen = [
        replace(group, shapes=tuple([s for s in group.shapes if _is_small(s)]))
        for group in groups
        if not group.beside
    ]
    return [group for group in chosen if group.shapes]


def without_prompts(groups: Sequence[Group]) -> list[Group]:
    """What is timed anew after a slow phase: prompts are long, and not the host's."""
    chosen = [
        replace(group, shapes=tuple([s for s in group.shapes if "prefill" not in s.op]))
        for group in groups
    ]
    return [group for group in chosen if group.shapes]


def quicker(first: Sequence[pd.DataFrame], again: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Two series of what lies between steps: of the host's own seconds the quicker of each kind.

    A series takes a fraction of a second, a slow phase some. Steps of GPUs count in both.
    """
    kept: list[pd.DataFrame] = []
    for pair in zip(first, again, strict=True):
        is_host = set(pair[0]["op"]) | set(pair[1]["op"]) <= _OF_HOST
        kept += [min(pair, key=_pace)] if is_host else pair
    return kept


def _pace(series: pd.DataFrame) -> float:
    return float(np.median(series["seconds"])) if len(series) else inf


def change(first: pd.DataFrame, again: pd.DataFrame) -> float:
    """By how much shapes of ``again`` took longer than in ``first``, relative to it.

    The median over the shapes of target or draft, of whichever changed more: the host is a small
    part of a large target's steps.
    """
    before, after = (frame.groupby(_SHAPE)["seconds"].median() for frame in (first, again))
    changes = (after / before).dropna().groupby("op").median() - 1.0
    return float(max(changes, key=abs, default=0.0))


def _is_small(shape: StepShape) -> bool:
    return shape.op in ("target", "draft") and shape.requests == 1 and shape.rows <= _ROWS
