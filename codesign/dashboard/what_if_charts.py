"""Charts of one prediction. Lines differ in dash as well as in colour, bars carry their numbers.

Channels are written out (``alt.X2("high:Q")``, not ``x2="high:Q"``): Altair looks every text up in
its whole schema, which would take longer than all the rest of a chart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from codesign.dashboard.chart_parts import COLOURS, GREY
from codesign.dashboard.records_frames import BOTH, column
from codesign.validate.charts import SPAN_COLOURS

SPAN_NAMES = {
    "prefill": "prompts before it",
    "target": "target verifies",
    "draft": "waiting for the draft",
    "reroot": "re-rooting",
    "link_there": "message to the draft",
    "link_back": "message back",
}
GROUP_NAMES = {"target": "target's GPUs", "draft": "draft's GPUs", BOTH: "GPUs of both"}
TOKEN_NAMES = {"drafted": "draft tokens verified", "emitted": "tokens emitted"}
_DASHES = ([1, 0], [6, 3], [2, 2])
_LIMIT = "#d9534a"
_HEIGHT = 230
_LITTLE = 0.002  # of a round


def latency_chart(latency: pd.DataFrame, figure: str, limit: float | None, percent: float) -> Any:
    """Share of requests by TTFT or TPOT, with the range that is expected, and the target.

    Args:
        latency: As ``records_frames.Frames.latency``.
        figure: "ttft" or "tpot".
        limit: The SLO's target in seconds; None for none.
        percent: Share of requests that must meet it.
    """
    rows = latency.loc[latency["figure"] == figure]
    table = pd.DataFrame(
        {
            "share": rows["percent"] / 100.0,
            "ms": 1000.0 * rows["value"],
            "low": 1000.0 * rows["low"],
            "high": 1000.0 * rows["high"],
        }
    )
    table = table.loc[table["low"] > 0]
    title = f"{figure.upper()}, ms"
    base = alt.Chart(table).encode(
        y=alt.Y("share:Q", title="share of requests", axis=alt.Axis(format="%")),
        tooltip=[
            alt.Tooltip("share:Q", format=".0%", title="share of requests"),
            alt.Tooltip("ms:Q", format=",.3~g", title=title),
            alt.Tooltip("low:Q", format=",.3~g", title="from"),
            alt.Tooltip("high:Q", format=",.3~g", title="to"),
        ],
    )
    scale = alt.Scale(type="log", nice=False)
    band = base.mark_area(opacity=0.25, orient="horizontal").encode(
        x=alt.X("low:Q", scale=scale, title=title, axis=alt.Axis(tickCount=6)), x2=alt.X2("high:Q")
    )
    line = base.mark_line(strokeWidth=2, orient="horizontal").encode(
        x=alt.X("ms:Q", scale=scale), order=alt.Order("share:Q")
    )
    layers = [band, line]
    if limit is not None:
        middle = float(np.sqrt(table["low"].min() * table["high"].max()))  # of the log scale
        at_left = 1000.0 * limit < middle
        layers += _limit_layers(1000.0 * limit, percent / 100.0, at_left=at_left)
    return alt.layer(*layers).properties(height=_HEIGHT)


def _limit_layers(limit: float, share: float, *, at_left: bool) -> list[Any]:
    """The target; its words are on the side that has room for them."""
    at = alt.Chart(pd.DataFrame({"ms": [limit], "share": [share], "text": [f"SLO {limit:g} ms"]}))
    rule = at.mark_rule(color=_LIMIT, strokeDash=[5, 3], strokeWidth=1.5).encode(x=alt.X("ms:Q"))
    point = at.mark_point(color=_LIMIT, shape="cross", size=70, filled=True).encode(
        x=alt.X("ms:Q"), y=alt.Y("share:Q")
    )
    align, shift = ("left", 5) if at_left else ("right", -5)
    text = at.mark_text(color=_LIMIT, align=align, dx=shift, baseline="bottom", dy=2).encode(
        x=alt.X("ms:Q"), y=alt.YDatum(0.02), text=alt.Text("text:N")
    )
    return [rule, point, text]


def running_chart(over_time: pd.DataFrame, max_batch: int) -> Any:
    """Requests that run at once over the length of the run, and how many may on all replicas."""
    rows = over_time.loc[over_time["series"] == "running"]
    band, line = _band_and_line(rows, "requests running")
    layers = [band, line]
    if column(rows, "high").max(initial=0.0) > 0.6 * max_batch:
        table = pd.DataFrame({"limit": [max_batch], "text": [f"batch limit {max_batch}"]})
        at = alt.Chart(table).encode(y=alt.Y("limit:Q"))
        layers.append(at.mark_rule(color=GREY, strokeDash=[5, 3]))
        layers.append(
            at.mark_text(color=GREY, align="left", baseline="bottom", dx=4).encode(
                x=alt.XValue(0), text=alt.Text("text:N")
            )
        )
    return alt.layer(*layers).properties(height=_HEIGHT)


def tokens_chart(over_time: pd.DataFrame) -> Any:
    """Draft tokens verified and tokens emitted, per request and round, over time."""
    return _named_lines(over_time, TOKEN_NAMES, "tokens a round")


def busy_chart(over_time: pd.DataFrame) -> Any:
    """Share of the time in which each group of workers computes, over time."""
    return _named_lines(over_time, GROUP_NAMES, "share of time busy", form="%")


def spans_chart(spans: pd.DataFrame) -> Any:
    """Bars of the mean spans of a round, each with its milliseconds and their range."""
    total = column(spans, "value").sum()
    shown = spans.loc[spans["value"] > _LITTLE * total]
    table = pd.DataFrame(
        {
            "span": shown["span"],
            "name": [SPAN_NAMES[name] for name in shown["span"]],
            "ms": 1000.0 * column(shown, "value"),
            "low": 1000.0 * column(shown, "low"),
            "high": 1000.0 * column(shown, "high"),
            "share": column(shown, "value") / max(total, 1e-12),
        }
    )
    table["text"] = [
        f"{ms:.3g} ms ({share:.0%})" for ms, share in zip(table["ms"], table["share"], strict=True)
    ]
    axis = alt.Axis(labelLimit=200, labelOverlap=False)
    base = alt.Chart(table).encode(
        y=alt.Y("name:N", title=None, sort=list(SPAN_NAMES.values()), axis=axis),
        tooltip=[
            alt.Tooltip("name:N", title="span"),
            alt.Tooltip("ms:Q", format=".3~g", title="ms"),
            alt.Tooltip("low:Q", format=".3~g", title="from"),
            alt.Tooltip("high:Q", format=".3~g", title="to"),
        ],
    )
    room = 1.35 * column(table, "high").max(initial=1e-3)  # for the numbers
    bars = base.mark_bar(height={"band": 0.6}).encode(
        x=alt.X("ms:Q", title="mean of a round, ms", scale=alt.Scale(domain=[0, room])),
        color=alt.Color(
            "span:N",
            legend=None,
            scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())),
        ),
    )
    ranges = base.mark_rule(strokeWidth=1.5, color=GREY).encode(
        x=alt.X("low:Q"), x2=alt.X2("high:Q")
    )
    text = base.mark_text(align="left", dx=6, color=GREY).encode(
        x=alt.X("high:Q"), text=alt.Text("text:N")
    )
    return alt.layer(bars, ranges, text).properties(height=max(46 * len(table), 90))


def _band_and_line(rows: pd.DataFrame, title: str) -> tuple[Any, Any]:
    base = alt.Chart(rows).encode(
        x=alt.X("time:Q", title="seconds", scale=alt.Scale(nice=False)),
        tooltip=[
            alt.Tooltip("time:Q", format=",.0f", title="second"),
            alt.Tooltip("value:Q", format=".3~g", title=title),
            alt.Tooltip("low:Q", format=".3~g", title="from"),
            alt.Tooltip("high:Q", format=".3~g", title="to"),
        ],
    )
    band = base.mark_area(opacity=0.25).encode(y=alt.Y("low:Q", title=title), y2=alt.Y2("high:Q"))
    return band, base.mark_line(strokeWidth=1.8).encode(y=alt.Y("value:Q"))


def _named_lines(
    over_time: pd.DataFrame, names: Mapping[str, str], title: str, *, form: str = ""
) -> Any:
    table = over_time.loc[over_time["series"].isin(list(names))]
    table = table.assign(name=[names[key] for key in table["series"]])
    there = [name for name in names.values() if name in set(table["name"])]
    dash = alt.Scale(domain=there, range=[list(dash) for dash in _DASHES[: len(there)]])
    legend = alt.Legend(orient="top", title=None, labelLimit=240, symbolStrokeWidth=2)
    axis = alt.Axis(format=form) if form else alt.Undefined
    number = form or ".3~g"
    base = alt.Chart(table).encode(
        x=alt.X("time:Q", title="seconds", scale=alt.Scale(nice=False)),
        tooltip=[
            alt.Tooltip("name:N", title="line"),
            alt.Tooltip("time:Q", format=",.0f", title="second"),
            alt.Tooltip("value:Q", format=number, title=title),
            alt.Tooltip("low:Q", format=number, title="from"),
            alt.Tooltip("high:Q", format=number, title="to"),
        ],
    )
    up = alt.Y("low:Q", title=title, axis=axis, scale=alt.Scale(zero=True))
    # A colour by name would make the legend one of areas.
    bands = [
        base.transform_filter(alt.datum.name == name)
        .mark_area(opacity=0.25, color=colour)
        .encode(y=up, y2=alt.Y2("high:Q"))
        for name, colour in zip(there, SPAN_COLOURS.values(), strict=False)
    ]
    line = base.mark_line(strokeWidth=1.8).encode(
        y=alt.Y("value:Q"),
        color=alt.Color("name:N", sort=there, legend=legend),
        strokeDash=alt.StrokeDash("name:N", scale=dash, legend=legend),
    )
    return alt.layer(*bands, line).properties(height=_HEIGHT)
