"""Runs predicted again with the steps that their own rounds took: what is left is not the fit's.

    python -m benchmarks.campaign.true_steps campaign [stream batch segment]

Needs the folder that ``--join`` has been through. A prediction may be off because its steps are, or
the acceptance of the requests, or what the simulator makes of both. Here the steps of a fit are
scaled to those of a run's rounds, the target's and, where both take turns, the draft's each priced
at the rows, context and requests of those rounds; re-root, links and prompts are the run's, too.
How long forwards beside the verification took is in no record: these stay the fit's. It judges;
nothing is fitted to it. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.campaign.chosen_plan import FIT_FILE, candidate_of, workers_of
from benchmarks.campaign.goals import signed, table
from benchmarks.campaign.join import each_its_own, fit_to_these
from benchmarks.campaign.units import WORKLOADS, Workload
from codesign.candidate import Candidate
from codesign.fit import Fit
from codesign.fit.step_pace import step_seconds
from codesign.plan import Plan
from codesign.policy.cost import RoundCost
from codesign.records import RunRecords
from codesign.run_directory import read_run
from codesign.validate import validate

FIGURES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "throughput", "slo_attainment")
SAME_START = 1e-3  # seconds between a round's start and the admission of its prompts


def true_cost(cost: RoundCost, records: RunRecords, *, has_draft: bool) -> RoundCost:
    """A deployment's costs as the rounds of one run say them."""
    rounds = records.round_table()
    quiet = rounds.loc[rounds["prefill_tokens"] == 0]
    shapes = (quiet[name] for name in ("rows", "context", "batch", "running"))
    found = replace(
        cost,
        target=cost.target.scaled(_share(quiet["target"], step_seconds(cost.target, *shapes))),
        prefill=cost.prefill.scaled(_share(*_prompts(cost, records, rounds))),
    )
    if not has_draft:
        return found
    others = quiet["batch"].to_numpy(float) - 1.0
    line = np.column_stack([np.ones_like(others), others])
    reroot, each = np.linalg.lstsq(line, quiet["reroot"].to_numpy(float), rcond=None)[0]
    found = replace(found, reroot=float(reroot), reroot_each=float(each))
    found = replace(found, reroot_row=0.0, reroot_node=0.0)
    found = replace(found, reroot_any=0.0, reroot_tree=0.0, reroot_kept=0.0)
    if cost.link:
        links = quiet["link_there"] + quiet["link_back"]
        return replace(found, link=float(links.mean()) / 2.0)
    forwards = quiet["num_expansions"].to_numpy(float)
    rows = quiet["draft_rows"].to_numpy(float) / np.maximum(forwards, 1.0)
    drafting = forwards * cost.draft.of_arrays(rows, quiet["context"], quiet["batch"])
    choosing = cost.choices(quiet["batch"].to_numpy(float), quiet["rows"].to_numpy(float))
    awaited = quiet["draft"] + quiet["link_back"] - choosing
    return replace(found, draft=cost.draft.scaled(_share(awaited, drafting)), child=0.0)


def _share(measured: Sequence[float] | pd.Series, priced: Sequence[float] | np.ndarray) -> float:
    """By what factor steps took longer than they were priced at; 1 where there are none."""
    whole = float(np.sum(priced))
    return float(np.sum(measured)) / whole if whole > 0.0 else 1.0


def _prompts(
    cost: RoundCost, records: RunRecords, rounds: pd.DataFrame
) -> tuple[list[float], list[float]]:
    """Seconds of the prompts of rounds whose requests are known, and their prices."""
    by_time: dict[float, list[tuple[int, int]]] = {}
    for request in records.requests:
        if request.admitted is not None:
            by_time.setdefault(request.admitted, []).append((request.prompt_tokens, 0))
    times = np.array(sorted(by_time))
    measured, priced = [], []
    for each in rounds.loc[rounds["prefill_tokens"] > 0].itertuples():
        nearest = float(times[np.abs(times - each.start).argmin()])
        prompts = by_time[nearest]
        is_whole = sum(rows for rows, _ in prompts) == each.prefill_tokens
        if is_whole and abs(nearest - each.start) < SAME_START:
            measured.append(float(each.prefill))
            priced.append(cost.prefill.of_prompts(prompts))
    return measured, priced


def compare(folder: Path, workload: Workload) -> list[list[str]]:
    """Rows of a table: errors of runs as predicted, with true steps, and with known requests."""
    fit, rows = Fit.load(folder / FIT_FILE), []
    known = fit_to_these(folder, workload, fit)
    for path in sorted(p.parent for p in (folder / "runs" / workload.name).glob("*/run.json")):
        named = candidate_of(path)
        plan = Plan.load(folder / f"{workload.name}-{workers_of(named)}.plan.json")
        candidate = Candidate.from_dict(named)
        label = candidate.deployment.unit.label
        has_draft = candidate.speculation.has_draft
        cost = true_cost(fit.costs[label], read_run(path).records, has_draft=has_draft)
        own = each_its_own(plan.requests())
        asked: list[tuple[Fit, pd.DataFrame | None]] = [
            (fit, None), (replace(fit, costs={label: cost}), None),
        ]  # fmt: skip
        if known is not None:
            asked.append((replace(known, costs={label: cost}), own))
        runs = [validate(plan, using, [path], requests=of).runs[0] for using, of in asked]
        for name in FIGURES:
            figures = [run.figure(name) for run in runs]
            if all(f is not None and f.error is not None for f in figures):
                errors = [signed(f.error) for f in figures if f is not None and f.error is not None]
                rows.append([candidate.label, name, *errors, *[""] * (3 - len(errors))])
    return rows


def main(words: Sequence[str]) -> None:
    """Print a table for each pair and workload."""
    out, wanted = Path(words[0]), words[1:]
    heads = ["plan", "figure", "as predicted", "steps true", "and acceptance known"]
    for folder in sorted(file.parent for file in out.glob(f"*/{FIT_FILE}")):
        for workload in WORKLOADS:
            if workload.name in (wanted or [w.name for w in WORKLOADS]):
                print(f"{folder.name}, {workload.name}\n")
                print(table(heads, compare(folder, workload)))


if __name__ == "__main__":
    main(sys.argv[1:])
