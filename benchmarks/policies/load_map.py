"""Section of the page of policies: which policy wins at which load, on which machine and split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.pages import markdown
from benchmarks.policies.cases import LOADS
from benchmarks.policies.figures import ASYNC, SERIAL, SPECSERVE, Results, below

Point = Mapping[str, Mapping[str, Any]]  # figures by "policy on split"
_SHOWN = ("chain-3", SPECSERVE, SERIAL, ASYNC)


def points(results: Results) -> dict[tuple[str, str, float], Point]:
    """Of the map: by machine, trace and load the figures of each "policy on deployment"."""
    found: dict[tuple[str, str, float], dict[str, Mapping[str, Any]]] = {}
    for key, value in below(results, "map").items():
        machine, segment, load, way = key.split("/", 3)
        found.setdefault((machine, segment, float(load)), {})[way] = value
    return dict(found)


def best_split(point: Point, policy: str) -> tuple[str, Mapping[str, Any]] | None:
    """The split on which a policy has the lowest mean latency, and its figures."""
    here = [
        (way.rpartition(" ")[2], figures)
        for way, figures in point.items()
        if way.startswith(f"{policy} ")
    ]
    return min(here, key=lambda item: item[1]["latency_mean"], default=None)


def map_section(results: Results) -> str:
    """Speedups and goodput by load, machine and trace."""
    found = points(results)
    places = list(dict.fromkeys(key[:2] for key in found))
    if not places:
        return ""
    speedups = [(*place, *(_speedups(found.get((*place, x))) for x in LOADS)) for place in places]
    goodput = [(*place, *(_goodput(found.get((*place, x))) for x in LOADS)) for place in places]
    head = ("machine", "trace", *(f"load {load:g}" for load in LOADS))
    return f"""\
## Where which policy wins: load x machine and split

Load 1 is the number of requests per second that plain decoding on all GPUs finishes when all of
them are there from the start. Each cell is of chain-3 / specserve-8 / batch-tree /
async-batch-tree, the last on its better split ({_splits(found.values())}; none on one GPU). First
the speedup in mean latency over plain decoding on all GPUs, the best in bold:

{markdown(head, speedups)}

Goodput, requests per second within the SLO, of plain decoding and then of the same four:

{markdown(head, goodput)}"""


def _speedups(point: Point | None) -> str:
    ways = [best_split(point, policy) for policy in _SHOWN] if point else []
    plain = best_split(point, "plain") if point else None
    if plain is None:
        return "-"
    ratios = [way and plain[1]["latency_mean"] / way[1]["latency_mean"] for way in ways]
    most = max(ratio for ratio in ratios if ratio)
    return " / ".join(
        "-" if not ratio else f"**{ratio:.2f}**" if ratio == most else f"{ratio:.2f}"
        for ratio in ratios
    )


def _goodput(point: Point | None) -> str:
    ways = [best_split(point, policy) for policy in ("plain", *_SHOWN)] if point else []
    return " / ".join(f"{way[1]['goodput']:.2f}" if way else "-" for way in ways)


def _splits(found: Iterable[Point]) -> str:
    ways = [best_split(point, ASYNC) for point in found]
    return ", ".join(dict.fromkeys(way[0] for way in ways if way))
