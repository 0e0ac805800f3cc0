"""Section of the page of measurements: runs first come, first served beside runs by targets.

Two GPUs of one host served the same requests at the same time, one in each way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.pages import markdown
from benchmarks.policies.cases import SCALES
from benchmarks.policies.figures import SERIAL, Results, below, name_of
from benchmarks.policies.gpu_runs import Row, rows_of

RUNS = {  # keys of ``policy_ranks join``: first come, first served; by targets
    "ranks-70b-burst-h200x1": "ranks-70b-burst-targets-h200x1",
    "ranks-8b-burst-h200x1": "ranks-8b-burst-targets-h200x1",
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
[policies.md](policies.md#who-joins-next)) beside first come, first served: two of four H200s of one
host served the same requests at once, 27 November, 22:00 UTC; 24 at once, 20 s of each trace (8B: 9
s), "code" from its burst on. Shares within the SLO, first come, first served at scale 1, by targets
at each scale, and mean latency; in brackets simulated by the shipped fit. Targets were those of
scale 1.

{markdown(head, rows)}

With a batch tree and plain decoding 24 to 55 % of the requests on "code" at 0.4 and 0.7 are in time
instead of 0 to 14, of the 70B's at 1.2 13 to 45 % instead of none. The 70B's batch tree is ahead of
a fixed tree and of plain decoding on "code" at 0.7 and on "conv", and up to 2 points behind the
fixed tree on "code" at 1.2; there was no time for SpecServe. With the 8B fixed trees keep next to
no target.

**What it showed.** "conv" at 1.2, batch tree of the 8B: 13 % where plain decoding has 37. Rounds of
24 requests took as long as the TPOT target; whoever joined had missed it at once, held nobody up,
and so the batch stayed full. Simulated with steps 1.2 times the fit's the same happens (9 %, plain
29). Since then [nobody joins a batch that is too slow](policies.md#who-joins-next): 28 and 31 % (no
file). Nor had these runs the newer rule for answers that end soon; the simulations in brackets are
by the code that served.

**With both rules**, the 8B on one H200, 28 November, 04:33 UTC
(`policies_8b_targets_2026-11-28_h200.json`, shares at scale 1, in brackets simulated): "conv" at
1.2 batch tree 47 % (47), SpecServe 47 (47), plain decoding 46 (49), tree-8x4x4 0 (1); "code" at
0.7, the burst, 31 (39), 30 (36), 35 (39) and 2 (9). In overload the batch tree is level with the
others; in the burst all have less than simulated, and drafting, which gains an 8B nothing there,
4 points less than plain decoding, of 385 requests served once."""


def _both(results: Results) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """What was served first come, first served, and figures by targets of the same requests."""
    for first, by_targets in RUNS.items():
        for row in rows_of(results, (first,)):
            ways = below(results, f"{by_targets}/{row.segment}")
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

    In the first row that has the batch tree, the 70B's burst at the least load; with its label.
    """
    for row, found in _both(results):
        if SERIAL in found:
            others = [f["attainment"] for policy, f in found.items() if "batch-tree" not in policy]
            ours = found[SERIAL]["attainment"]
            keys = {scale: str(scale) for scale in SCALES}
            lead = {s: 100 * (ours[k] - max(o[k] for o in others)) for s, k in keys.items()}
            return row.label, lead
    return None
