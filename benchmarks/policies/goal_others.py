"""Goals with rules of their own: crowds, asynchronous trees, the burst, deciding, the CPU.

Each is a row of the table, or None where nothing was measured.
"""

from __future__ import annotations

import re

from benchmarks.policies import crowds, splits
from benchmarks.policies.by_targets import burst_shares
from benchmarks.policies.cases import LOADS, SCALES
from benchmarks.policies.figures import (
    ASYNC,
    MOST_DECIDING,
    NEEDED,
    SERIAL,
    SMALL,
    SPECSERVE,
    Results,
    below,
)
from benchmarks.policies.goal_cases import Kinds
from benchmarks.policies.goal_rows import Cells, speed_row, verdict
from benchmarks.policies.gpu_runs import attained
from benchmarks.policies.load_map import best_split, points
from benchmarks.policies.measured_rows import burst_row
from benchmarks.policies.targets_measured import measured_lead


def crowded_rows(results: Results) -> list[Cells]:
    """Speeds with many at once, which are simulated by measured steps alone."""
    cases = crowds.cases_of(results)
    if not cases:
        return []
    kinds: Kinds = {}, {case.label: found for case, found in cases.items()}, {}
    at_once, slower = crowds.sizes_said(cases), "at most 2 % slower than"
    return [
        speed_row(f"{at_once}, batch tree: {slower} plain", kinds, ("plain",), (SERIAL,)),
        speed_row(f"{at_once}, batch tree: {slower} SpecServe", kinds, (SPECSERVE,), (SERIAL,)),
        speed_row(f"{at_once}, SpecServe: {slower} plain", kinds, ("plain",), (SPECSERVE,)),
    ]


def ahead_row(results: Results) -> Cells | None:
    """At which loads asynchronous batch trees have more goodput than SpecServe."""
    ahead: dict[str, list[str]] = {}
    for (machine, segment, load), point in points(results).items():
        ways = [best_split(point, policy) for policy in (ASYNC, SPECSERVE)]
        ours, theirs = (way[1] if way else None for way in ways)
        if ours is None or theirs is None or theirs["slo_attainment"] < 0.05:
            continue
        if ours["goodput"] > splits.AHEAD * theirs["goodput"]:
            ahead.setdefault(f"{machine} {segment}", []).append(f"{load:g}")
    if not ahead:
        return None
    where = "; ".join(f"{place} at {', '.join(loads)}" for place, loads in ahead.items())
    text = f"1 % or more: {where} (loads up to {LOADS[-1]:g})"
    asked = "asynchronous batch tree: more goodput than SpecServe at some loads"
    return asked, text, _ahead_by_steps(results), *_ahead_measured(results)


def _ahead_measured(results: Results) -> tuple[str, str]:
    """The same as measured on four GPUs, and whether the goal is met."""
    found = {row.label: splits.measured_lead(row) for row in splits.measured_rows(results)}
    leads = {label: lead for label, lead in found.items() if lead is not None}
    if not leads:
        return "not on four or eight GPUs yet; behind on 1+1", "simulated: yes"
    best = max(leads, key=leads.__getitem__)
    ahead = sum(lead >= splits.AHEAD for lead in leads.values())
    text = f"1 % or more in {ahead} of {len(leads)} on four GPUs; {leads[best]:.2f}: {best}"
    return text, f"simulated: yes, measured: {'yes' if ahead else 'no'}"


def _ahead_by_steps(results: Results) -> str:
    """The same on four GPUs, by measured steps."""
    leads = splits.leads_of(results)
    if not leads:
        return "-"
    case, most = max(leads.items(), key=lambda item: item[1])
    ahead = sum(lead >= splits.AHEAD for lead in leads.values())
    best = f"{most:.2f}: {splits.sizes_of(case)}"
    text = f"1 % or more in {ahead} of {len(leads)} on four GPUs; {best}"
    if not (same := splits.same_split(results)[1]):
        return text
    ahead = sum(lead >= splits.AHEAD for lead in same.values())
    behind = sum(lead < NEEDED for lead in same.values())
    return f"{text}. On {splits.SAME} for both: in {ahead} of {len(same)}; 2 % behind in {behind}"


