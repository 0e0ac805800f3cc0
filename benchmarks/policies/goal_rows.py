"""Goals that compare policies case by case: the worst of each kind, and how many missed it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.policies.figures import ASYNC, NEEDED, SERIAL, SPECSERVE
from benchmarks.policies.goal_cases import Cases, Kinds

FIXED = ("chain-1", "chain-3", "chain-5")
Cells = tuple[str, ...]


def speed_row(
    asked: str, kinds: Kinds, rivals: Iterable[str], ours: Iterable[str], needed: float = NEEDED
) -> Cells:
    """The best of ``ours`` against the best of ``rivals``, by mean latency."""
    rivals, ours = tuple(rivals), tuple(ours)

    def ratio(_: str, found: Mapping[str, Mapping[str, Any]]) -> float | None:
        theirs = [found[r]["latency_mean"] for r in rivals if r in found]
        own = [found[o]["latency_mean"] for o in ours if o in found]
        return min(theirs) / min(own) if theirs and own else None

    return row_of(asked, kinds, ratio, needed)


def goodput_ratio(case: str, found: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Goodput of the batch trees over SpecServe's, where there are targets that some meet."""
    if case.startswith("batch of") or SPECSERVE not in found or SERIAL not in found:
        return None
    if found[SPECSERVE]["slo_attainment"] < 0.05:
        return None
    own = max(found[o]["goodput"] for o in (SERIAL, ASYNC) if o in found)
    return own / found[SPECSERVE]["goodput"]


def row_of(
    asked: str,
    kinds: Kinds,
    ratio: Callable[[str, Mapping[str, Mapping[str, Any]]], float | None],
    needed: float = NEEDED,
) -> Cells:
    """A goal, its worst case of each kind, how many missed it, and whether it is met.

    Args:
        asked: In words.
        kinds: The cases.
        ratio: Of a case and its figures by policy; None where the goal says nothing of it.
        needed: Least ratio.
    """
    cells: list[str] = []
    missed: list[int | None] = []
    for cases in kinds:
        ratios = {case: x for case, found in cases.items() if (x := ratio(case, found)) is not None}
        if not ratios:
            cells.append("-")
            missed.append(None)
            continue
        worst = min(ratios, key=ratios.__getitem__)
        count = sum(x < needed for x in ratios.values())
        missed.append(count)
        is_close = ratios[worst] < needed <= round(ratios[worst], 3)
        figure = f"{ratios[worst]:.{4 if is_close else 3}f}: {worst}"
        cells.append(figure + (f" (missed in {count} of {len(ratios)})" if count else ""))
    return asked, *cells, verdict(missed[:-1], missed[-1:])


def verdict(simulated: Sequence[int | None], measured: Sequence[int | None]) -> str:
    """Of how many cases missed the goal, None where there are none."""

    def said(missed: Sequence[int | None]) -> str:
        known = [count for count in missed if count is not None]
        return "-" if not known else "no" if any(known) else "yes"

    return f"simulated: {said(simulated)}, measured: {said(measured)}"


def over_loads_row(asked: str, kinds: Kinds) -> Cells:
    """SpecServe against lengths that stay the same, over the loads at which a trace ran with both.

    Those of a length are two at least.
    """
    rooflines, measured_steps, measured = map(_over_loads, kinds)
    return row_of(asked, (rooflines, measured_steps, measured), _ratio_of_groups, 1.0)


def _over_loads(cases: Cases) -> Cases:
    """Cases that differ in the load alone, as one: mean latency over SpecServe's, by policy."""
    groups: dict[str, list[Mapping[str, Mapping[str, Any]]]] = {}
    for case, found in cases.items():
        if SPECSERVE in found and (group := re.sub(r" at [\d.]+", "", case)) != case:
            groups.setdefault(group, []).append(found)
    return {
        group: {
            policy: {"slower": float(np.mean(ratios))}
            for policy in FIXED
            if len(ratios := [_slower(found, policy) for found in each if policy in found]) > 1
        }
        for group, each in groups.items()
    }


def _slower(found: Mapping[str, Mapping[str, Any]], policy: str) -> float:
    return found[policy]["latency_mean"] / found[SPECSERVE]["latency_mean"]


def _ratio_of_groups(_: str, found: Mapping[str, Mapping[str, Any]]) -> float | None:
    return min((figures["slower"] for figures in found.values()), default=None)
