"""The cases that goals are looked up in: by rooflines, by measured step times, measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.policies.cases import BATCHES, POLICIES, SEGMENTS
from benchmarks.policies.figures import Results, below
from benchmarks.policies.load_map import best_split, points
from benchmarks.policies.measured_rows import Row, rows_of

Cases = Mapping[str, Mapping[str, Mapping[str, Any]]]  # figures by case and policy
Kinds = tuple[Cases, Cases, Cases]  # by rooflines, by measured step times, measured


def kinds_of(results: Results) -> Kinds:
    """The cases of each kind."""
    return _cases(results), _pair_cases(results), _run_cases(rows_of(results))


def _cases(results: Results) -> Cases:
    """By rooflines: each trace, batch and point of the map; the better split of asynchronous."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for segment in SEGMENTS:
        for part, label in (("traces", "own rate"), ("chunks", "chunked")):
            if found := below(results, f"{part}/h100x8/{segment}"):
                cases[f"{segment}, {label}"] = found
    for batch in BATCHES:
        if found := below(results, f"batches/h100x8/{batch}"):
            cases[f"batch of {batch}"] = found
    for key, figures in below(results, "lengths/h100x8").items():
        case, _, policy = key.partition("/")
        cases.setdefault(f"{case}, the paper's lengths", {})[policy] = figures
    for (machine, segment, load), point in points(results).items():
        ways = [(policy, best_split(point, policy)) for policy in POLICIES]
        found = {policy: way[1] for policy, way in ways if way}
        cases[f"{machine} {segment} at {load:g}"] = found
    return dict(cases)


def _pair_cases(results: Results) -> Cases:
    """By measured step times."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for key, figures in below(results, "pairs").items():
        pair, segment, load, policy = key.split("/")
        sizes = re.findall(r"-([\d.]+b)", pair)
        case = f"{' + '.join(sizes).upper()}, {segment} at {load}"
        cases.setdefault(case, {})[policy] = figures
    return dict(cases)


def _run_cases(rows: Iterable[Row]) -> Cases:
    found: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for row in rows:  # a label does not say which GPU
        gpu = f" ({str(row.about['machine']).split()[1]})" if row.label in found else ""
        found[row.label + gpu] = row.found
    return found
