"""Whether the best plan would keep its targets more often if it served by them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from codesign.planner.executor import Job, Task, run_job

if TYPE_CHECKING:
    from codesign.candidate import Candidate
    from codesign.planner.question import Question

_MOST_REQUESTS = 500  # the first ones, that are simulated for it
_NOTICEABLE = 0.01  # of the requests


def scheduling_note(candidate: Candidate, question: Question) -> str:
    """How many more requests would be within the SLO with ``--scheduling slo``; "" if hardly any.

    Simulates the first requests both ways, with one seed.

    Args:
        candidate: The best plan, or the nearest one.
        question: What was asked.
    """
    serving, slo = question.serving, question.slo
    is_possible = slo.is_set and not candidate.deployment.prefill_workers
    if serving.scheduling != "fcfs" or not is_possible:
        return ""
    job = Job(candidate, question.seed, 0, min(len(question.requests), _MOST_REQUESTS))
    attained: list[float] = []
    for way in (serving, replace(serving, scheduling="slo")):
        task = Task(question.requests, question.fit, slo, way)
        attained.append(run_job(task, job).figures["slo_attainment"])
        if attained[0] > 1.0 - _NOTICEABLE:
            return ""
    now, then = attained
    if then < now + _NOTICEABLE:
        return ""
    first = "" if job.end == len(question.requests) else f"first {job.end} "
    return (
        f"serving by its targets, {candidate.label} keeps {then:.0%} of the {first}requests within "
        f"them, instead of {now:.0%}: --scheduling slo"
    )
