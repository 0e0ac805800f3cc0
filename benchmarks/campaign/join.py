"""From a campaign's folder to one JSON file: every run held against what its profile predicts.

The fit sees the profile alone: no run is in it. Each run is predicted twice: with the acceptance
recorded on the profile's prompts, and with that of the prompts which the run served, so that what
other prompts do is told from what the model gets wrong. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.campaign.closed_profile import closed_profile, keep_machine
from benchmarks.campaign.intervals import likely, times_sigma, tokens_sigma
from benchmarks.campaign.requests import LONG, kind, request_file
from benchmarks.campaign.result_file import compact
from benchmarks.campaign.units import BATCH, WORKLOADS, Workload
from codesign.acceptance import AcceptanceProfile
from codesign.artifacts import header, read_table, write_text
from codesign.config import SLO, Serving, parse_deployment
from codesign.errors import InfeasibleError
from codesign.fit import ACCEPTANCE_FILE, PROFILE_FILE, Fit, fit_profile
from codesign.fit.calibration import held_out_chances
from codesign.plan import Plan
from codesign.planner import Question, search
from codesign.planner.plan_file import save_plan
from codesign.profiler.store import ACCEPTANCE_PART
from codesign.records import RoundLog
from codesign.run_directory import read_run
from codesign.sim import simulate
from codesign.traces import Trace
from codesign.validate import RunComparison, Validation, validate

NUM_SEEDS, SEED = 8, 0
OBJECTIVES = {"stream": "latency", "batch": "goodput", "segment": "goodput"}
FIGURE = {"latency": ("tpot_mean", False), "goodput": ("throughput", True)}
BINS = 10
MAX_KV_TOKENS = 8 * 2048
FIT_FILE = "fit.json"


def write_result(out: Path, file: Path, remarks: Sequence[str] = ()) -> None:
    """Join every pair that has a profile and runs.

    Args:
        out: The campaign's folder.
        file: To write.
        remarks: What a reader must know of this campaign.
    """
    folders = sorted(folder for folder in out.iterdir() if is_ready(folder))
    pairs = [join_pair(folder) for folder in folders]
    hardware = json.loads((next(iter(out.glob(f"*/closed/{PROFILE_FILE}")))).read_text())[
        "hardware"
    ]
    meta = header("campaign", seed=SEED)
    body = {
        **meta,
        "hardware": hardware,
        "num_seeds": NUM_SEEDS,
        "remarks": list(remarks),
        "pairs": pairs,
    }
    write_text(file, compact(body))
    print(f"wrote {file}: {sum(len(p['runs']) for p in pairs)} runs of {len(pairs)} pairs")


def is_ready(folder: Path) -> bool:
    """Whether acceptance and a deployment are measured."""
    parts = sorted((folder / "profile" / "parts").glob("*.parquet"))
    return len(parts) > 1 and any(part.stem == ACCEPTANCE_PART for part in parts)


def join_pair(folder: Path) -> dict[str, Any]:
    """Fit, plan and compare one pair."""
    fit = fit_profile(closed_profile(folder))
    fit.save(folder / FIT_FILE)
    keep_machine(folder / FIT_FILE, folder / "closed" / PROFILE_FILE)
    runs: list[dict[str, Any]] = []
    plans: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        known = _fit_to_these(folder, workload, fit)
        for workers, paths in _by_workers(folder, workload).items():
            plan = make_plan(folder, workload, fit, workers, paths)
            validation = validate(plan, fit, paths)
            again, requests = None, plan.requests()
            if known is not None:
                again = validate(plan, known, paths, requests=each_its_own(requests))
            for number, run in enumerate(validation.runs):
                twin = None if again is None else again.runs[number]
                line = row(run, fit, workload, requests, twin)
                if workload.batch == 1:
                    line["figures"]["decode_speed"] = decode_speeds(plan, run, fit, known)
                runs.append(line)
            plans.append({"workers": workers, **judgement(plan, validation, workload, again)})
    return {
        "pair": folder.name,
        "target": fit.target,
        "draft": fit.draft,
        "errors": fit.errors,
        "recorded": sum(len(group) for group in fit.acceptance.recordings.values()),
        "forms": {name: step.form for name, step in fit.steps.items()},
        "calibration": calibration_rows(fit.acceptance),
        "sessions": _sessions(folder),
        "plans": plans,
        "runs": runs,
    }


def _by_workers(folder: Path, workload: Workload) -> dict[int, list[Path]]:
    """Runs of a workload by the number of GPUs that they use."""
    found: dict[int, list[Path]] = {}
    for path in sorted(p.parent for p in (folder / "runs" / workload.name).glob("*/run.json")):
        found.setdefault(_workers(_candidate(path)), []).append(path)
    return dict(sorted(found.items()))


def _candidate(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_text(encoding="utf-8"))["candidate"]


def _workers(candidate: dict[str, Any]) -> int:
    return parse_deployment(candidate["label"].split(" on ")[1].split(",")[0]).num_workers


def make_plan(
    folder: Path, workload: Workload, fit: Fit, workers: int, paths: Sequence[Path]
) -> Plan:
    """What the planner chooses among the plans of the grid."""
    file = request_file(folder, workload)
    requests = read_table(file, kind="trace")[0]
    if LONG in fit.acceptance.recordings:
        columns = requests["category"], requests["prompt_tokens"]
        requests = requests.assign(category=list(map(kind, *columns)))
    candidates = [_candidate(path) for path in paths]
    wide = {
        label: cost for label, cost in fit.costs.items()
        if parse_deployment(label).num_workers == workers
    }  # fmt: skip
    objective = OBJECTIVES[workload.name]
    question = Question(
        requests=requests,
        fit=replace(fit, costs=wide),
        slo=SLO(),
        serving=Serving(max_kv_tokens=MAX_KV_TOKENS),
        objective=objective,
        workers=workers,
        max_batch=workload.batch,
        policies=tuple(dict.fromkeys(c["label"].split(" on ")[0] for c in candidates)),
        seed=SEED,
        num_seeds=NUM_SEEDS,
    )
    trace = Trace(workload.name, requests, str(file), (), "")
    plan_file = folder / f"{workload.name}-{workers}.plan.json"
    for slo in targets(workload, fit, workers):
        question = replace(question, slo=slo)
        try:
            answer = search(question)
            break
        except InfeasibleError:
            continue
    return save_plan(plan_file, question, answer, trace=trace, fit_file=folder / FIT_FILE)


def targets(workload: Workload, fit: Fit, workers: int) -> list[SLO]:
    """Targets of a segment, what the fit says of a full plain batch times 1.5 and more; or none."""
    cost = fit.costs.get(str(workers))
    if not workload.seconds or cost is None:
        return [SLO()]
    rows = workload.batch
    tpot = cost.target(rows, 300.0 * rows, rows)
    ttft = 2.0 * cost.prefill(384.0) + tpot
    return [*(SLO(ttft * x, tpot * x, 50.0) for x in (1.5, 3.0, 6.0)), SLO()]


def judgement(
    plan: Plan, validation: Validation, workload: Workload, known: Validation | None = None
) -> dict[str, Any]:
    """The planner's choice among what was measured, and what it loses."""
    figure, more_is_better = FIGURE[plan.objective]
    measured = {run.label: run.figure(figure) for run in validation.runs}
    values = {label: c.measured for label, c in measured.items() if c is not None}
    chosen = next((s.label for s in plan.scored if s.label in values), None)
    sign = 1.0 if more_is_better else -1.0
    best = max(values, key=lambda label: sign * values[label])

    def regret(choice: str | None) -> float | None:
        return None if choice is None else abs(values[choice] - values[best]) / values[best]

    expected = {r.label: r.figure(figure) for r in known.runs} if known else {}
    ranked = {label: sign * c.predicted.value for label, c in expected.items() if c is not None}
    ranking = next((r for r in validation.rankings if r.figure == figure), None)
    return {
        "workload": workload.name,
        "objective": plan.objective,
        "figure": figure,
        "requests": plan.num_requests,
        "slo": {"ttft": plan.slo.ttft, "tpot": plan.slo.tpot},
        "chosen": chosen,
        "best": best,
        "regret": regret(chosen),
        "regret_known": regret(max(ranked, key=lambda label: ranked[label], default=None)),
        "num_runs": len(values),
        "correlation": None if ranking is None else ranking.correlation,
        "wrong_pairs": None if ranking is None else [ranking.num_wrong, ranking.num_pairs],
    }


