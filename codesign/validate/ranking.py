"""The order in which candidates were measured, beside the one that was predicted.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.planner.ranking import clear_gain

if TYPE_CHECKING:
    from codesign.validate.comparison import Comparison, RunComparison


@dataclass(frozen=True, slots=True)
class Ranking:
    """The order of the candidates by one figure.

    Attributes:
        figure: What they are ordered by.
        predicted: Labels, best first.
        measured: Labels, best first.
        num_pairs: Pairs of candidates.
        num_tied: Pairs without a predicted order: the difference is not noticeable (below 1 %), or
            the luck of the seeds, as the planner has it. Candidates share seeds and the fit's
            error, so that a pair can be told apart although the intervals of both overlap.
        num_wrong: Other pairs that were measured the other way round.
        regret: What the plan's choice loses to the best measured candidate, relative to that; None
            if the choice was not run.
        correlation: Spearman's, of predictions and measurements; None of fewer than three.
    """

    figure: str
    predicted: tuple[str, ...]
    measured: tuple[str, ...]
    num_pairs: int
    num_tied: int
    num_wrong: int
    regret: float | None
    correlation: float | None = None


def rank(runs: Sequence[RunComparison], figure: str, more_is_better: bool, chosen: str) -> Ranking:
    """Order candidates; of one that was run several times the measurements are averaged."""
    sign = -1.0 if more_is_better else 1.0
    grouped: dict[str, list[Comparison]] = {}
    for run in runs:
        comparison = run.figure(figure)
        if comparison is not None and comparison.error is not None and not run.num_unfinished:
            grouped.setdefault(run.label, []).append(comparison)
    predicted = {label: group[0].predicted for label, group in grouped.items()}
    measured = {
        label: float(np.mean([c.measured for c in group])) for label, group in grouped.items()
    }
    by_seed = {run.label: run.by_seed[figure] for run in runs if figure in run.by_seed}
    pairs = list(combinations(sorted(grouped), 2))
    apart = [(a, b) for a, b in pairs if clear_gain(by_seed[a], by_seed[b])]
    wrong = [
        (a, b)
        for a, b in apart
        if (predicted[a].value < predicted[b].value) != (measured[a] < measured[b])
    ]
    best = min(measured.values(), key=lambda value: sign * value, default=0.0)
    loss = sign * (measured[chosen] - best) / best if chosen in measured and best else None
    return Ranking(
        figure=figure,
        predicted=tuple(sorted(grouped, key=lambda label: sign * predicted[label].value)),
        measured=tuple(sorted(grouped, key=lambda label: sign * measured[label])),
        num_pairs=len(pairs),
        num_tied=len(pairs) - len(apart),
        num_wrong=len(wrong),
        regret=loss,
        correlation=rank_correlation([predicted[a].value for a in measured], [*measured.values()]),
    )


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's coefficient: 1 for the same order. None of fewer than three, or without order.

    Args:
        one: Values; equal ones share their rank.
        other: Values of the same things.
    """
    if len(one) < 3:
        return None
    ranks = [_ranks(np.asarray(values, np.float64)) for values in (one, other)]
    apart = [r - r.mean() for r in ranks]
    scale = math.sqrt(float((apart[0] ** 2).sum() * (apart[1] ** 2).sum()))
    return float((apart[0] * apart[1]).sum()) / scale if scale else None


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    below = (values[:, None] > values[None, :]).sum(axis=1)
    equal = (values[:, None] == values[None, :]).sum(axis=1)
    return below + 0.5 * (equal - 1)
