"""The search for the best plan: rough screen, simulation on the trace, ranking, nearest miss.

All candidates are simulated on the same requests with the same seeds, so that they see the same
luck and small differences count. Prints nothing.

    question       what is asked, and what is answered (plan_file); defaults where nobody says
    prepared_trace the requests as they are simulated and run; workload: in a few numbers
    search_space   all candidates
    screen         a rough score of each: behaviour (of a sample of rounds), round_times, queueing
    simulations    of the promising ones: halving, executor, search_cache; tally: how far they are
    predict        figures of several seeds, with intervals (uncertainty, student_t); saturation:
                   whether the load is borne; slo_figures: what depends on the targets
    ranking        which is best; explanation: why; nearest_miss: if none meets the SLO; fewest: on
                   how few workers
    economics      whether speculation pays; sensitivity: what to profile next; scheduling: whether
                   serving by the SLO would
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from codesign import Progress
from codesign.candidate import Candidate
from codesign.errors import InfeasibleError
from codesign.fit.extrapolated import across_hosts
from codesign.fit.profile_command import profile_command
from codesign.plan import Doubt
from codesign.planner.economics import weigh_speculation
from codesign.planner.executor import Executor, LocalExecutor, Task
from codesign.planner.explanation import explain, explain_runner_up
from codesign.planner.halving import entering
from codesign.planner.nearest_miss import arriving_together, nearest_miss
from codesign.planner.predict import extrapolation_note, prompt_note
from codesign.planner.question import Answer, Question
from codesign.planner.ranking import Entry, find_ties
from codesign.planner.scheduling import scheduling_note
from codesign.planner.screen import Screened, screen
from codesign.planner.search_cache import SearchCache
from codesign.planner.search_space import SearchSpace, search_space
from codesign.planner.sensitivity import find_doubts
from codesign.planner.simulations import Simulations
from codesign.records import has_own_targets

__all__ = ["Answer", "Question", "search", "task_of"]


def task_of(question: Question) -> Task:
    """What an executor has to know of a question."""
    return Task(question.requests, question.fit, question.slo, question.serving)


def search(
    question: Question,
    *,
    executor: Executor | None = None,
    cache: SearchCache | None = None,
    progress: Progress | None = None,
    least_attained: float = 0.0,
    wants_miss: bool = True,
) -> Answer:
    """Find the best plan. The same question gets the same answer, whatever executes it.

    Args:
        question: What is asked.
        executor: Runs the simulations (see ``open_executor``), entered by the caller; in this
            process by default.
        cache: Keeps finished simulations, so that an interrupted search can go on.
        progress: Called with (stage, done, total): "screen", in candidates, "simulate" and
            "simulate more", in requests; if nothing meets the SLO as ``nearest_miss`` does.
        least_attained: Share of requests within the SLO that the screen must find of some
            candidate, for any to be simulated.
        wants_miss: If nothing meets the SLO, look for what would; it takes simulations of its own.

    Raises:
        InfeasibleError: If nothing meets the SLO; the message names the nearest miss, the target
            that binds, and what would fit.
        InputError: If the fit does not cover the machine or a request does not fit the KV limit.
    """
    start = time.monotonic()
    space = _space_of(question)
    screened = _screened(space.candidates, question, least_attained, progress)
    screen_seconds = time.monotonic() - start
    if executor is None:
        executor = LocalExecutor(task_of(question))  # of one process: nothing to close
    if cache is None:
        cache = SearchCache()
    simulations = Simulations(question, executor, cache, progress)
    ordered = simulations.halve(
        _worth_simulating(screened, question),
        space.candidates,
        more=lambda: _worth_simulating(screened, question, is_second=True),
    )
    if not ordered[0].scored.is_feasible:
        simulations.end()
        if not wants_miss:
            raise InfeasibleError("no plan meets the SLO")
        raise InfeasibleError(_nearest(question, ordered, simulations, progress))
    doubts = find_doubts(ordered, question, simulations.apart)
    simulations.end()
    return _answer(question, space, ordered, doubts, simulations.num_simulated, screen_seconds)


def _space_of(question: Question) -> SearchSpace:
    return search_space(
        question.fit.costs,
        workers=question.workers,
        max_batch=question.max_batch,
        policies=question.policies,
        runnable=question.runnable,
        serving=question.serving,
        requests=question.requests,
        origin=question.fit.origin,
        measure=profile_command(question.fit, workers=question.workers),
    )


def _screened(
    candidates: Sequence[Candidate],
    question: Question,
    least_attained: float,
    progress: Progress | None,
) -> Screened:
    screened = screen(
        candidates,
        question.requests,
        question.fit,
        slo=question.slo,
        serving=question.serving,
        progress=progress,
    )
    if screened.attained.max() < least_attained:
        raise InfeasibleError("no plan is worth simulating: by estimate all miss the SLO by far")
    return screened


def _worth_simulating(
    screened: Screened, question: Question, *, is_second: bool = False
) -> list[Candidate]:
    percentile, num_requests = question.slo.percentile, len(question.requests)
    chosen = entering(screened, question.objective, percentile, num_requests, is_second=is_second)
    return [screened.candidates[index] for index in chosen]


def _nearest(
    question: Question,
    ordered: Sequence[Entry],
    simulations: Simulations,
    progress: Progress | None,
) -> str:
    line = nearest_miss(
        ordered,
        question.slo,
        simulations.at_rates,
        None if simulations.is_short else simulations.at_rates_of_all,
        progress,
        rate_scale=question.rate_scale,
        has_own=has_own_targets(question.requests),
        together=arriving_together(question.requests),
    )
    nearest = min(ordered, key=lambda entry: entry.miss).candidate
    note = scheduling_note(nearest, question)
    return f"{line}. Or, {note}" if note else line


def _answer(
    question: Question,
    space: SearchSpace,
    ordered: Sequence[Entry],
    doubts: tuple[Doubt, ...],
    num_simulated: int,
    screen_seconds: float,
) -> Answer:
    best = ordered[0]
    ranked = tuple(entry.scored for entry in ordered)
    beyond = (
        extrapolation_note(best.candidate, best.outcomes, question.fit),
        across_hosts(question.fit, best.candidate.deployment),
        prompt_note(question.fit, question.requests),
        scheduling_note(best.candidate, question),
    )
    return Answer(
        ranked=ranked,
        ties=find_ties(ranked, question.objective),
        reason=explain(
            ranked,
            question.slo,
            question.objective,
            has_own=has_own_targets(question.requests),
        ),
        runner_up=explain_runner_up(ordered, question.objective),
        economics=weigh_speculation(ranked, question),
        doubts=doubts,
        notes=(*question.notes, *space.notes, *filter(None, beyond)),
        num_candidates=len(space.candidates),
        num_simulated=num_simulated,
        screen_seconds=screen_seconds,
    )
