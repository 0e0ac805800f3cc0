"""The search for the best plan, watched; what it leaves behind, and the files to take away."""

from __future__ import annotations

import io
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codesign import Progress
from codesign.artifacts import read_json
from codesign.config import SLO, Serving
from codesign.dashboard.choices import (
    Machine,
    Traffic,
    file_time,
    load_machine,
    load_traffic,
)
from codesign.dashboard.kept import Kept
from codesign.dashboard.what_if import MOST
from codesign.fit.what_if import kept_device_fit, measured_note
from codesign.planner import Answer, Question, search, task_of
from codesign.planner.defaults import (
    all_workers,
    bounded,
    knows_memory,
    largest_batch,
    most_requests,
)
from codesign.planner.executor import Job, open_executor
from codesign.planner.fewest import FEWEST, search_fewest
from codesign.planner.plan_file import save_plan
from codesign.planner.predict import Outcome
from codesign.planner.prepared_trace import prepare_trace
from codesign.planner.search_cache import SearchCache
from codesign.records import has_own_targets

if TYPE_CHECKING:
    from codesign.plan import Plan


OBJECTIVES = ("goodput", "latency", FEWEST)
_KEPT = 8  # plans


@dataclass(frozen=True, slots=True)
class PlanAsked:
    """What is asked of the planner.

    Attributes:
        traffic: Trace.
        machine: Workers and models.
        slo: Targets.
        serving: How memory and steps are shared.
        objective: One of OBJECTIVES.
        max_requests: The trace is cut after so many; None for all that ``codesign plan`` takes, and
            at most ``what_if.MOST``.
        policies: Labels that the search is restricted to; empty for all.
        runnable: Only plans that ``codesign run`` serves.
    """

    traffic: Traffic
    machine: Machine
    slo: SLO
    serving: Serving
    objective: str = "goodput"
    max_requests: int | None = None
    policies: tuple[str, ...] = ()
    runnable: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """One simulation of the search.

    Attributes:
        number: From 1, in the order in which they ended.
        label: Of the candidate.
        num_requests: How long a stretch of the trace: the rung.
        figures: As ``Outcome.figures``.
    """

    number: int
    label: str
    num_requests: int
    figures: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A plan, and how it was found.

    Attributes:
        plan: As saved.
        answer: Size of the search.
        seen: Its simulations.
        files: Content by name: plan.json and what it depends on.
        has_own: Requests have TPOT targets of their own.
    """

    plan: Plan
    answer: Answer
    seen: tuple[Seen, ...]
    files: dict[str, bytes]
    has_own: bool

    def bundle(self) -> bytes:
        """A ZIP of the files: unpacked, ``codesign run --plan plan.json`` works in it."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        return buffer.getvalue()


_plans: Kept[Found] = Kept(_KEPT)


def known_plan(asked: PlanAsked) -> Found | None:
    """The plan, if this question has been answered before."""
    return _plans.get(_key(asked))


def request_limit(asked: PlanAsked) -> int | None:
    """After how many requests the trace is cut; None for what ``codesign plan`` does by itself.

    Raises:
        InputError: If something chosen does not exist.
    """
    if asked.max_requests is not None or len(load_traffic(asked.traffic)) <= MOST:
        return asked.max_requests
    return MOST if knows_memory(load_machine(asked.machine)) else None


def find_plan(
    asked: PlanAsked,
    *,
    watch: Callable[[tuple[Seen, ...]], None] | None = None,
    progress: Progress | None = None,
    processes: int | None = None,
) -> Found:
    """Search; an exception out of ``watch`` or ``progress`` ends it.

    Args:
        asked: The question.
        watch: Called with all simulations so far, after each.
        progress: As for ``codesign.planner.search``.
        processes: Simulations at a time; None for all cores.

    Raises:
        InfeasibleError: If nothing meets the SLO.
        InputError: If something chosen does not exist, or no plan holds a request.
        UsageError: If the fewest workers are wanted without an SLO.
    """
    fit_file = _fit_file(asked.machine)
    fit = load_machine(asked.machine)
    most = request_limit(asked)
    if most is None:
        most = most_requests(fit)
    trace = load_traffic(asked.traffic, most)
    prepared = prepare_trace(trace, fit.target, seed=0, max_requests=len(trace))
    note = "" if asked.machine.fit else measured_note(fit, asked.machine.device)
    question = Question(
        requests=prepared.requests,
        fit=fit,
        slo=asked.slo,
        serving=bounded(asked.serving, fit),
        objective=asked.objective,
        workers=all_workers(fit),
        max_batch=largest_batch(fit),
        policies=asked.policies,
        runnable=asked.runnable,
        rate_scale=asked.traffic.rate_scale,
        notes=tuple(filter(None, [note])),
    )
    cache = _Watched(watch)
    find = search_fewest if asked.objective == FEWEST else search
    with open_executor(task_of(question), processes=processes) as executor:
        answer = find(question, executor=executor, cache=cache, progress=progress)
    with tempfile.TemporaryDirectory() as folder:
        copied = _copy_fit(fit_file, Path(folder))
        plan_file = Path(folder) / "plan.json"
        plan = save_plan(plan_file, question, answer, trace=prepared, fit_file=copied)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    has_own = has_own_targets(prepared.requests)
    return _plans.put(_key(asked), Found(plan, answer, tuple(cache.seen), files, has_own))


class _Watched(SearchCache):
    """Tells of every simulation."""

    def __init__(self, watch: Callable[[tuple[Seen, ...]], None] | None) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self._watch = watch

    def put(self, job: Job, outcome: Outcome) -> None:
        super().put(job, outcome)
        number = len(self.seen) + 1
        self.seen.append(Seen(number, outcome.label, job.num_requests, outcome.figures))
        if self._watch is not None:
            self._watch(tuple(self.seen))


def _fit_file(machine: Machine) -> Path:
    if machine.fit:
        return Path(machine.fit)
    fit = load_machine(machine)
    return kept_device_fit(fit, machine.device, machine.gpus, acceptance=machine.acceptance)[1]


def _copy_fit(fit_file: Path, folder: Path) -> Path:
    """The fit and the acceptance beside it, in the plan's folder."""
    beside = read_json(fit_file, kind="fit")["acceptance"]["path"]
    shutil.copyfile(fit_file.parent / beside, folder / beside)
    return Path(shutil.copyfile(fit_file, folder / fit_file.name))


def _key(asked: PlanAsked) -> object:
    return asked, file_time(asked.traffic.source), file_time(asked.machine.fit)
