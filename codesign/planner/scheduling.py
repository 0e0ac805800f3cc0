"""Whether the best plan would keep its targets more often if it served by them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from codesign.planner.executor import Job, Task, run_job
from codesign.records import has_own_targets
from codesign.slo_figure import slo_figure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from codesign.candidate import Candidate
    from codesign.config import SLO
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
    found: list[dict[str, float]] = []
    for way in (serving, replace(serving, scheduling="slo")):
        task = Task(question.requests, question.fit, slo, way)
        found.append(run_job(task, job).figures)
        if found[0]["slo_attainment"] > 1.0 - _NOTICEABLE:
            return ""
    now, then = (figures["slo_attainment"] for figures in found)
    if then < now + _NOTICEABLE:
        return ""
    price = _price(found[0], found[1], slo, has_own=has_own_targets(question.requests))
    first = "" if job.end == len(question.requests) else f"first {job.end} "
    return (
        f"serving by its targets, {candidate.label} keeps {then:.0%} of the {first}requests within "
        f"them, instead of {now:.0%}{price}: --scheduling slo"
    )


def _price(now: Mapping[str, float], then: Mapping[str, float], slo: SLO, *, has_own: bool) -> str:
    """What it costs those that are late; "" if no target is missed more than it was."""
    worse = []
    for name, target in (("ttft", slo.ttft), ("tpot", slo.tpot)):
        key, shown = f"{name}_slo", slo_figure(name, slo, has_own=has_own)
        if target is not None and key in now and then[key] > max(target, now[key]):
            late, was = (shown.factor * figures[key] for figures in (then, now))
            worse.append(f"{shown.title} {late:,.0f} {shown.unit}, not {was:,.0f}")
    return f" ({', '.join(worse)}, as those that are late wait longer)" if worse else ""