def attainment_row(results: Results) -> Cells | None:
    """By how many points batch trees are above the best other policy in the burst.

    Simulated also served by their targets, over others served alike and first come, first served.
    """
    found = below(results, "traces/h100x8/code")
    row = burst_row(results)
    if SERIAL not in found or row is None:
        return None
    first: dict[str, dict[float, float]] = {
        policy: {
            s: results.get(f"slo/h100x8/code/{policy}/{s}", f)["attainment"][str(s)] for s in SCALES
        }
        for policy, f in found.items()
    }
    by_targets = burst_shares(results)
    cells, leads = [], []
    for ours, theirs, words in (
        (first, first, ""),
        (by_targets, by_targets, "all by their targets"),
        (by_targets, first, "by its targets, others first come, first served"),
    ):
        if SERIAL not in ours:
            continue
        leads.append({s: 100 * (ours[SERIAL][s] - _best_other(theirs, s)) for s in SCALES})
        cells.append(_lowest(leads[-1]) + (f" ({words})" if words else ""))
    pairs = {scale: attained(row, str(scale)) for scale in SCALES}
    measured = {scale: 100 * (ours - others) for scale, (ours, others) in pairs.items()}
    alike = max(min(lead.values()) for lead in leads[:2])  # all served in the same way
    held = [int(alike <= 0), int(min(measured.values()) <= 0)]
    asked = "SLO attainment of batch trees above all others at every scale of the burst"
    said = f"{_lowest(measured)} ({row.label})"
    if (by_targets_too := measured_lead(results)) is not None:
        where, lead = by_targets_too
        said += f"; {_lowest(lead)} (by targets, {where})"
    return asked, "; ".join(cells), "-", said, verdict(held[:1], held[1:])


def _best_other(shares: dict[str, dict[float, float]], scale: float) -> float:
    """Share of the best policy that is no batch tree."""
    return max(by[scale] for policy, by in shares.items() if "batch-tree" not in policy)


def _lowest(leads: dict[float, float]) -> str:
    lowest = min(leads.values())
    where = ", ".join(f"{scale}" for scale, lead in leads.items() if lead < lowest + 0.05)
    return f"{lowest:+.1f} points: scale {where}"


def peaks_row(results: Results) -> Cells | None:
    """Largest batches in the burst."""
    found = below(results, "traces/h100x8/code")
    row = burst_row(results)
    if SERIAL not in found or row is None:
        return None
    cells, held = [], []
    for figures in (found, row.found):
        most = {
            p: int(figures[p]["peak_batch"]) for p in (SERIAL, SPECSERVE, ASYNC) if p in figures
        }
        said = ", ".join(f"{p.partition('-16')[0]} {n}" for p, n in most.items())
        plain = int(figures["plain"]["peak_batch"])
        cells.append(f"{said}; plain {plain}")
        held.append(int(max(most.values()) > plain))
    cells[1] += f" (the limit, {row.about['batch']})"
    asked = "largest batch in the burst no higher than plain decoding's"
    return asked, cells[0], "-", cells[1], verdict(held[:1], held[1:])


def deciding_row(results: Results) -> Cells | None:
    """The largest share of a round that policies take to decide."""
    cells, held = [], []
    for is_small in (False, True):
        price = {
            key: f["share"]
            for key, f in below(results, "price").items()
            if key.startswith(f"{SMALL}/") == is_small
        }
        if not price:
            return None
        worst = max(price, key=price.__getitem__)
        machine, way, batch = worst.split("/")
        cells.append(f"{price[worst]:.2%}: {machine}, {way}, batch of {batch}")
        held.append("yes" if price[worst] <= MOST_DECIDING else "no")
    return (
        "deciding: at most 2 % of a round (on one core of the host of H100s)",
        *cells,
        "-",
        f"70B: {held[0]}, 8B: {held[1]}",
    )


def cpu_row(results: Results) -> Cells | None:
    """Whether the comparison on a CPU is quick enough, and in the simulated order."""
    found = below(results, "cpu")
    about = str(found.get("about"))
    same = re.search(r"Of (\d+) pairs .*, (\d+) are in the same order", about)
    passes = re.search(r"of (\d+) passes", about)
    if same is None or passes is None:
        return None
    seconds = int(passes[1]) * sum(f.get("seconds", 0.0) for f in found.values())
    text = f"{same[2]} of {same[1]} pairs in the same order; {seconds:.0f} s without loading"
    asked = "CPU comparison: within 5 minutes, in the order that is simulated"
    held = {"time": seconds <= 300.0, "order": same[1] == same[2]}
    met = ", ".join(f"{part}: {'yes' if is_so else 'no'}" for part, is_so in held.items())
    return asked, "-", "-", text, met
