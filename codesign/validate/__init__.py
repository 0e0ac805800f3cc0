"""Prediction against measurement: simulate what a run served, join the records, state the error.

Imports no torch.

    comparison  what is compared of a run and of all runs, and the errors
    ranking     the order of the candidates, predicted and measured
    words       titles, units and sentences, for the command line, the page and the dashboard
    report      the page, with its charts
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from codesign import Progress
from codesign.candidate import Candidate, ScoredCandidate
from codesign.errors import InputError, counted
from codesign.fit.step_pace import Served, pace_of_run
from codesign.metrics import Metrics, summarise, tpot, ttft
from codesign.plan import Plan
from codesign.planner.predict import Outcome, score, simulate_outcome
from codesign.planner.uncertainty import interval_over_seeds, step_error
from codesign.records import SPANS, RoundLog, RunRecords
from codesign.run_directory import StoredRun, read_run
from codesign.validate.comparison import CHECKED, Comparison, RunComparison, Validation
from codesign.validate.ranking import rank

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

__all__ = ["CHECKED", "Comparison", "RunComparison", "Validation", "validate"]

FIGURES = (
    "ttft_p50", "ttft_p90", "ttft_p99", "tpot_mean", "tpot_p50", "tpot_p90", "tpot_p99",
    "throughput", "acceptance_length", "slo_attainment", "goodput", "mean_batch",
)  # fmt: skip
RANKED = (("throughput", True), ("tpot_mean", False))  # True: more is better
ROUND_FIGURES = (
    "seconds", "prefill", "batch", "rows", "context", "num_expansions", "draft_rows",
    "num_emitted_tokens",
)  # fmt: skip
_RUN_AGAIN = "Run again: codesign run --plan PLAN"
_LEAVE_OUT = "Leave it out of --run, or run again: codesign run --plan PLAN"
OF_QUIET_ROUNDS = (*SPANS, "seconds")


def validate(
    plan: Plan,
    fit: Fit,
    paths: Sequence[Path],
    *,
    requests: pd.DataFrame | None = None,
    plan_hash: str | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Compare runs with fresh simulations of exactly what they served.

    Args:
        plan: Names the requests, the limits and the seeds.
        fit: The plan's.
        paths: Folders of runs.
        requests: Simulated instead of the plan's; the same, but for their kinds of prompt.
        plan_hash: SHA-256 of the plan's file, to tell runs of another plan; None not to.
        progress: Called with ("simulate", done, total), counting simulations.

    Raises:
        InputError: If a folder is no run, or served other requests than the plan's.
    """
    planned = plan.requests() if requests is None else requests
    seeds = list(plan.simulation_seeds)
    comparisons = []
    for number, path in enumerate(paths):

        def report(stage: str, done: int, total: int, first: int = number * len(seeds)) -> None:
            if progress:
                progress(stage, first + done, len(paths) * len(seeds))

        run = read_run(path)
        found = _compare(plan, fit, planned, path, run, report)
        comparisons.append(replace(found, notes=(*found.notes, *_other_plan(run, plan_hash))))
    rankings = tuple(rank(comparisons, name, up, plan.chosen.label) for name, up in RANKED)
    return Validation(
        tuple(comparisons),
        tuple(ranking for ranking in rankings if ranking.num_pairs),
        plan.chosen.label,
        len(seeds),
    )


def _compare(
    plan: Plan, fit: Fit, planned: pd.DataFrame, path: Path, run: StoredRun, progress: Progress
) -> RunComparison:
    candidate = _candidate_of(run, path)
    requests, notes = _served(planned, run, path)
    settings = run.summary.get("settings", {})
    outcomes, simulated = _simulate(plan, fit, requests, candidate, progress)
    lengths = requests["output_tokens"]
    predicted = score(candidate, outcomes, fit, plan.slo, output_tokens=lengths)
    measured = summarise(run.records, plan.slo)
    names = [name for name in FIGURES if plan.slo.is_set or name != "slo_attainment"]
    error = step_error(fit, candidate, predicted.spans)
    cost = fit.costs.get(candidate.deployment.unit.label)
    return RunComparison(
        path=path,
        candidate=candidate,
        origin=run.origin,
        figures=_figures(names, predicted, measured),
        spans=_round_means(SPANS, simulated, run.records, dict.fromkeys(SPANS, error)),
        rounds=_round_means(
            ROUND_FIGURES, simulated, run.records, {"seconds": error, "prefill": error}
        ),
        by_seed={
            name: tuple(o.figures[name] for o in outcomes if name in o.figures) for name in names
        },
        requests=_join(simulated, run.records),
        notes=tuple(notes),
        served=Served.of_summary(run.summary) if run.origin == "measured" else None,
        step_pace=pace_of_run(
            cost,
            run.records.rounds,
            settings,
            is_apart=candidate.deployment.draft_workers > 0,
        ),
        num_unfinished=measured.num_requests - measured.num_finished,
        refused=run.records.refused,
        settings=settings,
    )


