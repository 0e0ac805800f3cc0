"""Tables of a plan: all candidates, the best trade-offs, two of them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from codesign.dashboard.records_frames import column
from codesign.dashboard.words import interval_text, number_text
from codesign.errors import counted
from codesign.slo_figure import slo_figure

if TYPE_CHECKING:
    from codesign.candidate import ScoredCandidate
    from codesign.config import SLO
    from codesign.dashboard.planning import Seen
    from codesign.plan import Plan


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a plan as it is shown.

    Attributes:
        name: In ``ScoredCandidate.predicted``.
        title: For people, with the unit.
        factor: From the figure's unit to the shown one.
        more_is_better: Which way is good.
    """

    name: str
    title: str
    factor: float
    more_is_better: bool


FIGURES = (
    Figure("tpot_slo", "TPOT at the percentile, ms", 1000.0, False),
    Figure("ttft_slo", "TTFT at the percentile, ms", 1000.0, False),
    Figure("tpot_mean", "mean TPOT, ms", 1000.0, False),
    Figure("latency_mean", "mean latency, s", 1.0, False),
    Figure("goodput", "goodput, req/s", 1.0, True),
    Figure("slo_attainment", "in SLO, %", 100.0, True),
    Figure("throughput", "throughput, tokens/s", 1.0, True),
    Figure("acceptance_length", "acceptance length", 1.0, True),
    Figure("mean_batch", "batch", 1.0, True),
)
TITLES = {figure.name: figure for figure in FIGURES}
_OWN_TITLE = "TPOT / target at the percentile, %"
_SLIGHT = 0.0005  # relative change that one decimal of a percent does not show
AXES = ("tpot_slo", "ttft_slo", "latency_mean", "goodput", "throughput")


def figures_of(slo: SLO, *, has_own: bool) -> dict[str, Figure]:
    """Figures by name, as shown of a plan with these targets; without any, none about an SLO.

    Args:
        slo: Common targets.
        has_own: Requests have TPOT targets of their own.
    """
    if not slo.is_set:
        return {name: figure for name, figure in TITLES.items() if name != "slo_attainment"}
    told = slo_figure("tpot", slo, has_own=has_own)
    if told.unit != "%":
        return TITLES
    return TITLES | {"tpot_slo": Figure("tpot_slo", _OWN_TITLE, told.factor, False)}


def candidate_table(plan: Plan, figures: Mapping[str, Figure] = TITLES) -> pd.DataFrame:
    """One row per candidate, best first: what it is, its figures as shown, each with its range."""
    rows = [_row(number, scored, figures) for number, scored in enumerate(plan.scored, 1)]
    return pd.DataFrame(rows)


def _row(number: int, scored: ScoredCandidate, figures: Mapping[str, Figure]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "place": number,
        "plan": scored.label,
        "family": scored.candidate.family,
        "meets": "yes" if scored.is_feasible else "no",
        "load": scored.saturation,
        "simulations": scored.num_seeds,
        "origin": scored.origin,
    }
    for figure in figures.values():
        interval = scored.predicted.get(figure.name)
        if interval is not None:
            row[figure.name] = figure.factor * interval.value
            row[f"{figure.name}_low"] = figure.factor * interval.low
            row[f"{figure.name}_high"] = figure.factor * interval.high
            row[f"{figure.name}_range"] = interval_text(interval, figure.factor)
    return row


def on_front(table: pd.DataFrame, x: str, y: str) -> NDArray[np.bool_]:
    """Which rows no other row beats in one of two figures without losing in the other."""
    first, second = _cost(table, x), _cost(table, y)
    front = np.isfinite(first) & np.isfinite(second)
    for row in np.flatnonzero(front):
        no_worse = (first <= first[row]) & (second <= second[row])
        front[row] = not (no_worse & ((first < first[row]) | (second < second[row]))).any()
    return front


def _cost(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """Values of which less is better; infinite where there is none."""
    if name not in table:
        return np.full(len(table), np.inf)
    values = column(table, name) * (-1.0 if TITLES[name].more_is_better else 1.0)
    return np.where(np.isnan(values), np.inf, values)


def inside(table: pd.DataFrame, brush: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Rows between the least and largest value of each brushed figure; all if none is brushed."""
    kept = np.ones(len(table), bool)
    for name, ends in brush.items():
        if name in table and len(ends) == 2:
            values = column(table, name)
            kept &= (values >= min(ends)) & (values <= max(ends))
    return table.loc[kept]


def side_by_side(
    plan: Plan, one: str, other: str, figures: Mapping[str, Figure] = TITLES
) -> pd.DataFrame:
    """Figures of two candidates, the change from the first to the second, and who is better."""
    left, right = plan.find(one), plan.find(other)
    rows = []
    for figure in figures.values():
        ours, theirs = left.predicted.get(figure.name), right.predicted.get(figure.name)
        if ours is None or theirs is None:
            continue
        change = theirs.value / ours.value - 1.0 if ours.value else 0.0
        is_gain = (change > 0) == figure.more_is_better
        better = "cannot be told apart" if ours.overlaps(theirs) else ("second" if is_gain else (
            "first"))  # fmt: skip
        rows.append(
            {
                "figure": figure.title,
                "first": _shown(ours, figure.factor),
                "second": _shown(theirs, figure.factor),
                "change": f"{change:+.1%}" if abs(change) >= _SLIGHT else "none",
                "better": better if abs(change) >= _SLIGHT else "equal",
            }
        )
    return pd.DataFrame(rows)


def _shown(interval: Any, factor: float) -> str:
    return f"{number_text(factor * interval.value)} ({interval_text(interval, factor)})"


def rival(plan: Plan) -> int:
    """Place in ``plan.scored`` of the best of another policy or split; else of the second."""
    best = plan.chosen.candidate
    others = (
        number
        for number, scored in enumerate(plan.scored)
        if (scored.candidate.speculation, scored.candidate.deployment)
        != (best.speculation, best.deployment)
    )
    return next(others, min(1, len(plan.scored) - 1))


def span_table(plan: Plan, labels: Sequence[str]) -> pd.DataFrame:
    """Mean milliseconds of each part of a round, of several candidates."""
    rows = [
        {"plan": label, "span": name, "ms": 1000.0 * seconds}
        for label in labels
        for name, seconds in plan.find(label).spans.items()
    ]
    return pd.DataFrame(rows, columns=["plan", "span", "ms"])


def convergence_table(seen: Sequence[Seen], objective: str) -> pd.DataFrame:
    """Each simulation's mean TPOT for "latency", else goodput; the best so far of a stretch."""
    name = "tpot_mean" if objective == "latency" else "goodput"
    factor, sign = (1000.0, -1.0) if name == "tpot_mean" else (1.0, 1.0)
    best: dict[int, float] = {}
    rows = []
    for each in seen:
        if name not in each.figures:
            continue
        value = factor * each.figures[name]
        size = each.num_requests
        best[size] = sign * max(sign * value, sign * best.get(size, value))
        rows.append(
            {"simulation": each.number, "plan": each.label, "value": value, "best": best[size],
             "stretch": counted(size, 'request')}
        )  # fmt: skip
    return pd.DataFrame(rows, columns=["simulation", "plan", "value", "best", "stretch"])
