"""Every policy on the same requests and machine: simulated on GPUs, measured on this CPU.

    python -m benchmarks.compare_policies traces   # three traces, all policies: figures 9 to 12
    python -m benchmarks.compare_policies batches  # batches of one size
    python -m benchmarks.compare_policies chunks   # prompts in chunks that share forwards
    python -m benchmarks.compare_policies lengths  # the traces' arrivals, short prompts
    python -m benchmarks.compare_policies targets  # requests that join so that targets are kept
    python -m benchmarks.compare_policies map      # load x machine: which policy wins
    python -m benchmarks.compare_policies pairs    # measured pairs: never slower than plain?
    python -m benchmarks.compare_policies crowds   # the same on four GPUs, with 16 to 48 at once
    python -m benchmarks.compare_policies splits   # measured pairs on four GPUs: load x split
    python -m benchmarks.compare_policies eight    # the same on eight, by extrapolated steps
    python -m benchmarks.compare_policies price    # what deciding takes of a round
    python -m benchmarks.compare_policies cpu      # the small pair on this machine, 5 minutes
    python -m benchmarks.compare_policies report   # tables and pictures of what is there

Results go to benchmarks/results/policies.json; a case that is there is not run again, so that a
broken run goes on where it stopped (--fresh forgets). The published traces come from --traces or,
by default, from the cache: codesign trace fetch azure-code, azure-conv, mooncake-conversation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.error_line import errors_in_one_line
from benchmarks.policies import by_targets
from benchmarks.policies.cases import (
    BATCHES,
    CHUNK,
    CHUNK_POLICIES,
    LENGTHS_POLICIES,
    LENGTHS_RATES,
    LOADS,
    MAP_POLICIES,
    POLICIES,
    SCALES,
    SEGMENTS,
    SERVING,
    Machine,
    Segment,
    find_machine,
    find_segment,
    paper_slo,
    scaled,
    split_of,
    with_short_lengths,
)
from benchmarks.policies.run_figures import figures_of
from codesign.candidate import Candidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.fit import Fit
from codesign.policy.speculation import parse_policy
from codesign.records import RunRecords
from codesign.sim import simulate

RESULTS = Path(__file__).parent / "results" / "policies.json"
MAX_BATCH = 256
SEED = 1


class Store:
    """Results by key, in a file that is written after each."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.results: dict[str, Any] = {}
        if path.exists() and not fresh:
            self.results = json.loads(path.read_text())

    def get(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result, made and written now if it is not there."""
        if key not in self.results:
            start = time.perf_counter()
            self.results[key] = make()
            taken = time.perf_counter() - start
            print(f"{taken:7.1f} s  {key}", file=sys.stderr, flush=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.results, indent=1, default=float) + "\n"
            self.path.write_text(text, encoding="utf-8")
        return self.results[key]


@dataclass(frozen=True)
class Bench:
    """What all parts share."""

    store: Store
    traces: Path | None

    @cache  # noqa: B019  # one Bench per process
    def requests(self, segment: Segment) -> pd.DataFrame:
        """The requests of a segment with a category for each request."""
        return segment.load(self.traces, seed=SEED)

    def run(
        self,
        requests: pd.DataFrame,
        fit: Fit,
        policy: str,
        deployment: str,
        slo: SLO,
        *,
        max_batch: int = MAX_BATCH,
        serving: Serving = SERVING,
    ) -> RunRecords:
        """Simulate one candidate."""
        candidate = Candidate(parse_deployment(deployment), parse_policy(policy), max_batch)
        return simulate(requests, candidate, fit, serving=serving, slo=slo, seed=SEED)

    def capacity(self, machine: Machine, segment: Segment) -> float:
        """Requests a second that plain decoding finishes when all of them wait from the start."""

        def make() -> dict[str, Any]:
            requests = _head(self.requests(segment), 400).assign(arrival=0.0)
            requests = machine.cut(requests)
            run = self.run(requests, machine.fit(), "plain", str(machine.gpus), SLO())
            return {"capacity": len(requests) / run.seconds}

        return self.store.get(f"capacity/{machine.name}/{segment.name}", make)["capacity"]


def traces(bench: Bench, machine: Machine) -> None:
    """All policies on ten minutes of each trace at its own rate."""
    for segment in SEGMENTS.values():
        requests = machine.cut(bench.requests(segment))
        for policy in POLICIES:
            key = f"traces/{machine.name}/{segment.name}/{policy}"
            bench.store.get(key, lambda p=policy, r=requests: _on_trace(bench, machine, r, p))
    bursty = machine.cut(bench.requests(SEGMENTS["code"]))
    for policy in POLICIES:  # those that do not look at the target are judged by their one run
        if parse_policy(policy).kind in ("specserve", "adaserve", "batch-tree"):
            for scale in (s for s in SCALES if s != 1.0):
                key = f"slo/{machine.name}/code/{policy}/{scale}"
                bench.store.get(
                    key,
                    lambda p=policy, s=scale: _on_trace(bench, machine, bursty, p, scale=s),
                )


def _on_trace(
    bench: Bench, machine: Machine, requests: pd.DataFrame, policy: str, *, scale: float = 1.0
) -> dict[str, Any]:
    slo = scaled(paper_slo(machine), scale)
    run = bench.run(requests, machine.fit(), policy, split_of(policy, machine.gpus), slo)
    return figures_of(run, paper_slo(machine), over_time=scale == 1.0)


def batches(bench: Bench, machine: Machine) -> None:
    """Closed batches of one size: the paper's figure 11."""
    pool = bench.requests(SEGMENTS["conv"])
    for batch in BATCHES:
        count = max(3 * batch, 24)
        requests = _head(pool, count).assign(arrival=0.0, prompt_tokens=512)
        # Lengths differ, or plain decoding would keep the batch in step and run prompts together.
        requests["output_tokens"] = requests["output_tokens"].clip(32, 256)
        for policy in POLICIES:
            key = f"batches/{machine.name}/{batch}/{policy}"

            def make(policy: str = policy, r: pd.DataFrame = requests, b: int = batch):  # noqa: ANN202
                deployment = split_of(policy, machine.gpus)
                run = bench.run(r, machine.fit(), policy, deployment, SLO(), max_batch=b)
                return figures_of(run, SLO())

            bench.store.get(key, make)


def chunks(bench: Bench, machine: Machine) -> None:
    """The traces with prompts in chunks that share the rounds' forwards."""
    slo = paper_slo(machine)
    for segment in SEGMENTS.values():
        requests = machine.cut(bench.requests(segment))
        for policy in CHUNK_POLICIES:

            def make(policy: str = policy, r: pd.DataFrame = requests) -> dict[str, Any]:
                deployment = split_of(policy, machine.gpus)
                serving = replace(SERVING, prefill_chunk=CHUNK)
                return figures_of(
                    bench.run(r, machine.fit(), policy, deployment, slo, serving=serving), slo
                )

            bench.store.get(f"chunks/{machine.name}/{segment.name}/{policy}", make)


def lengths(bench: Bench, machine: Machine) -> None:
    """When requests come as in the traces, prompts and answers as short as a benchmark's."""
    for segment in SEGMENTS.values():
        short = with_short_lengths(bench.requests(segment), seed=SEED)
        for rate in LENGTHS_RATES:
            requests = short.assign(arrival=short["arrival"] / rate)
            for policy in LENGTHS_POLICIES:
                key = f"lengths/{machine.name}/{segment.name} x {rate:g}/{policy}"

                def make(policy: str = policy, r: pd.DataFrame = requests) -> dict[str, Any]:
                    slo = paper_slo(machine)
                    deployment = split_of(policy, machine.gpus)
                    return figures_of(bench.run(r, machine.fit(), policy, deployment, slo), slo)

                bench.store.get(key, make)


def load_map(bench: Bench, machines: list[Machine], segments: list[Segment]) -> None:
    """Load x machine and split: plain, SpecServe and the batch trees on each way to split."""
    for machine in machines:
        for segment in segments:
            for load in LOADS:
                _map_point(bench, machine, segment, load)


def _map_point(bench: Bench, machine: Machine, segment: Segment, load: float) -> None:
    capacity = bench.capacity(machine, segment)
    requests = machine.cut(_head(bench.requests(segment), segment.map_requests))
    rate = (len(requests) - 1) / float(requests["arrival"].iloc[-1])
    requests = requests.assign(arrival=requests["arrival"] * rate / (load * capacity))
    for policy, deployment in machine.ways(MAP_POLICIES):
        key = f"map/{machine.name}/{segment.name}/{load}/{policy} on {deployment}"

        def make(policy: str = policy, deployment: str = deployment) -> dict[str, Any]:
            slo = paper_slo(machine)
            run = bench.run(requests, machine.fit(), policy, deployment, slo)
            return figures_of(run, slo)

        bench.store.get(key, make)


MACHINE_PARTS = {
    "traces": traces,
    "targets": by_targets.measure,
    "batches": batches,
    "chunks": chunks,
    "lengths": lengths,
}

PAIR_PARTS = ("pairs", "crowds", "splits", "eight")  # each a module of measured pairs


def _head(requests: pd.DataFrame, count: int) -> pd.DataFrame:
    """The first requests, begun anew from the first if there are too few."""
    rows = np.arange(count) % len(requests)
    return requests.iloc[rows].reset_index(drop=True)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description="Compare policies on the same requests.")
    others = ["map", *PAIR_PARTS, "price", "cpu", "report"]
    parser.add_argument("part", choices=[*MACHINE_PARTS, *others])
    parser.add_argument("--machines", default="h100x8", help="of MACHINES, with commas")
    parser.add_argument("--segments", default="code,conv", help="of the map: code,conv,mooncake")
    parser.add_argument("--traces", type=Path, help="folder of published traces (the cache)")
    parser.add_argument("--fit", type=Path, help="of this machine, for cpu (the one that ships)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    with errors_in_one_line():
        _run(args)


def _run(args: argparse.Namespace) -> None:
    segments = [find_segment(name) for name in args.segments.split(",")]
    machines = [find_machine(name) for name in args.machines.split(",")]
    bench = Bench(Store(args.out, fresh=args.fresh), args.traces)
    if args.part in MACHINE_PARTS:
        for machine in machines:
            MACHINE_PARTS[args.part](bench, machine)
    elif args.part == "map":
        load_map(bench, machines, segments)
    elif args.part in PAIR_PARTS:
        import_module(f"benchmarks.policies.{args.part}").measure(bench.store, args.traces)
    elif args.part == "price":
        from benchmarks.policies.price import measure as measure_price

        measure_price(bench.store, machines[0])
    elif args.part == "cpu":
        from benchmarks.policies.cpu import measure

        measure(bench.store, args.fit)
    else:
        from benchmarks.policies.page import write

        write(bench.store.results)


if __name__ == "__main__":
    main()
