"""Charts of a search and its plan. Shapes and dashes differ as well as colours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from codesign.dashboard.chart_parts import COLOURS, GREY, legend, named
from codesign.dashboard.plan_tables import TITLES, Figure, on_front
from codesign.dashboard.what_if_charts import SPAN_NAMES

BRUSH = "brush"
_HEIGHT = 380


def pareto_chart(
    table: pd.DataFrame, x: str, y: str, *, best: str, figures: Mapping[str, Figure] = TITLES
) -> Any:
    """Rows of ``candidate_table`` by two figures, with ranges, front, brush, the best ringed.

    Args:
        table: Rows.
        x: Name of the figure across.
        y: Of the one upwards.
        best: Label of the plan to ring.
        figures: See ``figures_of``; without an attainment there is no SLO to meet.
    """
    has_slo = "slo_attainment" in figures
    shown = table.loc[table[[x, y]].notna().all(axis=1)]
    shown = shown.assign(
        front=np.where(on_front(shown, x, y), "on the front", "beaten in both"),
        chosen=np.where(shown["plan"] == best, "chosen", shown["family"]),
    )
    axis_x = alt.X(f"{x}:Q", title=figures[x].title, scale=_scale(shown, x))
    axis_y = alt.Y(f"{y}:Q", title=figures[y].title, scale=_scale(shown, y))
    families = legend(columns=2)
    base = alt.Chart(shown)
    ranges = base.transform_filter(alt.datum.front == "on the front")
    layers = [
        base.mark_line(strokeDash=[4, 3], color=GREY, strokeWidth=1.2)
        .transform_filter(alt.datum.front == "on the front")
        .encode(x=axis_x, y=axis_y, order=f"{x}:Q"),
        ranges.mark_rule(opacity=0.5, color=GREY).encode(
            x=alt.X(f"{x}_low:Q", title=figures[x].title), x2=f"{x}_high:Q", y=axis_y
        ),
        ranges.mark_rule(opacity=0.5, color=GREY).encode(
            y=alt.Y(f"{y}_low:Q", title=figures[y].title), y2=f"{y}_high:Q", x=axis_x
        ),
        base.mark_point(size=90, strokeWidth=1.6)
        .encode(
            x=axis_x,
            y=axis_y,
            fill=alt.Fill("family:N", title=None, legend=families),
            stroke=alt.Stroke("family:N", title=None, legend=families),
            shape=alt.Shape("family:N", title=None, legend=families),
            fillOpacity=alt.FillOpacity(
                "meets:N",
                scale=alt.Scale(domain=["yes", "no"], range=[0.9, 0.0]),
                legend=_hollow_legend() if has_slo else None,
            ),
            opacity=alt.condition(alt.datum.front == "on the front", alt.value(1), alt.value(0.5)),
            tooltip=[
                alt.Tooltip("plan:N"),
                alt.Tooltip(f"{x}:Q", format=",.3~g", title=figures[x].title),
                alt.Tooltip(f"{y}:Q", format=",.3~g", title=figures[y].title),
                *([alt.Tooltip("meets:N", title="meets the SLO")] if has_slo else []),
                alt.Tooltip("front:N", title="trade-off"),
            ],
        )
        .add_params(alt.selection_interval(name=BRUSH)),
        base.transform_filter(alt.datum.chosen == "chosen")
        .mark_point(shape="circle", size=500, strokeWidth=2.5, color=GREY, filled=False)
        .encode(x=axis_x, y=axis_y),
    ]
    return alt.layer(*layers).properties(height=_HEIGHT)


def _hollow_legend() -> alt.Legend:
    return alt.Legend(
        title="meets the SLO",
        orient="top",
        symbolFillColor=GREY,
        symbolStrokeColor=GREY,
        columns=2,
    )


def _scale(table: pd.DataFrame, name: str) -> alt.Scale:
    """Logarithmic where values differ by more than 20 times."""
    values = np.asarray(table[name], np.float64)
    if len(values) and values.min() > 0 and values.max() > 20 * values.min():
        return alt.Scale(type="log", nice=False, padding=20)
    return alt.Scale(zero=False, padding=20)


def convergence_chart(table: pd.DataFrame, title: str) -> Any:
    """Every simulation in ``convergence_table``, and the best so far on each stretch."""
    stretches = list(dict.fromkeys(table["stretch"]))
    colour = alt.Color("stretch:N", sort=stretches, title="simulated", legend=legend(columns=2))
    base = alt.Chart(table).encode(x=alt.X("simulation:Q", title="simulation"))
    points = base.mark_point(size=28).encode(
        y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False)),
        color=colour,
        shape=alt.Shape("stretch:N", sort=stretches, title="simulated"),
        tooltip=[
            alt.Tooltip("plan:N"),
            alt.Tooltip("value:Q", format=".3~g", title=title),
            alt.Tooltip("stretch:N", title="simulated"),
        ],
    )
    best = base.mark_line(interpolate="step-after", strokeWidth=1.8).encode(
        y="best:Q", color=colour
    )
    return alt.layer(best, points).properties(height=230)


def two_rounds_chart(spans: pd.DataFrame) -> Any:
    """Where a round's time goes in two candidates, a bar each, from their ``span_table``."""
    spans = spans.loc[spans["ms"] > 0]
    table = spans.assign(
        name=[SPAN_NAMES[name] for name in spans["span"]],
        order=[list(COLOURS).index(name) for name in spans["span"]],
    )
    there = set(spans["span"])
    colours = {SPAN_NAMES[name]: colour for name, colour in COLOURS.items() if name in there}
    return (
        alt.Chart(table)
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X("sum(ms):Q", title="mean of a round, ms"),
            y=alt.Y("plan:N", title=None, sort=None, axis=alt.Axis(labelLimit=260)),
            color=named(alt.Color, "name:N", colours),
            order=alt.Order("order:O"),
            tooltip=[
                alt.Tooltip("plan:N"),
                alt.Tooltip("name:N", title="part"),
                alt.Tooltip("ms:Q", format=".3~g"),
            ],
        )
        .properties(height=260)  # legend and axis are part of it
    )
