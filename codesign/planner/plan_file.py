"""The answer of a search as a plan and its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from codesign.artifacts import beside
from codesign.file_ref import FileRef
from codesign.plan import Plan
from codesign.policy.walk import Sampling
from codesign.traces import write_parquet

if TYPE_CHECKING:
    from codesign.planner.question import Answer, Question
    from codesign.traces import Trace


def save_plan(
    path: Path, question: Question, answer: Answer, *, trace: Trace, fit_file: Path
) -> Plan:
    """Write the plan, and the prepared trace beside it.

    Args:
        path: The plan; NAME.json is accompanied by NAME.trace.parquet (``beside``).
        question: As searched.
        answer: As found.
        trace: The prepared trace that ``question.requests`` are of.
        fit_file: Where ``question.fit`` was read from.

    Raises:
        InputError: If a file cannot be written or read.
    """
    trace_file = beside(path, "trace.parquet")
    write_parquet(trace, trace_file)
    fit = question.fit
    plan = Plan(
        target=fit.target,
        draft=fit.draft,
        slo=question.slo,
        objective=question.objective,
        sampling=Sampling(fit.temperature, fit.top_k, fit.top_p, question.seed),
        serving=question.serving,
        trace=FileRef.of(trace_file),
        num_requests=len(trace),
        fit=FileRef.of(fit_file),
        seed=question.seed,
        num_seeds=question.num_seeds,
        chosen=answer.chosen,
        alternatives=answer.ranked[1:],
        ties=answer.ties,
        reason=answer.reason,
        runner_up=answer.runner_up,
        economics=answer.economics,
        doubts=answer.doubts,
        notes=(*(f"trace: {note}" for note in trace.notes), *answer.notes),
    )
    plan.save(path)
    return plan
