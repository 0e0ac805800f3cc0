"""Measured pairs on two GPUs, simulated: is a batch tree ever slower than plain decoding there?

    python -m benchmarks.compare_policies pairs

Step times of the shipped fits, requests of each trace as ``policy_ranks.py`` serves them (prompts
made shorter, answers cut, eight at once), at loads from what leaves the GPUs idle to saturation.
Each seed has its own acceptance, and arrivals that are shifted a little: which round a request
joins is luck, too, and a dozen of 600 may meet an SLO by it or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.policies.cases import SEGMENTS
from benchmarks.policies.run_figures import figures_of, mean_figures
from benchmarks.policies.segments import BATCH, KV_TOKENS, segment, target_of
from codesign.candidate import Candidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.policy.cost import RoundCost
from codesign.policy.speculation import parse_policy
from codesign.sim import simulate

LOADS, POLICIES = (0.3, 0.7, 1.2), ("plain", "batch-tree-16x2x8", "specserve-8", "chain-1")
# Requests: of 120 in overload 7 were in the SLO with one policy and 9 with another. From seed to
# seed two policies' mean latencies differ by up to 1 % of 600 requests in overload.
NUM_REQUESTS, READ, LONG = 600, 1500.0, 1000.0
SEED, SEEDS = 1, (1, 2, 3, 4, 5)
SHIFT = 2.0  # times the TPOT target, by which a request comes earlier or later at most


def measure(store: Any, traces: Path | None) -> None:
    """All pairs, traces, loads and policies; means over the seeds."""
    for path in sorted(DEFAULT_FIT.parents[1].glob("h200-*/fit.json")):
        fit = Fit.load(path)
        for name in SEGMENTS:
            for load in LOADS:
                requests = requests_at(name, traces, fit.costs["2"], load)
                for policy in POLICIES:

                    def make(r: pd.DataFrame = requests, p: str = policy, f: Fit = fit) -> Any:
                        slo = target_of(f.costs["2"])
                        shift = SHIFT * (slo.tpot or 0.0)
                        runs = [
                            simulated(shifted(r, shift, s), f, p, "2", slo, seed=s) for s in SEEDS
                        ]
                        return mean_figures(runs)

                    pair = path.parent.name.removeprefix("h200-")
                    store.get(f"pairs/{pair}/{name}/{load}/{policy}", make)


def shifted(requests: pd.DataFrame, seconds: float, seed: int) -> pd.DataFrame:
    """The same requests, each up to so many seconds earlier or later; the first comes at 0."""
    shifts = np.random.default_rng(seed).uniform(-seconds, seconds, len(requests))
    moved = requests.assign(arrival=requests["arrival"] + shifts).sort_values("arrival")
    return moved.assign(arrival=moved["arrival"] - moved["arrival"].min()).reset_index(drop=True)


def simulated(
    requests: pd.DataFrame,
    fit: Fit,
    policy: str,
    deployment: str,
    slo: SLO,
    *,
    batch: int = BATCH,
    seed: int = SEED,
) -> dict[str, Any]:
    """Figures of a policy that serves these requests on a deployment, as a plan would tell it."""
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), batch)
    return simulated_as(candidate, requests, fit, slo, seed=seed)


def simulated_as(
    candidate: Candidate, requests: pd.DataFrame, fit: Fit, slo: SLO, *, seed: int = SEED
) -> dict[str, Any]:
    """The same of a candidate."""
    serving = Serving(
        max_kv_tokens=candidate.max_batch * KV_TOKENS,
        answer_tokens=float(requests["output_tokens"].to_numpy().mean()),
    )
    run = simulate(requests, candidate, fit, serving=serving, slo=slo, seed=seed)
    return figures_of(run, slo)


def requests_at(
    name: str,
    traces: Path | None,
    cost: RoundCost,
    load: float,
    *,
    num: int = NUM_REQUESTS,
    batch: int = BATCH,
    read: float | None = READ,
) -> pd.DataFrame:
    """So many requests of a trace, at so much of what plain decoding bears.

    Args:
        name: Of the trace.
        traces: As for ``segment``.
        cost: Step times of the machine.
        load: Share of what plain decoding bears.
        num: Requests.
        batch: Most requests at once.
        read: Seconds of a trace, of which these requests are the first; as for ``segment``.
    """
    requests = segment(name, traces, cost, LONG, batch, read=read).iloc[:num]
    prompt, output = (float(requests[f"{kind}_tokens"].mean()) for kind in ("prompt", "output"))
    step = cost.target(batch, batch * (prompt + output / 2), batch)
    seconds = num * (cost.prefill(prompt) + output * step / batch) / load
    arrival = requests["arrival"] - requests["arrival"].iloc[0]
    return requests.assign(arrival=arrival * seconds / arrival.iloc[-1])
