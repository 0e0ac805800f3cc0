"""Measured pairs on four GPUs, simulated: one group of all, or a draft with GPUs of its own?

    python -m benchmarks.compare_policies splits

As pairs.py, with the shipped fits' steps of four H200s: the same requests at the same share of what
plain decoding bears there, by policies that take turns on all four and by asynchronous batch trees
on each split. And policies on one and the same split: SpecServe with its draft on a GPU of its own,
and plain decoding on the other three, which no plan tries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.pages import markdown
from benchmarks.policies.cases import SEGMENTS
from benchmarks.policies.figures import ASYNC, NEEDED, SERIAL, SPECSERVE, Results, below
from benchmarks.policies.measured_rows import Row, rows_of
from benchmarks.policies.pairs import requests_at, simulated, simulated_as
from benchmarks.policies.segments import BATCH, target_of
from codesign.candidate import Candidate
from codesign.config import SLO, parse_deployment
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.policy.speculation import parse_policy

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
SAME = SPLITS[0]  # where policies are compared on the same split
Case = tuple[str, str, str]  # pair, trace, load
Ways = Mapping[str, Mapping[str, Any]]  # figures by policy and split


def measure(store: Any, traces: Path | None) -> None:
    """All pairs, traces, loads and ways."""
    for path in sorted(DEFAULT_FIT.parents[1].glob("h200-*/fit.json")):
        fit = Fit.load(path)
        slo = target_of(fit.costs[WHOLE])
        for name in SEGMENTS:
            for load in LOADS:
                requests = requests_at(name, traces, fit.costs[WHOLE], load)
                case = f"{path.parent.name.removeprefix('h200-')}/{name}/{load}"
                for way in WAYS:
                    policy, _, deployment = way.partition(" on ")
                    make = partial(simulated, requests, fit, policy, deployment, slo)
                    store.get(f"splits/{case}/{way}", make)
                for policy in ("plain", SPECSERVE, ASYNC):
                    make = partial(_on_split, policy, requests, fit, slo)
                    store.get(f"same-split/{case}/{policy} on {SAME}", make)


def _on_split(policy: str, requests: pd.DataFrame, fit: Fit, slo: SLO) -> dict[str, Any]:
    """Figures of plain decoding by a split's target, or of a policy in turns with its draft there.

    Candidates refuse both: one wastes a GPU, the other has one of the two wait for the other.
    """
    deployment = parse_deployment(SAME)
    if policy == ASYNC:
        return simulated(requests, fit, policy, SAME, slo)
    if policy == "plain":
        target = str(deployment.target_workers)
        fit = replace(fit, costs={target: fit.costs[SAME]})
        return simulated(requests, fit, policy, target, slo)
    candidate = Candidate(deployment, parse_policy(ASYNC), BATCH)
    object.__setattr__(candidate, "speculation", parse_policy(policy))
    return simulated_as(candidate, requests, fit, slo)


def cases_of(results: Results, part: str = "splits") -> dict[Case, dict[str, Mapping[str, Any]]]:
    """Figures of each way, by pair, trace and load."""
    found: dict[Case, dict[str, Mapping[str, Any]]] = {}
    for key, figures in below(results, part).items():
        pair, trace, load, way = key.split("/", 3)
        found.setdefault((pair, trace, load), {})[way] = figures
    return found


def goodput_lead(ways: Ways, on: str = WHOLE, splits: Sequence[str] = SPLITS) -> float | None:
    """Goodput of the asynchronous batch tree on its better split over SpecServe's, if any."""
    theirs = ways[f"{SPECSERVE} on {on}"]
    if theirs["slo_attainment"] < LEAST_IN_SLO:
        return None
    return max(ways[f"{ASYNC} on {split}"]["goodput"] for split in splits) / theirs["goodput"]


def leads_of(results: Results) -> dict[Case, float]:
    """``goodput_lead`` of each case that has one."""
    found = {case: goodput_lead(ways) for case, ways in cases_of(results).items()}
    return {case: lead for case, lead in found.items() if lead is not None}


