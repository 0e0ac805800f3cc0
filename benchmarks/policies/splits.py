"""Measured pairs on four GPUs, simulated: one group of all, or a draft with GPUs of its own?

    python -m benchmarks.compare_policies splits

As pairs.py, with the shipped fits' steps of four H200s: the same requests at the same share of what
plain decoding bears there, by policies that take turns on all four and by asynchronous batch trees
on each split.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pages import markdown
from benchmarks.policies.cases import SEGMENTS
from benchmarks.policies.figures import ASYNC, SERIAL, SPECSERVE, Results, below
from benchmarks.policies.gpu_runs import Row, rows_of
from benchmarks.policies.pairs import requests_at, simulated
from benchmarks.policies.segments import target_of
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT

WHOLE, SPLITS = "4", ("3+1", "2+2")
LOADS = (0.1, 0.3, 0.7, 1.2)
AHEAD = 1.01  # times another policy's goodput, from which one counts as ahead
WAYS = (
    *(f"{policy} on {WHOLE}" for policy in ("plain", "chain-1", SPECSERVE, SERIAL)),
    *(f"{ASYNC} on {split}" for split in SPLITS),
)
_SHOWN = WAYS[2:]
LEAST_IN_SLO = 0.05  # of SpecServe's requests: goodput of fewer is luck
_POLICIES = ("plain", SPECSERVE, SERIAL, ASYNC)  # that rows of four GPUs have
_CLOSE = 0.02  # as two runs of one policy may be apart
Case = tuple[str, str, str]  # pair, trace, load


def measure(store: Any, traces: Path | None) -> None:
    """All pairs, traces, loads and ways."""
    for path in sorted(DEFAULT_FIT.parents[1].glob("h200-*/fit.json")):
        fit = Fit.load(path)
        slo = target_of(fit.costs[WHOLE])
        for name in SEGMENTS:
            for load in LOADS:
                requests = requests_at(name, traces, fit.costs[WHOLE], load)
                for way in WAYS:
                    policy, _, deployment = way.partition(" on ")
                    pair = path.parent.name.removeprefix("h200-")
                    store.get(
                        f"splits/{pair}/{name}/{load}/{way}",
                        partial(simulated, requests, fit, policy, deployment, slo),
                    )


def cases_of(results: Results) -> dict[Case, dict[str, Mapping[str, Any]]]:
    """Figures of each way, by pair, trace and load."""
    found: dict[Case, dict[str, Mapping[str, Any]]] = {}
    for key, figures in below(results, "splits").items():
        pair, trace, load, way = key.split("/", 3)
        found.setdefault((pair, trace, load), {})[way] = figures
    return found


def goodput_lead(ways: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Goodput of the asynchronous batch tree on its better split over SpecServe's, if any."""
    theirs = ways[f"{SPECSERVE} on {WHOLE}"]
    if theirs["slo_attainment"] < LEAST_IN_SLO:
        return None
    return max(ways[f"{ASYNC} on {split}"]["goodput"] for split in SPLITS) / theirs["goodput"]


def leads_of(results: Results) -> dict[Case, float]:
    """``goodput_lead`` of each case that has one."""
    found = {case: goodput_lead(ways) for case, ways in cases_of(results).items()}
    return {case: lead for case, lead in found.items() if lead is not None}


def splits_section(results: Results) -> str:
    """Where which split wins, by steps measured on four H200s."""
    cases = cases_of(results)
    if not cases:
        return ""
    loads = list(dict.fromkeys(load for _, _, load in cases))
    places = list(dict.fromkeys(case[:2] for case in cases))
    names = [(pair.replace("-int4", ""), trace) for pair, trace in places]
    head = ("pair, int4", "trace", *(f"load {load}" for load in loads))
    rows = [
        (*name, *(_speedups(cases[*place, load]) for load in loads))
        for name, place in zip(names, places, strict=True)
    ]
    leads = leads_of(results)
    ahead = sum(lead >= AHEAD for lead in leads.values())
    behind = sum(lead < 0.98 for lead in leads.values())
    return f"""\
## Four GPUs by measured steps: load x split

As in the section before, with the steps of four H200s (the shipped fits) and loads as a share of
what plain decoding bears on all four. Speedup in mean latency over plain decoding on four of
{" / ".join(_SHOWN)}; the best in bold:

{markdown(head, rows)}

Goodput, where SpecServe attains 5 % or more: the asynchronous batch tree on its better split has at
least 1 % more in {ahead} of {len(leads)} cases ({_places(leads)}), and is more than 2 % behind
in {behind}.{_measured(results)}"""


def measured_rows(results: Results) -> list[Row]:
    """What was measured on four GPUs with a split."""
    return [row for row in rows_of(results) if row.gpus == int(WHOLE) and row.split]


def measured_lead(row: Row, kind: str = "measured") -> float | None:
    """``goodput_lead`` of a row, measured or "simulated" for the same requests."""
    ours, theirs = (
        f if kind == "measured" else f["simulated"]
        for f in (row.found[ASYNC], row.found[SPECSERVE])
    )
    if theirs["slo_attainment"] < LEAST_IN_SLO:
        return None
    return ours["goodput"] / theirs["goodput"]


def _measured(results: Results) -> str:
    """How far measured points agree with the map."""
    said, same, rows = [], 0, measured_rows(results)
    for row in rows:
        speed = {policy: row.speedup(policy) or (0.0, 0.0) for policy in _POLICIES}
        best = [max(speed, key=lambda p, kind=kind: speed[p][kind]) for kind in (0, 1)]
        same += best[0] == best[1] or _is_close(speed[best[0]], speed[best[1]])
        measured, simulated = speed[ASYNC]
        text = f"{row.label.replace(', 4 GPUs', '')} {measured:.2f} ({simulated:.2f})"
        leads = measured_lead(row), measured_lead(row, "simulated")
        if leads[0] is not None and leads[1] is not None:
            text += f", goodput {leads[0]:.2f} ({leads[1]:.2f})"
        said.append(text)
    if not said:
        return ""
    return f"""

**Measured** ([below](#measured-on-gpus)): speedup of {ASYNC} on {rows[0].split} over plain
decoding, in brackets as simulated for the same requests, and goodput over SpecServe's on four,
with {rows[0].about["batch"]} at once: {"; ".join(said)}.
The policy that is simulated to be the fastest is so, or within {_CLOSE:.0%} of the fastest, in
{same} of {len(said)} points."""


def _is_close(best: tuple[float, float], expected: tuple[float, float]) -> bool:
    """Whether the policy that was expected to be the best is hardly behind, as measured."""
    return expected[0] >= (1.0 - _CLOSE) * best[0]


def _places(leads: Mapping[Case, float]) -> str:
    """Where the asynchronous batch tree is ahead, by pair."""
    found: dict[str, list[str]] = {}
    for (pair, trace, load), lead in leads.items():
        if lead >= AHEAD:
            found.setdefault(pair.replace("-int4", ""), []).append(f"{trace} at {load} {lead:.2f}")
    return "; ".join(f"{pair}: {', '.join(cases)}" for pair, cases in found.items())


def _speedups(ways: Mapping[str, Mapping[str, Any]]) -> str:
    plain = ways[WAYS[0]]["latency_mean"]
    ratios = [plain / ways[way]["latency_mean"] for way in _SHOWN]
    return " / ".join(
        f"**{ratio:.2f}**" if ratio == max(ratios) else f"{ratio:.2f}" for ratio in ratios
    )
