"""Which goals are met: all pairs of a machine together, as single pairs have few runs each.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.campaign.goals import (
    ATTAINMENT,
    CORRELATION,
    COVERAGE,
    LENGTH,
    REGRET,
    REPLAY,
    REPLAYED,
    SPAN,
    SPEED,
    WORST_SPEED,
    Result,
    attainment_error,
    between,
    covered,
    length_error,
    mean_error,
    percent,
    replay_error,
    span_error,
    table,
    worst_error,
)
from codesign.records import SPANS


def _points(value: float) -> str:
    return f"{100.0 * value:.1f} points"


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure of a machine.

    Attributes:
        name: What it is.
        value: The figure; None where nothing tells it.
        most: It may be.
        least: It may be.
        shown: As text.
        says: The goal as text; by default ``most`` percent.
    """

    name: str
    value: Callable[[Result], float | None]
    most: float = 1.0
    least: float = 0.0
    shown: Callable[[float], str] = percent
    says: str = ""

    def row(self, machines: Sequence[Result]) -> list[str]:
        """Of the table."""
        return [self.name, self.says or percent(self.most, 0), *map(self._cell, machines)]

    def _cell(self, machine: Result) -> str:
        value = self.value(machine)
        if value is None:
            return "-"
        is_met = self.least <= value <= self.most
        return f"{self.shown(value)}, met" if is_met else f"**{self.shown(value)}, missed**"


def _of_plans(machine: Result, name: str) -> list[float]:
    """Of each plan that was chosen among several runs, where it is known."""
    plans = [plan for plan in machine.pair["plans"] if plan["num_runs"] > 1]
    return [value for plan in plans if (value := plan.get(name)) is not None]


def _regret(machine: Result) -> float | None:
    return max(_of_plans(machine, "regret"), default=None)


def _correlation(machine: Result) -> float | None:
    return min(_of_plans(machine, "correlation"), default=None)


def _coverage(machine: Result) -> float | None:
    inside = covered(machine)
    return statistics.fmean(inside) if inside else None


GOALS = (
    Goal("decode speed, one stream, mean error", mean_error, SPEED),
    Goal("the same, worst", worst_error, WORST_SPEED),
    Goal("acceptance length, mean error", length_error, LENGTH),
    *(
        Goal(f"span: {span}, mean error", lambda r, span=span: span_error(r, span), SPAN)
        for span in SPANS[:3]
    ),
    *(
        Goal(
            f"replay: {name.replace('_', ' ').upper()}, worst error",
            lambda r, name=name: replay_error(r, name),
            REPLAY,
        )
        for name in REPLAYED
    ),
    Goal(
        "replay: SLO attainment, worst error",
        attainment_error,
        ATTAINMENT,
        shown=_points,
        says=f"{100.0 * ATTAINMENT:g} points",
    ),
    Goal("regret, the most of any choice", _regret, REGRET),
    Goal(
        "rank correlation, the least",
        _correlation,
        least=CORRELATION,
        shown=lambda value: f"{value:.3f}",
        says=f"{CORRELATION:g}",
    ),
    Goal(
        "coverage of 80 % intervals",
        _coverage,
        most=COVERAGE[1],
        least=COVERAGE[0],
        shown=lambda value: percent(value, 0),
        says=between(COVERAGE),
    ),
)


def together(results: Sequence[Result]) -> str:
    """Each goal, over all pairs of a machine: what was reached, and whether it is met."""
    merged = [_merged(machine, results) for machine in dict.fromkeys(r.machine for r in results)]
    rows = [goal.row(merged) for goal in GOALS]
    rows.append(["streams; all runs", "", *map(_counted, merged)])
    rows.append(["choices of a plan", "", *map(_choices, merged)])
    heads = ["all pairs together", "goal", *(result.machine for result in merged)]
    return "### Goals\n\n" + table(heads, rows)


def _merged(machine: str, results: Sequence[Result]) -> Result:
    parts = [result.pair for result in results if result.machine == machine]
    runs, plans = ([each for part in parts for each in part[name]] for name in ("runs", "plans"))
    return Result(machine, {"pair": "all pairs", "runs": runs, "plans": plans})


def _counted(machine: Result) -> str:
    return f"{len(machine.runs('stream'))}; {len(machine.runs())}"


def _choices(machine: Result) -> str:
    return str(len(_of_plans(machine, "regret")))
