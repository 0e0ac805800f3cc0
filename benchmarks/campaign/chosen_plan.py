"""What the planner chooses among the plans that a campaign ran, and what that loses.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.campaign.questions import LONG, kind
from benchmarks.campaign.requests import request_file
from benchmarks.campaign.units import Workload
from codesign.artifacts import read_table
from codesign.config import SLO, Serving, parse_deployment
from codesign.errors import InfeasibleError
from codesign.fit import Fit
from codesign.plan import Plan
from codesign.planner import Question, search
from codesign.planner.plan_file import save_plan
from codesign.traces import Trace
from codesign.validate import Validation
from codesign.validate.ranking import rank, rank_correlation

NUM_SEEDS, SEED = 8, 0
NUM_REDRAWN = 400
# By workload: what a plan is to be good at, by which figure that is judged, whether more is better.
OBJECTIVES = {
    "stream": ("latency", "tpot_mean", False),
    "batch": ("goodput", "throughput", True),
    "segment": ("goodput", "goodput", True),
}
MAX_KV_TOKENS = 8 * 2048
FIT_FILE = "fit.json"


def candidate_of(path: Path) -> dict[str, Any]:
    """What served a run."""
    return json.loads((path / "run.json").read_text(encoding="utf-8"))["candidate"]


def workers_of(candidate: dict[str, Any]) -> int:
    """GPUs that it uses."""
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
    candidates = [candidate_of(path) for path in paths]
    wide = {
        label: cost for label, cost in fit.costs.items()
        if parse_deployment(label).num_workers == workers
    }  # fmt: skip
    objective = OBJECTIVES[workload.name][0]
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
    else:
        raise InfeasibleError(f"{workload.name}: no plan, whatever the target")
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
    plan: Plan, validation: Validation, workload: Workload, known: Validation | None
) -> dict[str, Any]:
    """The planner's choice among what was measured, and what it loses."""
    _, figure, more_is_better = OBJECTIVES[workload.name]
    measured = {run.label: run.figure(figure) for run in validation.runs}
    values = {label: c.measured for label, c in measured.items() if c is not None}
    chosen = next((s.label for s in plan.scored if s.label in values), None)
    sign = 1.0 if more_is_better else -1.0
    best = max(values, key=lambda label: sign * values[label])

    def regret(choice: str | None) -> float | None:
        if choice is None or not values[best]:
            return None
        return abs(values[choice] - values[best]) / values[best]

    expected = {r.label: r.figure(figure) for r in known.runs} if known else {}
    ranked = {label: sign * c.predicted.value for label, c in expected.items() if c is not None}
    ranking = rank(validation.runs, figure, more_is_better, plan.chosen.label)
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
        "correlation": ranking.correlation,
        "redrawn": redrawn_correlation(validation) if workload.batch == 1 else None,
        "wrong_pairs": [ranking.num_wrong, ranking.num_pairs],
    }


def redrawn_correlation(validation: Validation) -> float | None:
    """Rank correlation of measured streams with themselves, had they served other requests.

    On average over draws among the requests that all plans served; of plain decoding, which may
    serve fewer, they make no difference. A prediction cannot be expected to do better.
    """
    times = [run.requests["measured_tpot"].to_numpy(np.float64) for run in validation.runs]
    count = max(map(len, times))
    generator, found = np.random.default_rng(SEED), []
    measured = [float(np.nanmean(each)) for each in times]
    for _ in range(NUM_REDRAWN):
        chosen = generator.integers(0, count, count)
        again = [np.nanmean(each[chosen] if len(each) == count else each) for each in times]
        found.append(rank_correlation(measured, list(map(float, again))))
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else None
