"""The draft tree of a replayed round as a chart: what was verified, taken, kept and dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import pandas as pd

from codesign.dashboard.chart_parts import GREY, named
from codesign.errors import counted

if TYPE_CHECKING:
    from codesign.sim.replay import ReplayedRound

# State, colour, shape: no two alike in either.
_STATES = (
    ("last emitted token", "#3f87d6", "square"),
    ("accepted", "#3ea58a", "circle"),
    ("the target's own token", "#8f74c9", "diamond"),
    ("verified, rejected", "#c9618a", "cross"),
    ("drafted, not sent", "#8a9199", "triangle-up"),
    ("drafted meanwhile", "#e0892b", "triangle-right"),
)
_LEAF_HEIGHT, _LEAST_HEIGHT, _MOST_HEIGHT = 34, 150, 700
_AROUND = 170  # legend and axis
_LABELLED = ("accepted", "verified, rejected", "the target's own token")


def tree_table(shown: ReplayedRound, *, with_proposals: bool = False) -> pd.DataFrame:
    """One row per node; with proposals also what the draft named and neither ran nor sent.

    Returns:
        Columns node, parent, depth, place (of the leaves from the top), state, fate ("kept" or
        "dropped"), chance, label.
    """
    nodes = [n for n in range(len(shown.parents)) if with_proposals or _counts(shown, n)]
    places = _places(shown, nodes)
    rows = [
        {
            "node": node,
            "parent": shown.parents[node],
            "depth": shown.depths[node],
            "place": places[node],
            "state": _state(shown, node),
            "fate": "kept" if node in shown.kept else "dropped",
            "chance": shown.chances[node],
        }
        for node in nodes
    ]
    table = pd.DataFrame(rows)
    is_labelled = table["state"].isin(_LABELLED)
    percent = (100 * table["chance"]).round().astype(int).astype(str) + " %"
    return table.assign(label=percent.where(is_labelled, ""))


def tree_chart(shown: ReplayedRound, *, with_proposals: bool = False) -> Any:
    """Nodes by depth; shape and colour say what became of a node, filling whether it is kept."""
    table = tree_table(shown, with_proposals=with_proposals)
    states = [entry for entry in _STATES if entry[0] in set(table["state"])]
    colours = {name: colour for name, colour, _ in states}
    shapes = {name: shape for name, _, shape in states}
    across = {
        "title": "draft tokens after the last emitted one",
        "axis": alt.Axis(tickMinStep=1, format="d", grid=False),
        "scale": alt.Scale(domain=[-0.2, table["depth"].to_numpy().max() + 0.6], nice=False),
    }
    down = {"axis": None, "scale": alt.Scale(reverse=True, padding=14)}
    x, y = alt.X("depth:Q", **across), alt.Y("place:Q", **down)
    base = alt.Chart(table).encode(x=x, y=y)
    edges = _edges(table, shown, across, down)
    nodes = base.encode(
        shape=named(alt.Shape, "state:N", shapes, columns=2),
        color=named(alt.Color, "state:N", colours, columns=2),
        tooltip=[
            alt.Tooltip("state:N"),
            alt.Tooltip("fate:N", title="after the verdict"),
            alt.Tooltip("depth:Q"),
            alt.Tooltip("chance:Q", title="chance of the path", format=".1%"),
        ],
    )
    points = [
        nodes.transform_filter(f"datum.fate == '{fate}'").mark_point(
            size=110, strokeWidth=2, opacity=1.0, filled=fate == "kept"
        )
        for fate in ("dropped", "kept")
    ]
    labels = base.mark_text(dy=-14, fontSize=11, color=GREY).encode(text="label:N")
    height = min(
        max(_LEAF_HEIGHT * (table["place"].to_numpy().max() + 1), _LEAST_HEIGHT), _MOST_HEIGHT
    )
    return alt.layer(edges, *points, labels).properties(height=height + _AROUND)


def round_table(rounds: list[ReplayedRound]) -> pd.DataFrame:
    """One row per round: number from 1, nodes, verified, accepted, emitted, kept, verdict."""
    return pd.DataFrame(
        [
            {
                "round": r.number + 1,
                "nodes": len(r.parents),
                "verified": max(len(r.verified) - 1, 0),
                "accepted": len(r.accepted),
                "emitted": r.num_emitted,
                "kept": len(r.kept),
                "verdict": "hit" if r.is_hit else "miss",
                "ms": 1e3 * r.spans.seconds,
            }
            for r in rounds
        ]
    )


def round_chart(rounds: list[ReplayedRound], chosen: int) -> Any:
    """Tokens that each round emitted, with hits and misses; ``chosen`` counts from 1."""
    table = round_table(rounds)
    x = alt.X("round:Q", title="round of the request", axis=alt.Axis(format="d", tickMinStep=1))
    base = alt.Chart(table)
    colours, shapes = {"hit": "#3ea58a", "miss": "#c9618a"}, {"hit": "circle", "miss": "cross"}
    colour = named(alt.Color, "verdict:N", colours, columns=2)
    shape = named(alt.Shape, "verdict:N", shapes, columns=2)
    stems = base.mark_rule(strokeWidth=2, opacity=0.5).encode(x=x, y="emitted:Q", color=colour)
    points = base.mark_point(size=60, filled=True, opacity=1.0).encode(
        x=x,
        y=alt.Y("emitted:Q", title="tokens emitted", axis=alt.Axis(tickMinStep=1, format="d")),
        color=colour,
        shape=shape,
        tooltip=["round", "verdict", "emitted", "verified", "accepted", "kept", "nodes"],
    )
    here = (
        base.transform_filter(f"datum.round == {chosen}")
        .mark_point(size=220, shape="square", strokeWidth=2, color=GREY, fillOpacity=0)
        .encode(x=x, y="emitted:Q")
    )
    return (stems + points + here).properties(height=210)


def round_sentence(shown: ReplayedRound, num_rounds: int) -> str:
    """What happened in a round, in one line."""
    head = f"Round {shown.number + 1} of {num_rounds}: "
    if not shown.verified:
        return head + (
            "the draft answered for the prompt only, before the first token was known; the target "
            f"emitted {shown.num_emitted} token without it."
        )
    outcome = (
        f"{'every emitted token' if shown.num_emitted > 1 else 'the emitted token'} was in the "
        f"tree, {len(shown.kept)} of {len(shown.parents)} nodes stay"
        if shown.is_hit
        else "the target's own token was not in the tree, which starts again"
    )
    return head + (
        f"{counted(len(shown.verified) - 1, 'draft token')} verified, "
        f"{len(shown.accepted)} accepted; "
        f"{outcome}."
    )


def _edges(
    table: pd.DataFrame, shown: ReplayedRound, across: dict[str, Any], down: dict[str, Any]
) -> Any:
    parents = table.set_index("node")[["depth", "place"]]
    inner = table[table["parent"] >= 0]
    ends = parents.loc[inner["parent"]].to_numpy()
    next_root = [n for n in shown.kept if shown.parents[n] not in shown.kept]
    lines = inner.assign(
        from_depth=ends[:, 0],
        from_place=ends[:, 1],
        is_path=[node in (*shown.accepted, *next_root) for node in inner["node"]],
    )
    return (
        alt.Chart(lines)
        .mark_rule(color=GREY)
        .encode(
            x=alt.X("from_depth:Q", **across),
            x2="depth:Q",
            y=alt.Y("from_place:Q", **down),
            y2="place:Q",
            size=alt.condition("datum.is_path", alt.value(3), alt.value(1)),
            strokeDash=alt.condition(
                "datum.fate == 'kept' || datum.is_path", alt.value([1, 0]), alt.value([3, 3])
            ),
        )
    )


def _counts(shown: ReplayedRound, node: int) -> bool:
    return shown.has_kv[node] or node in shown.verified or node in shown.kept or node == 0


def _state(shown: ReplayedRound, node: int) -> str:
    if node == 0:
        return "last emitted token"
    if node in shown.accepted:
        return "accepted"
    if shown.is_hit and node in shown.kept and shown.parents[node] not in shown.kept:
        return "the target's own token"
    if node in shown.verified:
        return "verified, rejected"
    return "drafted, not sent" if node < shown.num_sent_from else "drafted meanwhile"


def _places(shown: ReplayedRound, nodes: list[int]) -> dict[int, float]:
    """Leaves one below the other, a parent in the middle of its children."""
    children: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        if shown.parents[node] >= 0:
            children[shown.parents[node]].append(node)
    places: dict[int, float] = {}
    order, stack = [], [nodes[0]]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += reversed(children[node])
    for row, leaf in enumerate(node for node in order if not children[node]):
        places[leaf] = float(row)
    for node in reversed(order):
        if children[node]:
            mine = [places[child] for child in children[node]]
            places[node] = (mine[0] + mine[-1]) / 2.0
    return places
