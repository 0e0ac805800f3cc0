"""The fewest workers that bear a trace's load within the SLO, and the best plan on these."""

from __future__ import annotations

from dataclasses import replace

from codesign import Progress
from codesign.config import SLO
from codesign.errors import InfeasibleError, InputError, UsageError, counted
from codesign.planner import Answer, Question, search
from codesign.planner.executor import Executor
from codesign.planner.saturation import OVERLOADED
from codesign.planner.search_cache import SearchCache

FEWEST = "fewest"  # the objective
_HOPELESS = 0.5  # share of the requests wanted that the screen must find, to be worth simulating


def search_fewest(
    question: Question,
    *,
    executor: Executor | None = None,
    cache: SearchCache | None = None,
    progress: Progress | None = None,
) -> Answer:
    """The answer for the smallest number of workers that has one whose plan bears the load.

    Numbers on which the screen finds less than half of the requests wanted within the SLO are not
    simulated. If no number bears the load, the answer for the largest that meets the SLO.

    Args:
        question: ``workers`` is the largest number to try; the SLO must name a target.
        executor: As for ``search``.
        cache: As for ``search``.
        progress: As for ``search``, with the number of workers in the name of each stage.

    Raises:
        UsageError: If the SLO names no target: one worker always suffices.
        InfeasibleError: If no number of workers meets the SLO.
        InputError: As ``search``.
    """
    if question.slo == SLO(percentile=question.slo.percentile):
        raise UsageError(
            "--objective fewest needs an SLO. Add --slo-ttft-ms MS or --slo-tpot-ms MS"
        )
    worth = _HOPELESS * question.slo.percentile / 100.0
    missed: list[str] = []
    unknown: list[str] = []
    swamped: dict[int, Answer] = {}
    for workers in range(1, question.workers + 1):
        is_last = workers == question.workers
        try:
            answer = search(
                replace(question, workers=workers),
                executor=executor,
                cache=cache,
                progress=_of(workers, progress),
                least_attained=0.0 if is_last else worth,
                wants_miss=is_last and not swamped,  # nobody is told of others
            )
        except InfeasibleError:
            if is_last and not swamped:
                raise
            missed.append(str(workers))
        except InputError:  # the fit prices no plan of so many workers, or memory holds none
            if is_last and not swamped:
                raise
            unknown.append(str(workers))
        else:
            if answer.chosen.saturation != OVERLOADED:
                return _with_reason(answer, workers, missed, unknown, list(swamped))
            swamped[workers] = answer
    return list(swamped.values())[-1]  # whose reason begins with the load


def _of(workers: int, progress: Progress | None) -> Progress | None:
    """Progress of one of several searches, told apart by name."""
    where = f"on {counted(workers, 'worker')}"
    return progress and (lambda stage, done, total: progress(f"{stage} {where}", done, total))


def _with_reason(
    answer: Answer, workers: int, missed: list[str], unknown: list[str], swamped: list[int]
) -> Answer:
    reason = f"{workers} workers are" if workers > 1 else "1 worker is"
    reason += " the fewest that meet the SLO"
    reason += " and bear the load" if swamped else ""
    reason += f" (the fit has no plan for {', '.join(unknown)})" if unknown else ""
    reason += f"; {', '.join(missed)} {'do' if len(missed) > 1 else 'does'} not" if missed else ""
    if swamped:
        names = ", ".join(map(str, swamped))
        reason += f"; on {names} the queue grows as long as requests arrive"
    return replace(answer, reason=f"{reason}; {answer.reason}")
