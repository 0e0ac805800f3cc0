"""Charts of step times and of the floors of a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd

from codesign.dashboard.chart_parts import GREY, named
from codesign.dashboard.profiles import CONTEXTS, FLOOR_PARTS

if TYPE_CHECKING:
    from codesign.policy.cost import StepTime

_COLOURS = ("#3f87d6", "#e0892b", "#3ea58a", "#c9618a")
_SHAPES = ("circle", "square", "triangle-up", "diamond")
_FLOOR_COLOURS = ("#3f87d6", "#e0892b", "#8f74c9", "#3ea58a")
_GRID = 120  # points of a fitted line


def step_chart(time: StepTime, points: pd.DataFrame | None, *, most_rows: int, error: float) -> Any:
    """The fitted time by rows, without context, and the measured shapes less their context.

    Args:
        time: The fit.
        points: As ``measured_points``; None for none.
        most_rows: Where the line ends.
        error: Relative, of the fit; shaded.
    """
    grid = np.unique(np.concatenate([np.linspace(1, most_rows, _GRID), np.arange(1, 17)]))
    line = pd.DataFrame({"rows": grid, "ms": [1e3 * time(float(n), 0.0) for n in grid]})
    line = line.assign(low=line["ms"] / (1.0 + error), high=line["ms"] * (1.0 + error))
    x = alt.X(
        "rows:Q",
        title="rows of the forward",
        scale=alt.Scale(type="symlog", constant=8),
        axis=alt.Axis(values=[1, *(2**n for n in range(1, 20))], format=",d"),
    )
    curve = (
        alt.Chart(line)
        .mark_line(color=GREY, strokeWidth=2)
        .encode(x=x, y=alt.Y("ms:Q", title="ms, without the cost of the context"))
    )
    band = alt.Chart(line).mark_area(color=GREY, opacity=0.2).encode(x=x, y="low:Q", y2="high:Q")
    curve = band + curve
    if points is None:
        return curve.properties(height=340)
    there, title = set(points["group"]), "KV rows before"
    colours = {name: c for name, c in zip(CONTEXTS, _COLOURS, strict=True) if name in there}
    shapes = {name: s for name, s in zip(CONTEXTS, _SHAPES, strict=True) if name in there}
    dots = (
        alt.Chart(points)
        .mark_point(size=60, opacity=0.9, strokeWidth=2)
        .encode(
            x=x,
            y="without_context:Q",
            color=named(alt.Color, "group:N", colours, columns=2, title=title),
            shape=named(alt.Shape, "group:N", shapes, columns=2, title=title),
            tooltip=[
                "rows:Q",
                "requests:Q",
                "context:Q",
                "repetitions:Q",
                alt.Tooltip("ms:Q", title="median, ms", format=".3~g"),
                alt.Tooltip("fastest:Q", title="fastest, ms", format=".3~g"),
                alt.Tooltip("slowest:Q", title="slowest, ms", format=".3~g"),
            ],
        )
    )
    return (curve + dots).properties(height=400)


def floor_chart(table: pd.DataFrame) -> Any:
    """Stacked parts of a forward by number of GPUs, the floor lowest."""
    colours: dict[str, str] = dict(zip(FLOOR_PARTS, _FLOOR_COLOURS, strict=True))
    bars = (
        alt.Chart(table)
        .mark_bar()
        .encode(
            y=alt.Y("gpus:O", title="GPUs"),
            x=alt.X("sum(ms):Q", title="ms of a forward of one row"),
            color=named(alt.Color, "part:N", colours, columns=2),
            order=alt.Order("order:O"),
            tooltip=["gpus:O", "part:N", alt.Tooltip("sum(ms):Q", title="ms", format=".3~g")],
        )
    )
    return bars.properties(height=34 * table["gpus"].nunique() + 120)
