"""Section of the page of measurements: runs first come, first served beside runs by targets.

GPUs of one host served the same requests in both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.pages import markdown
from benchmarks.policies.cases import SCALES
from benchmarks.policies.figures import SERIAL, Results, below, name_of
from benchmarks.policies.measured_rows import Row, rows_of

RUNS = {  # keys of ``policy_ranks join``: first come, first served; by targets
    "ranks-70b-burst-h200x1": "ranks-70b-burst-targets-h200x1",
    "ranks-8b-burst-h200x1": "ranks-8b-burst-targets-h200x1",
    "ranks-70b-burst-28-h200x1": "ranks-70b-burst-targets-28-h200x1",
}


def targets_measured_section(results: Results) -> str:
    """The table, or nothing before there are runs."""
    rows = [
        (row.label, name_of(policy), *_cells(row.found[policy], figures))
        for row, found in _both(results)
        for policy, figures in found.items()
        if policy in row.found
    ]
    if not rows:
        return ""
    scales = [f"x {scale}" for scale in SCALES]
    head = (
        "requests", "policy", "in SLO, first come", *scales, "latency, s: first come", "by targets"
    )  # fmt: skip
    return f"""\
### Measured by targets

Requests that join so that targets are kept (`--scheduling slo`,
[policies.md](policies.md#who-joins-next)) beside first come, first served: H200s of one host served
the same requests, 24 at once, 20 s of each trace (8B: 9 s), "code" from its burst on; the 70B on
"code" on 28 November, 07:27 UTC, by today's rules, the others on the 27th, 22:00 UTC, by earlier
ones. Shares within the SLO, first come, first served at scale 1, by targets at each scale, and mean
latency; in brackets simulated by the shipped fit. Targets were those of scale 1.

{markdown(head, rows)}

By their targets 55 to 66 % of the 70B's requests on "code" at 0.7 are in time with any policy
instead of 10 to 14, at 1.2 16 to 24 % instead of none. At 0.7 the batch tree is 2 to 4 points above
all others at three scales and one request of 130 below the fixed tree at 0.8, and has the least
mean latency, 19 % less than first come, first served. At 1.2 SpecServe is up to 2 points above it
(four requests of 224), at the same latency. All 3,540 answers of that day are plain decoding's,
token for token; simulated, shares are at most 6 points off, and the order of mean
latencies by targets is the measured one at both loads.

**What the 8B showed.** "conv" at 1.2, batch tree: 13 % where plain decoding has 37. Rounds of 24
requests took as long as the TPOT target; whoever joined had missed it at once, held nobody up, and
so the batch stayed full. Since then
[nobody joins a batch that is too slow](policies.md#who-joins-next), nor late by an answer that ends
soon. With both rules, on 28 November, 04:33 UTC (`policies_8b_targets_2026-11-28_h200.json`, in
brackets simulated): "conv" at 1.2 batch tree 47 % (47), SpecServe 47 (47), plain decoding 46 (49);
"code" at 0.7 31 (39), 30 (36) and 35 (39): drafting, which gains an 8B nothing in a burst, 4 points
less than plain decoding, of 385 requests served once."""


def _both(results: Results) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """What was served first come, first served, and figures by targets of the same requests."""
    for row in rows_of(results, tuple(RUNS)):
        ways = below(results, f"{RUNS[row.run]}/{row.segment}")
        yield row, {way.rpartition(" on ")[0]: figures for way, figures in ways.items()}


def _cells(first: Mapping[str, Any], figures: Mapping[str, Any]) -> list[str]:
    def share(found: Mapping[str, Any], scale: float) -> str:
        simulated = found["simulated"]["attainment"][str(scale)]
        return f"{found['attainment'][str(scale)]:.0%} ({simulated:.0%})"

    def latency(found: Mapping[str, Any]) -> str:
        return f"{found['latency_mean']:.2f} ({found['simulated']['latency_mean']:.2f})"

    shares = [share(figures, scale) for scale in SCALES]
    return [share(first, 1.0), *shares, latency(first), latency(figures)]


def measured_lead(results: Results) -> tuple[str, dict[float, float]] | None:
    """By how many points the batch tree is above the others by targets, by scale.

    In the first row that has the batch tree, the 70B's burst at the least load; with its label and
    the others.
    """
    for row, found in _both(results):
        if SERIAL in found:
            others = {n: f["attainment"] for n, f in found.items() if "batch-tree" not in n}
            ours = found[SERIAL]["attainment"]
            best = {s: max(o[str(s)] for o in others.values()) for s in SCALES}
            lead = {s: 100 * (ours[str(s)] - best[s]) for s in SCALES}
            return f"over {', '.join(sorted(map(name_of, others)))}: {row.label}", lead
    return None
