"""Section of the page of policies: the burst, and overload, served by their targets.

The same policies with requests that join so that targets are kept (codesign/policy/on_time.py),
beside first come, first served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.pages import markdown
from benchmarks.policies.cases import (
    SCALES,
    SEGMENTS,
    SERVING,
    Machine,
    paper_slo,
    scaled,
    split_of,
)
from benchmarks.policies.figures import ASYNC, SERIAL, SPECSERVE, Results, below, name_of
from benchmarks.policies.run_figures import figures_of
from codesign.config import SCHEDULINGS, SLO, Scheduling

if TYPE_CHECKING:
    import pandas as pd

    from benchmarks.compare_policies import Bench

POLICIES = (
    "plain", "chain-1", "chain-3", "chain-5", SPECSERVE, "adaserve-4x2x64", "tree-8x4x4",
    "async-tree-8x4x6", SERIAL, ASYNC,
)  # fmt: skip
SWEPT = ("plain", SPECSERVE, SERIAL)
RATES = (1.0, 2.0, 4.0)  # times a trace's own
NUM_SWEPT = 400  # requests of each trace


def measure(bench: Bench, machine: Machine) -> None:
    """Simulate what is not there yet: the burst at each scale, each trace at several rates."""
    bursty = machine.cut(bench.requests(SEGMENTS["code"]))
    for policy in POLICIES:
        for scale in SCALES:
            slo = scaled(paper_slo(machine), scale)
            key = f"targets/{machine.name}/burst/{policy}/{scale}"
            _keep(bench, machine, key, bursty, policy, slo, "slo")
    for segment in SEGMENTS.values():
        requests = machine.cut(bench.requests(segment)).head(NUM_SWEPT)
        for rate in RATES:
            faster = requests.assign(arrival=requests["arrival"] / rate)
            for policy in SWEPT:
                for way in SCHEDULINGS:
                    key = f"targets/{machine.name}/{segment.name}/{rate:g}/{policy}/{way}"
                    _keep(bench, machine, key, faster, policy, paper_slo(machine), way)


def _keep(
    bench: Bench,
    machine: Machine,
    key: str,
    requests: pd.DataFrame,
    policy: str,
    slo: SLO,
    way: Scheduling,
) -> None:
    def make() -> dict[str, Any]:
        serving, split = replace(SERVING, scheduling=way), split_of(policy, machine.gpus)
        run = bench.run(requests, machine.fit(), policy, split, slo, serving=serving)
        return figures_of(run, paper_slo(machine))

    bench.store.get(key, make)


def burst_shares(results: Results) -> dict[str, dict[float, float]]:
    """Share of the burst's requests within the SLO, by policy and scale."""
    found: dict[str, dict[float, float]] = {}
    for policy in POLICIES:
        runs = below(results, f"targets/h100x8/burst/{policy}")
        if len(runs) == len(SCALES):
            found[policy] = {s: runs[str(s)]["attainment"][str(s)] for s in SCALES}
    return found


def by_targets_section(results: Results) -> str:
    """Both tables."""
    shares = burst_shares(results)
    if not shares:
        return ""
    first = below(results, "traces/h100x8/code")
    rows = []
    for policy, by_scale in shares.items():
        cells = []
        for scale, share in by_scale.items():
            own = results.get(f"slo/h100x8/code/{policy}/{scale}", first[policy])
            cells.append(f"{share:.1%} ({own['attainment'][str(scale)]:.1%})")
        ours = results[f"targets/h100x8/burst/{policy}/1.0"]
        latency = first[policy]["latency_mean"] / ours["latency_mean"]
        last = f"{ours['ttft_p99']:.1f} ({first[policy]['ttft_p99']:.1f})"
        rows.append((name_of(policy), *cells, f"{latency:.2f}", last))
    head = ("policy", *map(str, SCALES), "faster, mean latency", "TTFT p99, s")
    return f"""\
## Served by their targets

The same burst where requests join so that targets are kept (`--scheduling slo`,
[policies.md](policies.md#who-joins-next)): those who can be in time before those who cannot, and
nobody at the cost of others. In brackets: first come, first served, as above. Whoever is late
anyway waits longer.

{markdown(head, rows)}

The first {NUM_SWEPT} requests of each trace at one, two and four times its rate, first come first
served and by their targets: share within the SLO at scale 1, and mean latency in seconds.

{markdown(("trace", "rate", *map(name_of, SWEPT)), _sweep(results))}"""


def _sweep(results: Results) -> list[tuple[str, ...]]:
    rows = []
    for segment in SEGMENTS:
        for rate in RATES:
            cells = []
            for policy in SWEPT:
                found = below(results, f"targets/h100x8/{segment}/{rate:g}/{policy}")
                if len(found) < len(SCHEDULINGS):
                    return rows
                shares = [f"{found[way]['attainment']['1.0']:.1%}" for way in SCHEDULINGS]
                seconds = [f"{found[way]['latency_mean']:.1f}" for way in SCHEDULINGS]
                cells.append(f"{' to '.join(shares)}; {', '.join(seconds)} s")
            rows.append((segment, f"{rate:g}", *cells))
    return rows