def row(
    run: RunComparison,
    fit: Fit,
    workload: Workload,
    requests: pd.DataFrame,
    known: RunComparison | None,
) -> dict[str, Any]:
    """One run: [predicted, low, high, measured] of each figure, with 80 % intervals."""
    tokens = tokens_sigma(run, fit, requests)
    figures: dict[str, list[float]] = {}
    for comparison in run.figures:
        name = comparison.name
        if name == "mean_batch" or comparison.error is None:
            continue
        counts = name == "acceptance_length"
        waits = workload.batch > 1 or not name.startswith("tpot")  # for prompts, its own or others'
        times = 0.0 if counts else times_sigma(run, fit, waits_for_prompts=waits)
        low, high = likely(run.by_seed[name], times, tokens)
        figures[name] = [comparison.predicted.value, low, high, comparison.measured]
        if known is not None and (twin := known.figure(name)) is not None:
            figures[name].append(twin.predicted.value)
    values = {c.name: [c.predicted.value, c.measured] for c in (*run.spans, *run.rounds)}
    return {
        "workload": workload.name,
        "label": run.label,
        "figures": figures,
        "rounds": values,
        "notes": list(run.notes),
    }


def decode_speeds(plan: Plan, run: RunComparison, fit: Fit, known: Fit | None) -> list[float]:
    """Tokens a second in rounds without a prompt, as a figure of ``row``."""

    def simulated(of: Fit, requests: pd.DataFrame) -> list[float]:
        return [
            _decode_speed(
                simulate(requests, run.candidate, of, serving=plan.serving, seed=seed).rounds
            )
            for seed in plan.simulation_seeds
        ]

    requests = plan.requests().iloc[: len(run.requests)]
    values = simulated(fit, requests)
    times = times_sigma(run, fit, waits_for_prompts=False)
    figure = [float(np.mean(values)), *likely(values, times, tokens_sigma(run, fit, requests))]
    figure.append(_decode_speed(read_run(run.path).records.rounds))
    if known is None:
        return figure
    return [*figure, float(np.mean(simulated(known, each_its_own(requests))))]


