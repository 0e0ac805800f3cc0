"""One case of bench_sim.py in this process: read a trace, simulate it, print what it took as JSON.

usage: ours.py '{"trace": "conv.jsonl", "policy": "chain-3", "deployment": "1", ...}'

The machine is made up from printed facts, not measured: an H100 with an 8-billion model and an
EAGLE-3 head as fitted by arXiv:2601.11580 (target 39.3 ns per KV row, 21 us per row, 5.89 ms; draft
2.4 ns, 0.8 us, 2.14 ms; 1.21 ms of overhead a step). Acceptance is what ships with codesign.
"""

from __future__ import annotations

import json
import sys
import time

_STARTED = time.perf_counter()

_TARGET = {"alpha": 3.93e-8, "gamma": 2.10e-5, "delta": 5.89e-3 + 1.21e-3}
_DRAFT = {"alpha": 2.38e-9, "gamma": 8.4e-7, "delta": 2.135e-3}


def main() -> None:
    """Run the case and print its JSON."""
    case = json.loads(sys.argv[1])
    from dataclasses import replace

    from codesign.candidate import Candidate
    from codesign.config import Serving, parse_deployment
    from codesign.fit import Fit
    from codesign.fit.shipped import DEFAULT_FIT
    from codesign.metrics import summarise
    from codesign.policy.cost import RoundCost, StepTime
    from codesign.policy.speculation import parse_policy
    from codesign.sim import simulate
    from codesign.traces import load_trace

    imported = time.perf_counter()
    trace = load_trace(case["trace"])
    loaded = time.perf_counter()
    target, draft = StepTime.linear(**_TARGET), StepTime.linear(**_DRAFT)
    cost = RoundCost(target, draft, target, draft, reroot=2e-5, link=2e-5)
    fit = replace(Fit.load(DEFAULT_FIT), costs={"1": cost, "1+1": cost}, origin="made up")
    candidate = Candidate(
        parse_deployment(case["deployment"]), parse_policy(case["policy"]), case["max_batch"]
    )
    serving = Serving(**case["serving"])
    prepared = time.perf_counter()
    records = simulate(trace.requests, candidate, fit, serving=serving, seed=0)
    simulated = time.perf_counter()
    metrics = summarise(records)
    done = time.perf_counter()
    print(
        json.dumps(
            {
                "seconds": {
                    "import": imported - _STARTED,
                    "read_trace": loaded - imported,
                    "read_fit": prepared - loaded,
                    "simulate": simulated - prepared,
                    "summarise": done - simulated,
                },
                "requests": metrics.num_requests,
                "finished": metrics.num_finished,
                "rounds": len(records.rounds),
                "output_tokens": sum(r.output_tokens for r in records.requests),
                "preemptions": sum(r.num_preemptions for r in records.requests),
                "cached_tokens": sum(r.cached_tokens for r in records.requests),
                "simulated_seconds": metrics.seconds,
                "ttft_p50": metrics.ttft_p50,
                "tpot_mean": metrics.tpot_mean,
                "acceptance_length": metrics.acceptance_length,
                "mean_batch": metrics.mean_batch,
            }
        )
    )


if __name__ == "__main__":
    main()
