"""Policies that ranks have served: each run next to its simulation, and the goals checked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.policies.figures import NEEDED
from benchmarks.policies.run_figures import figures_of, mean_figures
from benchmarks.policies.segments import KV_TOKENS, LOAD
from codesign.artifacts import read_table
from codesign.artifacts.machine import machine_name
from codesign.candidate import Candidate
from codesign.config import SLO, Scheduling, Serving
from codesign.fit import Fit
from codesign.fit.step_pace import step_seconds
from codesign.planner.defaults import expecting
from codesign.policy.cost import RoundCost
from codesign.policy.host_cost import Drafting
from codesign.policy.speculation import drafting_of
from codesign.records import RunRecords
from codesign.run_directory import read_run
from codesign.sim import simulate

NUM_SEEDS = 5


def join(args: argparse.Namespace) -> None:
    """Simulate what each run served, and put both into the results."""
    about = json.loads((args.folder / "about.json").read_text())
    fit, slo = Fit.load(args.folder / about["fit"]), SLO(**about["slo"])
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results = {k: value for k, value in results.items() if not k.startswith(f"{args.key}/")}
    machine = json.loads((args.folder / about["fit"]).read_text())["hardware"]
    results[f"{args.key}/about"] = {
        **about["slo"], "target": fit.target, "draft": fit.draft, "load": LOAD,
        "machine": machine_name(machine),
        **{key: about[key] for key in ("created", "batch", "ships")},
        "scheduling": (scheduling := about.get("scheduling", "fcfs")),
    }  # fmt: skip
    for name in about["segments"]:
        found = dict(_joined(args.folder, name, fit, slo, scheduling))
        results |= {f"{args.key}/{name}/{way}": figures for way, figures in found.items()}
        print(f"{name}:\n" + "\n".join(_lines(found)))
    args.out.write_text(json.dumps(results, indent=1, default=float) + "\n", encoding="utf-8")


def _joined(
    folder: Path, name: str, fit: Fit, slo: SLO, scheduling: Scheduling
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(policy and split, measured figures with the simulated ones beside them)."""
    planned = read_table(folder / f"{name}.parquet", kind="trace")[0]
    outputs = read_run(folder / "runs" / name / "plain").outputs  # if they have been kept
    for path in sorted((folder / "runs" / name).glob("*/run.json")):
        run = read_run(path.parent)
        candidate = Candidate.from_dict(run.summary["candidate"])
        lengths = np.array([r.prompt_tokens for r in run.records.requests], np.int64)
        requests = planned.assign(prompt_tokens=lengths)
        figures = dict(run.summary["metrics"])
        cost = fit.costs[candidate.deployment.label]
        cost = cost.drafting(Drafting(drafting_of(candidate.speculation).fanout))
        figures |= _against_fit(run.records, cost, is_split=candidate.deployment.draft_workers > 0)
        slower = replace(
            cost,
            prefill=cost.prefill.scaled(figures["prompts"]),
            draft_prefill=cost.draft_prefill.scaled(figures["prompts"]),
        )
        known = replace(fit, costs={candidate.deployment.label: slower})
        figures["simulated"] = _simulated(requests, candidate, fit, slo, scheduling)
        figures["prompts_known"] = _simulated(requests, candidate, known, slo, scheduling)
        if outputs is not None and run.outputs is not None:
            figures["same_outputs"] = sum(run.outputs[n] == o for n, o in outputs.items())
        yield f"{run.summary['label']} on {candidate.deployment.label}", figures


def _simulated(
    requests: pd.DataFrame, candidate: Candidate, fit: Fit, slo: SLO, scheduling: Scheduling
) -> dict[str, Any]:
    """Mean figures over the seeds."""
    kv_tokens = candidate.max_batch * KV_TOKENS
    serving = expecting(Serving(max_kv_tokens=kv_tokens, scheduling=scheduling), requests)
    return mean_figures(
        [
            figures_of(simulate(requests, candidate, fit, serving=serving, slo=slo, seed=seed), slo)
            for seed in range(NUM_SEEDS)
        ]
    )


