"""Lanes of a run's rounds, simulated above measured, and a round's draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd

from codesign.dashboard.chart_parts import COLOURS, GREY, named
from codesign.errors import InputError
from codesign.timeline import LANE_OF_SPAN, span_edges
from codesign.validate.charts import SPAN_COLOURS

if TYPE_CHECKING:
    from codesign.records import RunRecords

LANES = ("target", "draft", "messages")
SPAN_TITLES = {
    "target": "verify",
    "prefill": "prompts",
    "draft": "draft",
    "reroot": "re-root",
    "link_there": "verdict",
    "link_back": "candidates",
}
# Requests of a plan that are simulated: what a server does depends on those that have come.
FIRST_REQUESTS = 2000
_THIN = ("prefill", "reroot", "link_there")  # told from their neighbour by height, too
_LANE_HEIGHT = 34
_AROUND = 110  # legend and axis
_PALE = 0.4  # of what was simulated
_MS = 1e3


def request_rounds(records: RunRecords, request_id: int) -> pd.DataFrame:
    """The rounds while a request decoded, in order, with their number ``of_request`` from 0.

    Raises:
        InputError: If the run has no such request, or never admitted it.
    """
    request = next((r for r in records.requests if r.request_id == request_id), None)
    if request is None or request.first_token is None:
        raise InputError(f"request {request_id} was not served in this run. Choose another")
    table = records.round_table()
    # A round that ends when the request ends begins before; one that brings its prompt ends after
    # the first token, and is the first one.
    end = np.inf if request.finish is None else request.finish
    span = table["prefill"] + sum(table[name] for name in SPAN_COLOURS)
    is_within = (table["start"] < end - 1e-9) & (table["start"] + span > request.first_token + 1e-9)
    mine = table[is_within & (table["replica"] == request.replica) & (table["batch"] > 0)]
    return mine.assign(of_request=np.arange(len(mine))).reset_index(drop=True)


def lanes(rounds: pd.DataFrame, *, side: str, origin: float) -> pd.DataFrame:
    """One row per span that took time.

    Args:
        rounds: Some of a run's rounds, as ``request_rounds`` gives them.
        side: "simulated" or "measured".
        origin: Seconds of the run that become 0.

    Returns:
        Columns side, lane, row (both in words), span, begin and end (milliseconds), of_request,
        batch, rows, emitted.
    """
    edges = span_edges({str(name): np.asarray(values) for name, values in rounds.items()})
    parts = []
    for span, lane in LANE_OF_SPAN:
        begin, end = edges[span]
        word = "messages" if lane == "link" else lane
        part = pd.DataFrame(
            {
                "side": side,
                "lane": word,
                "row": f"{word}, {side}",
                "span": SPAN_TITLES[span],
                "is_thin": span in _THIN,
                "begin": begin / 1e6 - origin * _MS,
                "end": end / 1e6 - origin * _MS,
                "of_request": rounds["of_request"].to_numpy() + 1,
                "batch": rounds["batch"].to_numpy(),
                "rows": rounds["rows"].to_numpy(),
                "emitted": rounds["num_emitted_tokens"].to_numpy(),
            }
        )
        parts.append(part[part["end"] > part["begin"]])
    return pd.concat(parts, ignore_index=True)


def lane_chart(shown: pd.DataFrame, *, chosen_round: int | None) -> Any:
    """Lanes below each other; of each lane what was simulated, then what was measured.

    Args:
        shown: What ``lanes`` gave, of one or both sides.
        chosen_round: ``of_request`` (from 1) to frame, None for none.
    """
    rows = [
        f"{lane}, {side}"
        for lane in LANES
        for side in ("simulated", "measured")
        if f"{lane}, {side}" in set(shown["row"])
    ]
    there = set(shown["span"])
    colours = {title: COLOURS[name] for name, title in SPAN_TITLES.items() if title in there}
    y = alt.Y(
        "row:N",
        title=None,
        scale=alt.Scale(domain=rows),
        axis=alt.Axis(labelLimit=200, ticks=False, grid=False),
    )
    base = alt.Chart(shown).encode(
        x=alt.X("begin:Q", title="ms", scale=alt.Scale(nice=False, zero=False)),
        x2="end:Q",
        y=y,
        color=named(alt.Color, "span:N", colours, columns=3),
        fillOpacity=alt.condition("datum.side == 'measured'", alt.value(1.0), alt.value(_PALE)),
        tooltip=[
            alt.Tooltip("row:N", title="lane"),
            alt.Tooltip("span:N"),
            alt.Tooltip("of_request:Q", title="round of the request"),
            alt.Tooltip("begin:Q", title="from, ms", format=".2f"),
            alt.Tooltip("end:Q", title="to, ms", format=".2f"),
            alt.Tooltip("batch:Q", title="requests"),
            alt.Tooltip("rows:Q", title="rows verified"),
            alt.Tooltip("emitted:Q", title="tokens emitted"),
        ],
    )
    thick = base.transform_filter("!datum.is_thin").mark_bar(height=_LANE_HEIGHT - 8)
    thin = base.transform_filter("datum.is_thin").mark_bar(height=_LANE_HEIGHT // 3)
    layers = [thick, thin]
    if chosen_round is not None:
        layers.append(_frame(shown, chosen_round, y))
    # The one parameter of a layered chart must stand on one layer.
    layers[0] = layers[0].interactive(bind_y=False)
    return alt.layer(*layers).properties(height=_LANE_HEIGHT * len(rows) + _AROUND)


def _frame(shown: pd.DataFrame, chosen_round: int, y: Any) -> Any:
    """Ticks where the chosen round of each side begins and ends, prompts before it included."""
    mine = shown[shown["of_request"] == chosen_round]
    edges = [
        {"row": row, "at": at}
        for side, spans in mine.groupby("side")
        for row in sorted(set(shown[shown["side"] == side]["row"]))
        for at in (spans["begin"].min(), spans["end"].max())
    ]
    return (
        alt.Chart(pd.DataFrame(edges, columns=["row", "at"]))
        .mark_tick(thickness=2, size=_LANE_HEIGHT - 2, color=GREY)
        .encode(x="at:Q", y=y)
    )


def window(rounds: pd.DataFrame, chosen: int, count: int) -> pd.DataFrame:
    """``count`` rounds around the chosen one, fewer at the ends."""
    first = max(0, min(chosen - count // 2, len(rounds) - count))
    return rounds.iloc[first : first + count]


def served_requests(records: Sequence[RunRecords]) -> list[int]:
    """Requests with two tokens or more that every one of these runs served."""
    sets = [
        {r.request_id for r in run.requests if r.first_token is not None and r.output_tokens > 1}
        for run in records
    ]
    return sorted(set.intersection(*sets)) if sets else []
