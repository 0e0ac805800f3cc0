"""The answer of a search as a plan and its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from codesign.artifacts import beside, replacing, sha256
from codesign.file_ref import FileRef
from codesign.plan import Plan
from codesign.policy.walk import Sampling
from codesign.traces import draft_parquet

if TYPE_CHECKING:
    from codesign.planner.question import Answer, Question
    from codesign.traces import Trace


def trace_beside(plan: Path) -> Path:
    """The prepared trace that goes with a plan."""
    return beside(plan, "trace.parquet")


def save_plan(
    path: Path, question: Question, answer: Answer, *, trace: Trace, fit_file: Path
) -> Plan:
    """Write the plan, and the prepared trace beside it: both, or neither.

    Args:
        path: The plan; NAME.json is accompanied by NAME.trace.parquet (``beside``).
        question: As searched.
        answer: As found.
        trace: The prepared trace that ``question.requests`` are of.
        fit_file: Where ``question.fit`` was read from.

    Raises:
        InputError: If a file cannot be written or read.
    """
    trace_file = trace_beside(path)
    fit_ref = FileRef.of(fit_file)
    with replacing(trace_file) as draft:  # an earlier plan of this name needs its own
        draft_parquet(trace, draft)
        trace_ref = FileRef(trace_file, sha256(draft))
        plan = _plan(question, answer, trace, trace_ref, fit_ref)
        plan.save(path)
    return plan


def _plan(
    question: Question, answer: Answer, trace: Trace, trace_ref: FileRef, fit_ref: FileRef
) -> Plan:
    fit = question.fit
    return Plan(
        target=fit.target,
        draft=fit.draft,
        slo=question.slo,
        objective=question.objective,
        sampling=Sampling(fit.temperature, fit.top_k, fit.top_p, question.seed),
        serving=question.serving,
        trace=trace_ref,
        num_requests=len(trace),
        fit=fit_ref,
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
