"""Measured pairs on eight GPUs, simulated by steps extrapolated to them: load x split.

    python -m benchmarks.compare_policies eight

As splits.py, with what a plan for eight H200s goes by: the shipped fits' steps on up to four,
extrapolated (codesign/fit/extrapolated.py). Nobody has run these pairs on eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.pages import markdown
from benchmarks.policies.cases import SEGMENTS
from benchmarks.policies.figures import ASYNC, NEEDED, SERIAL, SPECSERVE, Results
from benchmarks.policies.pairs import SHIFT, requests_at, shifted, simulated
from benchmarks.policies.run_figures import mean_figures
from benchmarks.policies.segments import target_of
from benchmarks.policies.splits import AHEAD, Ways, cases_of, goodput_lead
from codesign.config import SLO
from codesign.fit import Fit
from codesign.fit.what_if import device_fit

WHOLE, SPLITS = "8", ("7+1", "6+2")
PAIRS = (
    ("llama-3-70b", "llama-3.2-1b"), ("llama-3-70b", "llama-3.2-3b"), ("qwen2-72b", "qwen2-1.5b"),
)  # fmt: skip
LOADS, NUM_REQUESTS, SEEDS = (0.1, 0.3), 300, (1, 2)
WAYS = (
    *(f"{policy} on {WHOLE}" for policy in ("plain", SPECSERVE, SERIAL)),
    *(f"{ASYNC} on {split}" for split in SPLITS),
)


def measure(store: Any, traces: Path | None) -> None:
    """All pairs, traces, loads and ways; means over the seeds."""
    for target, draft in PAIRS:
        fit = device_fit("h200", int(WHOLE), f"{target}:int4", f"{draft}:int4")
        slo = target_of(fit.costs[WHOLE])
        shift = SHIFT * (slo.tpot or 0.0)
        for name in SEGMENTS:
            for load in LOADS:
                asked = requests_at(name, traces, fit.costs[WHOLE], load, num=NUM_REQUESTS)
                draws = {seed: shifted(asked, shift, seed) for seed in SEEDS}
                for way in WAYS:
                    policy, _, deployment = way.partition(" on ")

                    make = partial(_served, draws, fit, policy, deployment, slo)
                    store.get(f"eight/{target}+{draft}/{name}/{load}/{way}", make)


def _served(
    draws: Mapping[int, pd.DataFrame], fit: Fit, policy: str, deployment: str, slo: SLO
) -> dict[str, Any]:
    """Figures of a way, means over the seeds."""
    runs = [
        simulated(requests, fit, policy, deployment, slo, seed=seed)
        for seed, requests in draws.items()
    ]
    return mean_figures(runs)


def eight_section(results: Results) -> str:
    """Where a draft of its own pays on eight GPUs."""
    cases = cases_of(results, "eight")
    if not cases:
        return ""
    head = ("pair, int4", "trace", "load", *WAYS[1:], "goodput, asynchronous / SpecServe")
    rows = [(*case, *_speedups(ways), _lead(ways)) for case, ways in cases.items()]
    leads = [lead for ways in cases.values() if (lead := _goodput(ways)) is not None]
    ahead, behind = (sum(lead >= AHEAD for lead in leads), sum(lead < NEEDED for lead in leads))
    return f"""\
## Eight GPUs by extrapolated steps

As above on eight H200s, which nobody has run: steps measured on one, two and four,
[extrapolated as a plan does](planner.md#more-gpus-than-were-measured). Speedup in mean latency over
plain decoding on all eight, best in bold; {NUM_REQUESTS} requests, eight at once, means over
{len(SEEDS)} seeds:

{markdown(head, rows)}

Goodput of the asynchronous batch tree on its better split is at least 1 % more than SpecServe's in
{ahead} of {len(leads)} cases, and more than 2 % behind in {behind}. With a small draft and long
answers the eighth GPU is worth more to the draft than to the target, at low load; "code", whose
time is prompts, always wants all eight for them."""


def _goodput(ways: Ways) -> float | None:
    return goodput_lead(ways, WHOLE, SPLITS)


def _lead(ways: Ways) -> str:
    lead = _goodput(ways)
    return "-" if lead is None else f"{lead:.3f}"


def _speedups(ways: Ways) -> list[str]:
    """Of all ways but plain decoding; the best in bold."""
    plain = ways[WAYS[0]]["latency_mean"]
    speed = [plain / ways[way]["latency_mean"] for way in WAYS[1:]]
    return [f"**{s:.2f}**" if s == max(speed) else f"{s:.2f}" for s in speed]
