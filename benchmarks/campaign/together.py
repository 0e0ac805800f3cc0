"""Which goals are met: all pairs of a machine together, as single pairs have few runs each.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.campaign import rows
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
    covered,
    length_error,
    mean_error,
    percent,
    replay_error,
    span_error,
    worst_error,
)
from benchmarks.campaign.rows import Row
from codesign.records import SPANS


def _points(value: float) -> str:
    return f"{100.0 * value:.1f} points"


@dataclass(frozen=True, slots=True)
class Judged:
    """A cell that says what a machine reached, and whether that is what was asked for.

    Attributes:
        value: The figure; None where nothing tells it.
        most: It may be.
        least: It may be.
        shown: As text.
    """

    value: Callable[[Result], float | None]
    most: float = 1.0
    least: float = 0.0
    shown: Callable[[float], str] = percent

    def __call__(self, machine: Result) -> str:
        """The cell."""
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


def _counted(machine: Result) -> str:
    return f"{len(machine.runs('stream'))}; {len(machine.runs())}"


def _choices(machine: Result) -> str:
    return str(len(_of_plans(machine, "regret")))


ROWS = (
    Row(*rows.SPEED_HEAD, Judged(mean_error, SPEED)),
    Row(*rows.WORST_HEAD, Judged(worst_error, WORST_SPEED)),
    Row(*rows.LENGTH_HEAD, Judged(length_error, LENGTH)),
    *(
        Row(*rows.span_head(span), Judged(partial(span_error, span=span), SPAN))
        for span in SPANS[:3]
    ),
    *(
        Row(*rows.replay_head(name), Judged(partial(replay_error, name=name), REPLAY))
        for name in REPLAYED
    ),
    Row(
        "replay: SLO attainment, worst error",
        f"{100.0 * ATTAINMENT:g} points",
        Judged(attainment_error, ATTAINMENT, shown=_points),
    ),
    Row("regret, the most of any choice", percent(REGRET, 0), Judged(_regret, REGRET)),
    Row(
        "rank correlation, the least",
        f"{CORRELATION:g}",
        Judged(_correlation, least=CORRELATION, shown=lambda value: f"{value:.3f}"),
    ),
    Row(
        *rows.COVERAGE_HEAD,
        Judged(_coverage, COVERAGE[1], COVERAGE[0], shown=lambda value: percent(value, 0)),
    ),
    Row("streams; all runs", "", _counted),
    Row("choices of a plan", "", _choices),
)


def together(results: Sequence[Result]) -> str:
    """Each goal, over all pairs of a machine: what was reached, and whether it is met."""
    merged = [_merged(machine, results) for machine in dict.fromkeys(r.machine for r in results)]
    heads = ["all pairs together", "goal", *(result.machine for result in merged)]
    return "### Goals\n\n" + rows.table_of(ROWS, merged, heads)


def _merged(machine: str, results: Sequence[Result]) -> Result:
    parts = [result.pair for result in results if result.machine == machine]
    runs, plans = ([each for part in parts for each in part[name]] for name in ("runs", "plans"))
    return Result(machine, {"pair": "all pairs", "runs": runs, "plans": plans})
