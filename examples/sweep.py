"""Simulate a grid of draft models, acceptance rates, policies and seeds; one row of a CSV for each.

    python examples/sweep.py --out sweep.csv

Change GRID and ``simulated`` to ask another question. docs/python.md says what else there is. The
same grid gives the same rows on every machine, however many processes share it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pandas as pd

from codesign.candidate import Candidate
from codesign.config import Serving, parse_deployment
from codesign.fit import Fit
from codesign.fit.what_if import what_if_fit
from codesign.metrics import summarise
from codesign.policy.speculation import parse_policy
from codesign.sim import simulate
from codesign.traces import Trace, load_trace

TARGET = "llama-3.1-70b"
GRID = {
    "draft": ["llama-3.2-1b", "llama-3.2-3b"],
    "acceptance": [0.5, 0.6, 0.7, 0.8],  # chance that the first draft token is accepted
    "policy": ["plain", "chain-2", "chain-4", "tree-4x2x2", "tree-8x4x4", "async-tree-8x4x4"],
    "seed": [0, 1],
}
FIGURES = ("tpot_mean", "tpot_p90", "ttft_p90", "throughput", "acceptance_length")


@functools.cache
def fit_of(draft: str, acceptance: float) -> Fit:
    """Step times of eight H100s by their data sheet."""
    return what_if_fit("h100", 8, TARGET, draft, acceptance=acceptance)


@functools.cache
def trace_of(num_requests: int) -> Trace:
    """The first requests of a bundled trace."""
    return load_trace("conv-twin").head(num_requests)


def simulated(case: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """One row: the case, and what was simulated for it."""
    policy = parse_policy(str(case["policy"]))
    deployment = parse_deployment("7+1" if policy.is_async else "8")
    records = simulate(
        trace_of(num_requests).requests,
        Candidate(deployment, policy, 64),
        fit_of(case["draft"], case["acceptance"]),
        serving=Serving(),
        seed=case["seed"],
    )
    metrics = summarise(records)
    return case | {name: getattr(metrics, name) for name in FIGURES}


def main() -> None:
    """Simulate all cases on all cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="sweep.csv")
    parser.add_argument("--requests", type=int, default=100, help="of the trace (100)")
    parser.add_argument("--processes", type=int, help="all cores")
    args = parser.parse_args()
    cases = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    with ProcessPoolExecutor(args.processes) as pool:
        rows = list(pool.map(simulated, cases, itertools.repeat(args.requests), chunksize=4))
    table = pd.DataFrame(rows)
    table.to_csv(args.out, index=False)
    best = table.loc[table.groupby(["draft", "acceptance"])["tpot_mean"].idxmin()]
    print(best[["draft", "acceptance", "policy", "tpot_mean"]].to_string(index=False))
    print(f"{len(table)} simulations in {args.out}")


if __name__ == "__main__":
    main()