def same_split(results: Results) -> tuple[Mapping[Case, Ways], dict[Case, float]]:
    """Cases on one and the same split, and where there is one the lead in goodput on it."""
    cases = cases_of(results)
    found: dict[Case, Ways] = {
        case: {**cases[case], **ways} for case, ways in cases_of(results, "same-split").items()
    }
    leads = {case: goodput_lead(ways, SAME, (SAME,)) for case, ways in found.items()}
    return found, {case: lead for case, lead in leads.items() if lead is not None}


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
    behind = sum(lead < NEEDED for lead in leads.values())
    places = _places(leads)
    return f"""\
## Four GPUs by measured steps: load x split

As in ["Where a draft's prompt costs several
steps"](policy-comparison.md#where-a-drafts-prompt-costs-several-steps), with steps of four H200s
and loads as a share of what plain decoding bears on all four. Speedup in mean latency over it of
{" / ".join(_SHOWN)}; best in bold:

{markdown(head, rows)}

Goodput, where SpecServe attains 5 % or more: the asynchronous batch tree on its better split has at
least 1 % more in {ahead} of {len(leads)} cases{f" ({places})" if places else ""}, and is more than
2 % behind in {behind}.{_same(results)}{_measured(results)}"""


def _same(results: Results) -> str:
    """What the asynchronous batch tree is worth where all have the same split."""
    cases, leads = same_split(results)
    if not cases:
        return ""
    worst = {
        rival: _worst(cases, f"{rival} on {SAME}", f"{ASYNC} on {SAME}")
        for rival in (SPECSERVE, "plain")
    }
    ahead = sum(lead >= AHEAD for lead in leads.values())
    behind = [
        f"{sizes_of(case)} {lead:.2f}, {_in_slo(cases[case], ASYNC)} requests within the SLO to "
        f"{_in_slo(cases[case], SPECSERVE)}"
        for case, lead in leads.items()
        if lead < NEEDED
    ]
    return f"""

**On {SAME} alone,** with the draft of SpecServe on the same GPU (simulated; neither plans nor the
engine's command have it; {_num(cases)} requests each), the asynchronous batch
tree has {worst[SPECSERVE]} of SpecServe's speed, and
{worst["plain"]} of plain decoding's on those three GPUs. In goodput it is at least 1 % ahead in
{ahead} of {len(leads)} cases, and more than 2 % behind in {len(behind)}\
{f" ({'; '.join(behind)})" if behind else ""}. So what loses above is the split, not the policy."""


def _num(cases: Mapping[Case, Ways]) -> int:
    """Requests of each case there."""
    return next(iter(cases.values()))[f"{ASYNC} on {SAME}"]["num_requests"]


def _in_slo(ways: Ways, policy: str) -> int:
    figures = ways[f"{policy} on {SAME}"]
    return round(figures["slo_attainment"] * figures["num_requests"])


def _worst(cases: Mapping[Case, Ways], rival: str, ours: str) -> str:
    """Lowest and highest speed, and where it is lowest."""
    speed = {
        c: ways[rival]["latency_mean"] / ways[ours]["latency_mean"] for c, ways in cases.items()
    }
    least = min(speed, key=speed.__getitem__)
    return f"{speed[least]:.3f} ({sizes_of(least)}) to {max(speed.values()):.2f}"


def sizes_of(case: Case) -> str:
    """Such as "70B + 1B, code at 1.2"."""
    pair, trace, load = case
    sizes = " + ".join(re.findall(r"-([\d.]+b)", pair)).upper()
    return f"{sizes}, {trace} at {load}"


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
    """How far measured points agree with the map; their speedups are in a table of their own."""
    said, same, rows = [], 0, measured_rows(results)
    for row in rows:
        speed = {policy: row.speedup(policy) or (0.0, 0.0) for policy in _POLICIES}
        best = [max(speed, key=lambda p, kind=kind: speed[p][kind]) for kind in (0, 1)]
        same += best[0] == best[1] or _is_close(speed[best[0]], speed[best[1]])
        leads = measured_lead(row), measured_lead(row, "simulated")
        if leads[0] is not None and leads[1] is not None:
            said.append(f"{row.label.replace(', 4 GPUs', '')} {leads[0]:.2f} ({leads[1]:.2f})")
    if not rows:
        return ""
    goodput = (
        f" Goodput of {ASYNC} on {rows[0].split} over SpecServe's on four, simulated in brackets"
    )
    return f"""

**Measured** ([tables](policy-measurements.md#measured-on-gpus)), {rows[0].about["batch"]} at once:
the policy that is
simulated to be the fastest is so, or within {_CLOSE:.0%} of the fastest, in {same} of {len(rows)}
points.{f"{goodput}: {'; '.join(said)}." if said else ""}"""


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