def _against_fit(run: RunRecords, cost: RoundCost, *, is_split: bool) -> dict[str, float]:
    """Prompts and target steps over the fit's, and seconds of a round's drafting beyond its steps.

    The last only where target and draft take turns: else most of it is hidden.
    """
    rounds = run.rounds
    shape = ("rows", "context", "batch", "running")
    names = (*shape, "num_expansions", "draft_rows", "target", "draft")
    table = pd.DataFrame({name: rounds.column(name) for name in names})
    quiet = table.loc[rounds.column("prefill_tokens") == 0]
    steps = step_seconds(cost.target, *(quiet[name] for name in shape))
    found = {
        "prompts": float(rounds.column("prefill").sum())
        / sum(cost.prefill(request.prompt_tokens) for request in run.requests),
        "target_steps": float(np.sum(quiet["target"])) / float(steps.sum()),
    }
    drafting = quiet.loc[quiet["num_expansions"] > 0]
    if len(drafting) and not is_split:
        rows = drafting["draft_rows"] / drafting["num_expansions"]
        step = cost.draft.of_arrays(rows, drafting["context"], drafting["batch"])
        beyond = drafting["draft"] - drafting["num_expansions"] * step
        found["beyond_draft_steps"] = float(np.mean(beyond))  # what deciding takes is in it
    return found


def statements(found: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, bool]]:
    """What was asked, the measured figure, and whether it holds."""
    base = found[next(way for way in found if way.startswith("plain on"))]["latency_mean"]
    speed = {way: base / f["latency_mean"] for way, f in found.items()}
    in_slo = {way: f["slo_attainment"] for way, f in found.items()}

    def best(values: dict[str, float], *kinds: str) -> float:
        return max((v for way, v in values.items() if way.startswith(kinds)), default=np.nan)

    trees, plain = best(speed, "batch-tree", "async-batch"), ("plain",)
    fixed = best(speed, "chain")
    paper = best(speed, "specserve-8 on")
    rivals = best(in_slo, "chain", "specserve", "tree", "async-tree", *plain)
    points = best(in_slo, "batch-tree", "async-batch") - rivals
    return {
        f"batch trees / SpecServe, at least {NEEDED}": (trees / paper, trees >= NEEDED * paper),
        f"batch trees / plain, at least {NEEDED}": (trees, trees >= NEEDED),
        "SpecServe / best fixed length, at least 1": (paper / fixed, paper >= fixed),
        "SLO attainment of batch trees minus the best other's, at least 0": (points, points >= 0.0),
    }


def rank_correlation(found: Mapping[str, Mapping[str, Any]], kind: str = "simulated") -> float:
    """Of measured and simulated mean latencies, over the policies.

    Args:
        found: Figures by policy and split.
        kind: "simulated", or "prompts_known": after prompts took what they did in each run.
    """
    ways = [way for way in found if "again" not in way.split()]
    measured = [found[way]["latency_mean"] for way in ways]
    simulated = [found[way][kind]["latency_mean"] for way in ways]
    ranks = np.argsort(np.argsort([measured, simulated], axis=1), axis=1)
    return float(np.corrcoef(*ranks)[0, 1])


def _lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    base = found[next(way for way in found if way.startswith("plain on"))]
    for way, f in sorted(found.items(), key=lambda pair: pair[1]["latency_mean"]):
        s, known = f["simulated"], f["prompts_known"]
        yield (
            f"  {way:32s} x{base['latency_mean'] / f['latency_mean']:.2f} "
            f"({base['simulated']['latency_mean'] / s['latency_mean']:.2f})  TPOT "
            f"{1e3 * f['tpot_mean']:.2f} ({1e3 * s['tpot_mean']:.2f}) ms  TTFT p50 "
            f"{1e3 * f['ttft_p50']:.0f} ({1e3 * s['ttft_p50']:.0f}) ms  in SLO "
            f"{f['slo_attainment']:.0%} ({s['slo_attainment']:.0%})  tokens a round "
            f"{f['acceptance_length']:.2f} ({s['acceptance_length']:.2f})  outputs "
            f"{f.get('same_outputs', '-')} of {f['num_requests']} as plain's; prompts x"
            f"{f['prompts']:.2f}, target x{f['target_steps']:.2f} of the fit, beyond draft steps "
            f"{1e3 * f.get('beyond_draft_steps', 0.0):.2f} ms; latency {f['latency_mean']:.3f} "
            f"({s['latency_mean']:.3f}, with these prompts {known['latency_mean']:.3f})"
        )
    yield f"  rank correlation of latencies, measured and simulated: {rank_correlation(found):.2f}"
    yield f"  the same with each run's own prompts: {rank_correlation(found, 'prompts_known'):.2f}"
    for asked, (value, holds) in statements(found).items():
        yield f"  {asked}: {value:.3f}, {'holds' if holds else 'DOES NOT HOLD'}"
