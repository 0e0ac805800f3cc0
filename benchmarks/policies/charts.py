"""Pictures of ``compare_policies.py`` as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

Rows = Sequence[dict[str, Any]]

COLOURS = [
    "#9aa0a6", "#f2b701", "#e68310", "#cf1c90", "#a5aa99", "#7f3c8d", "#b0563a",
    "#3f87d6", "#8fb8e8", "#11a579", "#80ba5a", "#e73f74", "#1a5276", "#000000",
]  # fmt: skip
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
_SCALE = 2.0  # pixels per unit of the page


def bars(rows: Rows, path: Path) -> None:
    """Speedup of each policy, one panel per trace."""
    order = list(dict.fromkeys(row["policy"] for row in rows))
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        y=alt.Y("policy:N", sort=order, title=None, axis=alt.Axis(labelLimit=260)),
        x=alt.X("value:Q", title="speedup over plain decoding"),
    )
    bar = base.mark_bar(color="#3f87d6")
    text = base.mark_text(align="left", dx=3, fontSize=10).encode(
        text=alt.Text("value:Q", format=".2f")
    )
    chart = (bar + text).properties(width=230, height=320)
    _write(chart.facet(column=alt.Column("trace:N", title=None, sort=None)), path)


def lines(rows: Rows, path: Path, *, x: str, y: str, is_log: bool = False) -> None:
    """A line per policy."""
    order = list(dict.fromkeys(row["policy"] for row in rows))
    scale = alt.Scale(type="log", base=2) if is_log else alt.Scale(zero=False)
    chart = (
        alt.Chart(alt.Data(values=list(rows)))
        .mark_line(point=alt.OverlayMarkDef(size=45, filled=True))
        .encode(
            x=alt.X("x:Q", scale=scale, title=x),
            y=alt.Y("value:Q", scale=alt.Scale(zero=False), title=y),
            color=_colour(order),
            shape=alt.Shape("policy:N", sort=order, scale=alt.Scale(range=SHAPES), legend=None),
        )
        .properties(width=520, height=340)
    )
    _write(chart, path)


def over_time(rows: Rows, path: Path) -> None:
    """Batch size above draft tokens, one column per trace."""
    order = list(dict.fromkeys(row["policy"] for row in rows))
    chart = (
        alt.Chart(alt.Data(values=list(rows)))
        .mark_line(strokeWidth=1.3)
        .encode(
            x=alt.X("second:Q", title="seconds"),
            y=alt.Y("value:Q", title=None),
            color=_colour(order, ["#e68310", "#7f3c8d", "#3f87d6", "#000000"]),
            row=alt.Row("what:N", title=None),
            column=alt.Column("trace:N", title=None, sort=None),
        )
        .properties(width=270, height=130)
        .resolve_scale(y="independent", x="independent")
    )
    _write(chart, path)


def _colour(order: Sequence[str], colours: Sequence[str] = COLOURS) -> alt.Color:
    return alt.Color(
        "policy:N",
        sort=list(order),
        title=None,
        scale=alt.Scale(domain=list(order), range=list(colours)),
        legend=alt.Legend(labelLimit=260),
    )


def _write(chart: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = chart.configure(background="white").to_dict()
    path.write_bytes(vl_convert.vegalite_to_png(spec, scale=_SCALE))