def _decode_speed(rounds: RoundLog) -> float:
    quiet = rounds.column("prefill_tokens") == 0
    tokens, seconds = (rounds.column(name)[quiet] for name in ("num_emitted_tokens", "seconds"))
    return float(tokens.sum() / seconds.sum())


def calibration_rows(profile: AcceptanceProfile) -> dict[str, list[list[float]]]:
    """By kind of prompt: ten bins of [mean chance, share accepted, count], requests held out."""
    found = {}
    chances = held_out_chances(profile)
    for wanted in ("all", *profile.categories):
        parts = [v for name, vs in chances.items() if wanted in ("all", name) for v in vs]
        chance, agreed = (np.concatenate([part[i] for part in parts]) for i in range(2))
        at = np.minimum((chance * BINS).astype(np.int64), BINS - 1)
        found[wanted] = [
            [float(chance[at == b].mean()), float(agreed[at == b].mean()), int((at == b).sum())]
            for b in range(BINS)
            if (at == b).any()
        ]
    return found


def _fit_to_these(folder: Path, workload: Workload, fit: Fit) -> Fit | None:
    """The fit with the acceptance of each request that the runs served, a kind of its own."""
    names = (workload.name, BATCH.name) if not workload.seconds else ()
    files = [folder / "runs" / f"{name}.{ACCEPTANCE_FILE}" for name in names]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        return None
    recorded = AcceptanceProfile.from_table(read_table(file, kind="profile")[0])
    own = {_own(r.request): (r,) for group in recorded.recordings.values() for r in group}
    return replace(fit, acceptance=AcceptanceProfile(dict(sorted(own.items()))))


def _own(request: int) -> str:
    return f"request {request:04d}"


def each_its_own(requests: pd.DataFrame) -> pd.DataFrame:
    """Requests that play what was recorded of them."""
    return requests.assign(category=[_own(number) for number in range(len(requests))])


def _sessions(folder: Path) -> list[dict[str, Any]]:
    file = folder / "sessions.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
