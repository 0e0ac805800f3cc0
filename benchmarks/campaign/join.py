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

from benchmarks.campaign.blind import blind_fits
from benchmarks.campaign.chosen_plan import (
    FIT_FILE,
    NUM_SEEDS,
    SEED,
    candidate_of,
    judgement,
    make_plan,
    workers_of,
)
from benchmarks.campaign.closed_profile import closed_profile, keep_machine
from benchmarks.campaign.intervals import likely, likely_replay, luck_of, times_sigma
from benchmarks.campaign.prompt_luck import PromptLuck
from benchmarks.campaign.questions import of_questions, served_questions
from benchmarks.campaign.replays import NUM_DRAWS, replay_draws
from benchmarks.campaign.requests import request_file, seed_of, tokens_of
from benchmarks.campaign.result_file import compact
from benchmarks.campaign.schedule import SESSIONS
from benchmarks.campaign.units import BATCH, WORKLOADS, Workload
from codesign.acceptance import AcceptanceProfile
from codesign.artifacts import header, read_table, write_text
from codesign.fit import ACCEPTANCE_FILE, PROFILE_FILE, Fit, fit_profile
from codesign.fit.calibration import held_out_chances
from codesign.fit.drift import BATCH as OF_BATCHES
from codesign.fit.drift import HOST, SHARE
from codesign.plan import Plan
from codesign.profiler.store import ACCEPTANCE_PART
from codesign.records import RoundLog
from codesign.run_directory import read_run
from codesign.sim import simulate
from codesign.validate import RunComparison, validate

BINS = 10


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
        "num_draws": NUM_DRAWS,
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
    seed, runs = seed_of(folder), []
    plans: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        asked = fit_to_questions(folder, workload, fit)
        known = fit_to_these(folder, workload, asked)
        for workers, paths in _by_workers(folder, workload).items():
            plan = make_plan(folder, workload, asked, workers, paths)
            validation = validate(plan, asked, paths)
            again, requests = None, plan.requests()
            if known is not None:
                again = validate(plan, known, paths, requests=each_its_own(requests))
            for number, run in enumerate(validation.runs):
                twin = None if again is None else again.runs[number]
                luck = luck_of(run, plan, asked, workload, seed=seed)
                line = row(run, asked, workload, luck, twin)
                if workload.seconds:
                    replay_figures(line, plan, run, asked, known, luck)
                if workload.batch == 1:
                    line["figures"]["decode_speed"] = decode_speeds(plan, run, asked, known, luck)
                runs.append(line)
            plans.append({"workers": workers, **judgement(plan, validation, workload, again)})
    return {
        "pair": folder.name,
        "target": fit.target,
        "draft": fit.draft,
        "errors": fit.errors,
        "unsure": {name: step.unsure for name, step in fit.steps.items()},
        "drift": {
            "host": HOST,
            "share": SHARE,
            "batch": OF_BATCHES,
            "host_spread": fit.host_spread,
            "visit_spread": fit.visit_spread,
        },
        "requests_seed": seed,
        "recorded": sum(len(group) for group in fit.acceptance.recordings.values()),
        "forms": {name: step.form for name, step in fit.steps.items()},
        "calibration": calibration_rows(fit.acceptance),
        "blind": blind_fits(folder, fit),
        "sessions": _sessions(folder),
        "plans": plans,
        "runs": runs,
    }


def _by_workers(folder: Path, workload: Workload) -> dict[int, list[Path]]:
    """Runs of a workload by the number of GPUs that they use."""
    found: dict[int, list[Path]] = {}
    for path in sorted(p.parent for p in (folder / "runs" / workload.name).glob("*/run.json")):
        found.setdefault(workers_of(candidate_of(path)), []).append(path)
    return dict(sorted(found.items()))


def row(
    run: RunComparison,
    fit: Fit,
    workload: Workload,
    luck: PromptLuck,
    known: RunComparison | None,
) -> dict[str, Any]:
    """One run: [predicted, low, high, measured] of each figure, with 80 % intervals."""
    figures: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    for comparison in run.figures:
        name = comparison.name
        if name == "mean_batch" or comparison.error is None:
            continue
        counts = name == "acceptance_length"
        waits = workload.batch > 1 or not name.startswith("tpot")  # for prompts, its own or others'
        times = 0.0 if counts else times_sigma(run, fit, waits_for_prompts=waits)
        found = likely(run.by_seed[name], times, luck, run.by_seed["acceptance_length"])
        figures[name] = [comparison.predicted.value, *found.bounds, comparison.measured]
        parts[name] = found.parts
        if known is not None and (twin := known.figure(name)) is not None:
            figures[name].append(twin.predicted.value)
    values = {c.name: [c.predicted.value, c.measured] for c in (*run.spans, *run.rounds)}
    return {
        "workload": workload.name,
        "label": run.label,
        "figures": figures,
        "parts": parts,
        "rounds": values,
        "notes": list(run.notes),
    }


def replay_figures(
    line: dict[str, Any],
    plan: Plan,
    run: RunComparison,
    fit: Fit,
    known: Fit | None,
    luck: PromptLuck,
) -> None:
    """Figures of a replay again, with steps as unsure as the fit's."""
    requests = plan.requests()
    draws = replay_draws(plan, run, fit, requests)
    twins = {} if known is None else replay_draws(plan, run, known, each_its_own(requests))
    for name, figure in line["figures"].items():
        lengths = run.by_seed["acceptance_length"]
        found = likely_replay(draws[name], run.by_seed[name], luck, lengths)
        figure[:3] = [found.mean, *found.bounds]
        figure[4:] = [float(np.mean(twins[name]))] if name in twins else []
        line["parts"][name] = found.parts


def decode_speeds(
    plan: Plan, run: RunComparison, fit: Fit, known: Fit | None, luck: PromptLuck
) -> list[float]:
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
    figure = list(likely(values, times, luck, run.by_seed["acceptance_length"]).bounds)
    figure.insert(0, float(np.mean(values)))
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


def fit_to_questions(folder: Path, workload: Workload, fit: Fit) -> Fit:
    """The fit with what was recorded of the questions that the workload asks: not all may be."""
    file = request_file(folder, workload)
    if workload.seconds or not file.exists():
        return fit
    asked = served_questions(len(read_table(file, kind="trace")[0]))
    return replace(fit, acceptance=of_questions(fit.acceptance, asked))


def fit_to_these(folder: Path, workload: Workload, fit: Fit) -> Fit | None:
    """The fit with the acceptance of each request that the runs served, a kind of its own."""
    names = (workload.name, *[BATCH.name] * (not workload.seconds))
    files = [folder / "runs" / f"{name}.{ACCEPTANCE_FILE}" for name in names]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        return None
    recorded = AcceptanceProfile.from_table(read_table(file, kind="profile")[0])
    tokens = tokens_of(workload)  # a stream's are fewer than the batch's, and the first of them
    own = {_own(r.request): (r.part(0, tokens),) for g in recorded.recordings.values() for r in g}
    return replace(fit, acceptance=AcceptanceProfile(dict(sorted(own.items()))))


def _own(request: int) -> str:
    return f"request {request:04d}"


def each_its_own(requests: pd.DataFrame) -> pd.DataFrame:
    """Requests that play what was recorded of them."""
    return requests.assign(category=[_own(number) for number in range(len(requests))])


def _sessions(folder: Path) -> list[dict[str, Any]]:
    file = folder / SESSIONS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