def _candidate_of(run: StoredRun, path: Path) -> Candidate:
    if "candidate" not in run.summary:
        raise InputError(f"{path}/run.json does not say what served. {_RUN_AGAIN}")
    try:
        return Candidate.from_dict(run.summary["candidate"])
    except InputError as err:
        raise InputError(f"{path}/run.json is damaged ({err}). {_RUN_AGAIN}") from err


def _simulate(
    plan: Plan, fit: Fit, requests: pd.DataFrame, candidate: Candidate, progress: Progress
) -> tuple[list[Outcome], list[RunRecords]]:
    """What each of the plan's seeds gives."""
    outcomes, simulated = [], []
    for seed in plan.simulation_seeds:
        outcome, records = simulate_outcome(
            requests, candidate, fit, slo=plan.slo, serving=plan.serving, seed=seed
        )
        outcomes.append(outcome)
        simulated.append(records)
        progress("simulate", len(simulated), plan.num_seeds)
    return outcomes, simulated


def _figures(
    names: Sequence[str], predicted: ScoredCandidate, measured: Metrics
) -> tuple[Comparison, ...]:
    """Those that are predicted and measured; and those that are checked, measured or not."""
    values = {name: getattr(measured, name) for name in names}
    return tuple(
        Comparison(name, predicted.predicted[name], math.nan if value is None else value)
        for name, value in values.items()
        if name in predicted.predicted and (value is not None or name in CHECKED)
    )


def _served(planned: pd.DataFrame, run: StoredRun, path: Path) -> tuple[pd.DataFrame, list[str]]:
    """The planned requests that a run served, with the prompt lengths that it served them with."""
    records = run.records.requests
    numbers = [r.request_id for r in records]
    if not records or not set(numbers) <= set(range(len(planned))):
        raise InputError(f"{path} served other requests than the plan's. {_LEAVE_OUT}")
    requests = planned.iloc[numbers].reset_index(drop=True)
    moved = np.abs(requests["arrival"].to_numpy() - np.array([r.arrival for r in records]))
    if moved.max() > 1e-3:
        raise InputError(f"{path} served another trace than the plan's. {_LEAVE_OUT}")
    notes = list(run.records.notes)
    if len(requests) < len(planned):
        notes.append(f"served {len(requests):,} of the plan's {len(planned):,} requests")
    prompt_tokens = np.array([r.prompt_tokens for r in records], np.int64)
    num_other = int((prompt_tokens != requests["prompt_tokens"].to_numpy()).sum())
    if num_other:
        notes.append(f"{counted(num_other, 'prompt')} not as long as planned; predicted as served")
    num_cut = sum(
        r.finish is not None and r.output_tokens < wanted
        for r, wanted in zip(records, requests["output_tokens"], strict=True)
    )
    if num_cut:
        notes.append(f"{counted(num_cut, 'answer')} ended before the length that was planned for")
    num_unfinished = sum(r.finish is None for r in records)
    if num_unfinished:
        notes.append(
            f"{num_unfinished:,} of {len(records):,} requests did not finish; predicted as if all "
            "had, so the figures cannot be compared"
        )
    return requests.assign(prompt_tokens=prompt_tokens), notes


def _other_plan(run: StoredRun, plan_hash: str | None) -> list[str]:
    """A note if a run says that it is of another plan."""
    named = run.summary.get("inputs", {}).get("plan", {})
    if plan_hash is None or named.get("sha256", plan_hash) == plan_hash or "path" not in named:
        return []
    return [f"the run names another plan, {named['path']}; it served the same requests"]


def _round_means(
    names: Sequence[str],
    simulated: Sequence[RunRecords],
    measured: RunRecords,
    errors: dict[str, float],
) -> tuple[Comparison, ...]:
    """Means over rounds; ``errors`` are relative and widen the intervals."""
    if not measured.rounds or not all(records.rounds for records in simulated):
        return ()
    return tuple(
        Comparison(
            name,
            interval_over_seeds(
                [_mean(records.rounds, name) for records in simulated], errors.get(name, 0.0)
            ),
            _mean(measured.rounds, name),
        )
        for name in names
    )


def _mean(rounds: RoundLog, name: str) -> float:
    values = rounds.column(name)
    quiet = rounds.column("prefill_tokens") == 0
    return float(values[quiet].mean() if name in OF_QUIET_ROUNDS and quiet.any() else values.mean())


def _join(simulated: Sequence[RunRecords], measured: RunRecords) -> pd.DataFrame:
    """Rows of request after request; a simulation's are in the order of what was simulated."""
    import pandas as pd

    rows = []
    for at, request in enumerate(measured.requests):
        twins = [records.requests[at] for records in simulated]
        row: dict[str, object] = {"request_id": request.request_id, "category": request.category}
        for name, figure in (("ttft", ttft), ("tpot", tpot)):
            values = [value for value in map(figure, twins) if value is not None]
            row[f"predicted_{name}"] = float(np.mean(values)) if values else np.nan
            value = figure(request)
            row[f"measured_{name}"] = np.nan if value is None else value
        rows.append(row)
    return pd.DataFrame(rows)
