"""Section of the page of policies: what was measured on GPUs, beside its simulation.

Rows: measured_rows.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.pages import markdown
from benchmarks.policies.cases import SCALES
from benchmarks.policies.figures import ASYNC, SERIAL, SPECSERVE, Results, below, in_ms, name_of
from benchmarks.policies.measured_rows import Row, burst_row, rows_of
from benchmarks.policies.ranks import rank_correlation
from benchmarks.policies.segments import read_segment

_SHOWN = (SERIAL, SPECSERVE, ASYNC, "chain-1", "chain-3")
_OLD_SPLIT = {"70B": "ranks", "8B": "ranks-8b"}  # the only runs of asynchronous policies


def runs_section(results: Results) -> str:
    """How to read the tables, then a subsection for each machine and pair."""
    rows = rows_of(results)
    if not rows:
        return ""
    places: dict[str, list[Row]] = {}
    for row in rows:
        places.setdefault(row.place, []).append(row)
    parts = [_HEAD, *[_place(place, found) for place, found in places.items()]]
    burst = burst_row(results)
    parts += [_burst(burst)] if burst else []
    return "\n\n".join([*parts, _asynchronous(results, rows)])


_HEAD = """\
## Measured on GPUs

Each run served all policies by the same processes, on the first seconds of a trace with prompts of
48 to 512 tokens and answers of up to 96 (`python -m benchmarks.policy_ranks`). The models are
inflated ([models.md](models.md#inflated-models)): of the shape and speed of the large one, with the
answers of a small one. A load is a share of what plain decoding can serve by the fit. "At once" is
the limit of requests. The fit was made minutes before on the same machine ("own"), or it is the one
that ships, of another machine ("shipped"): then the simulation is a prediction.

Cells are mean latency of plain decoding divided by the policy's, and in brackets the same simulated
for the same requests. Where all policies of a row ran twice, one after the other and then again,
each counts with its faster run. "Apart" is how much longer a policy's slower run took, at most
(before 28 November of plain decoding and asynchronous policies): so well is a row known. "In SLO"
is the share of requests within the targets: batch tree / best of the others. Outputs are those of
plain decoding on the same GPUs, token for token. A line below each table explains differences: time
of prompts and of the target's steps relative to the fit; what drafting takes per round beyond the
draft's steps (deciding included; median of the rows below load 1); and the rank correlation of
measured and simulated latencies, where fixed lengths ran, too.

The newest row of each machine, pair, trace and load is shown; older ones are in
`benchmarks/results/policies.json`. The worst of all relative to plain decoding: the batch tree
0.906 and SpecServe 0.898, with an 8B on one H200, on 24 November, 02:30 UTC."""


def _place(place: str, rows: Sequence[Row]) -> str:
    shown = [policy for policy in _SHOWN if any(policy in row.found for row in rows)]
    table = []
    for row in rows:
        trace, load = read_segment(row.segment)
        plain = row.found["plain"]
        day = f"{row.about['created'][8:10]} Nov, {'shipped' if row.about.get('ships') else 'own'}"
        cells = [
            "-" if ratios is None else f"{ratios[0]:.3f} ({ratios[1]:.2f})"
            for ratios in map(row.speedup, shown)
        ]
        table.append(
            (trace.name, f"{load:g}", day, row.about["batch"], plain["num_requests"],
             in_ms(plain["latency_mean"]), *cells, _apart(row), _in_slo(row))
        )  # fmt: skip
    names = [f"{policy} on {_split_of(rows)}" if policy == ASYNC else policy for policy in shown]
    about = ("trace", "load", "day, fit", "at once", "requests", "plain, ms")
    head = (*about, *names, "apart", "in SLO")
    remarks = [results["remark"] for results in _abouts(rows) if results.get("remark")]
    return "\n\n".join(
        [f"### Measured on {place}", markdown(head, table), _explained(rows), *remarks]
    )


def _split_of(rows: Sequence[Row]) -> str:
    return next((row.split for row in rows if row.split), "")


def _abouts(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return list({row.run: row.about for row in rows}.values())


def _apart(row: Row) -> str:
    return "-" if row.apart is None else f"{row.apart:.1%}"


def _in_slo(row: Row) -> str:
    return " / ".join(f"{share:.0%}" for share in attained(row))


def attained(row: Row, scale: str | None = None) -> tuple[float, float]:
    """Share of requests within the SLO: of the batch tree, and the best of the others."""

    def share(figures: Mapping[str, Any]) -> float:
        return figures["attainment"][scale] if scale else figures["slo_attainment"]

    others = [share(f) for policy, f in row.found.items() if "batch-tree" not in policy]
    return share(row.found[SERIAL]), max(others)


def _explained(rows: Sequence[Row]) -> str:
    found = [figures for row in rows for figures in row.found.values()]
    together, apart = _on_split(rows, False), _on_split(rows, True)
    beyond = {
        policy: f"{1e3 * np.median(taken):.2f}"
        for policy in (SERIAL, SPECSERVE, "chain-1")
        if (taken := _beyond(rows, policy))
    }
    drafting = ", ".join(f"{policy} {taken}" for policy, taken in beyond.items())
    drafting = f"; drafting beyond steps, ms: {drafting}" if drafting else ""
    ranks = [rank_correlation(row.found) for row in rows if "chain-1" in row.found]
    same = all(f.get("same_outputs") == f["num_requests"] for f in together)
    equal, asked = (sum(f[key] for f in apart) for key in ("same_outputs", "num_requests"))
    place = f" On {_split_of(rows)} a target rounds differently"
    differ = f"{place}: {equal} of {asked} outputs are equal." if asked else ""
    return (
        f"Prompts: {_range([f['prompts'] for f in found])} of the fit; target steps: "
        f"{_range([f['target_steps'] for f in found])}{drafting}."
        f"{f' Rank correlation with simulation: {_range(ranks)}.' if ranks else ''}"
        f"{'' if same else ' SOME OUTPUTS DIFFER.'}{differ}"
    )


def _on_split(rows: Sequence[Row], is_async: bool) -> list[Mapping[str, Any]]:
    """Figures of the policies whose draft has GPUs of its own, or of the others."""
    pairs = [pair for row in rows for pair in row.found.items()]
    return [figures for policy, figures in pairs if policy.startswith("async-") == is_async]


def _beyond(rows: Sequence[Row], policy: str) -> list[float]:
    """What drafting takes per round beyond the draft's steps, s, where it is known.

    Below saturation, if there are such rows: fits do not time batches above eight.
    """
    light = [row for row in rows if read_segment(row.segment)[1] < 1.0] or rows
    found = [row.found.get(policy, {}).get("beyond_draft_steps") for row in light]
    return [taken for taken in found if taken is not None]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _burst(row: Row) -> str:
    """All policies in the burst: speedups, attainment by scale and largest batches."""
    table = []
    for policy, f in sorted(row.found.items(), key=lambda pair: pair[1]["latency_mean"]):
        ratios = row.speedup(policy) or (1.0, 1.0)
        said = f["simulated"]
        shares = [
            f"{f['attainment'][s]:.1%} ({said['attainment'][s]:.1%})" for s in map(str, SCALES)
        ]
        table.append(
            (name_of(policy), f"{ratios[0]:.2f} ({ratios[1]:.2f})",
             f"{1e3 * f['tpot_mean']:.1f} ({1e3 * said['tpot_mean']:.1f})",
             f"{f['acceptance_length']:.2f} ({said['acceptance_length']:.2f})",
             *shares, f"{f['peak_batch']:.0f}")
        )  # fmt: skip
    scales = [f"in SLO x {scale}" for scale in SCALES]
    head = ("policy", "speedup", "TPOT, ms", "tokens per round", *scales, "largest batch")
    return f"""\
### Measured in the burst: all policies

"code" at {read_segment(row.segment)[1]:g} on one H200 with the 70B, 24 November: the stretch with
the burst, {row.found["plain"]["num_requests"]} requests, SLO attainment by scale of both targets.
Policies were told those of scale 1. The fit is of another machine and another day. The batch tree
attains as much as any other policy or more at every scale. With four policies on 28 November
others have up to three requests more: SpecServe two of 130 at scale 1 and three of 105 at 1.4, a
chain of one of 105 one at 0.8 and 1.4.

{markdown(head, table)}"""


def _asynchronous(results: Results, rows: Sequence[Row]) -> str:
    """Speedups of asynchronous batch trees on 1+1; they ran once."""
    said = []
    for pair, run in _OLD_SPLIT.items():
        for segment in ("mooncake", "code"):
            ways = below(results, f"{run}/{segment}")
            if f"{ASYNC} on 1+1" in ways:
                plain, ours = ways["plain on 2"], ways[f"{ASYNC} on 1+1"]
                ratio = plain["latency_mean"] / ours["latency_mean"]
                said.append(f'{ratio:.2f} ({pair}, "{segment}")')
    if not said:
        return ""
    above = "On four GPUs: see above. " if any(row.split for row in rows) else ""
    return f"""\
### Measured asynchronously

{above}On two H200s (1+1, load 0.7, 22 November, older kernels) asynchronous batch trees lose, as
simulated. Speedups over plain decoding on both: {", ".join(said)}. On eight GPUs nothing was
measured."""
