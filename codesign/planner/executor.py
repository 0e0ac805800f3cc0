"""Where simulations run: in this process, on all cores, or on a Ray cluster.

A simulation depends on its job and the question alone, so that the plan is the same wherever it was
made. Imports Ray only when asked to.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from codesign.artifacts.machine import num_cores
from codesign.candidate import Candidate
from codesign.config import SLO, Serving
from codesign.errors import HardwareError
from codesign.planner.predict import Outcome, simulate_outcome

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit
    from codesign.policy.cost import RoundCost

Kind = Literal["local", "ray"]
KINDS: tuple[Kind, ...] = ("local", "ray")

_SMALL = 1_000_000  # output tokens to simulate that are done before other processes have started
_SHORT = 500_000  # output tokens of a simulation that takes no longer than to play its policy


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What all simulations of a search share; sent to each worker once."""

    requests: pd.DataFrame
    fit: Fit
    slo: SLO
    serving: Serving


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation.

    Attributes:
        candidate: What serves.
        seed: Of the acceptance draws.
        first: First request of a stretch of the trace.
        end: Request behind its last one.
        rate: Factor on the arrival rate.
        costs: Step times in place of the fit's, by deployment; None for the fit's.
    """

    candidate: Candidate
    seed: int
    first: int
    end: int
    rate: float = 1.0
    costs: Mapping[str, RoundCost] | None = None

    @property
    def num_requests(self) -> int:
        """Requests of the stretch."""
        return self.end - self.first


Result = tuple[int, Outcome]


class Executor(AbstractContextManager["Executor", None]):
    """Runs jobs of one task; what it started ends with it."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Yield (number of the job, outcome) in any order.

        Raises:
            HardwareError: If a process that simulates is lost.
        """


def requests_of(task: Task, job: Job) -> pd.DataFrame:
    """A job's stretch of the trace, from time 0 on, at its rate."""
    requests = task.requests
    if job.first > 0 or job.end < len(requests):
        requests = requests.iloc[job.first : job.end].reset_index(drop=True)
        requests = requests.assign(arrival=requests["arrival"] - requests["arrival"].iloc[0])
    if job.rate != 1.0:
        requests = requests.assign(arrival=requests["arrival"] / job.rate)
    return requests


def run_job(task: Task, job: Job) -> Outcome:
    """Simulate a stretch of the trace."""
    fit = task.fit if job.costs is None else replace(task.fit, costs=job.costs)
    return simulate_outcome(
        requests_of(task, job),
        job.candidate,
        fit,
        slo=task.slo,
        serving=task.serving,
        seed=job.seed,
    )[0]


def run_jobs(task: Task, jobs: Sequence[Job]) -> list[Outcome]:
    """Simulate several, in their order."""
    return [run_job(task, job) for job in jobs]


def tokens_each(task: Task) -> float:
    """Output tokens of a request, on average."""
    return float(np.asarray(task.requests["output_tokens"], np.float64).mean())


def grouped(jobs: Sequence[Job], tokens: float) -> list[list[int]]:
    """Numbers of the jobs that one process should do after one another; long groups first.

    The rounds of a policy are played once in each process that simulates it. On a short stretch
    that takes longer than the simulation, so there all jobs of a policy stay together.

    Args:
        jobs: What is to be simulated.
        tokens: Output tokens of a request.
    """
    groups: dict[object, list[int]] = {}
    for number, job in enumerate(jobs):
        is_short = job.num_requests * tokens < _SHORT
        groups.setdefault(job.candidate.speculation if is_short else number, []).append(number)
    # So that no long one is left alone at the end; equal ones in their order.
    return sorted(groups.values(), key=lambda group: -sum(jobs[i].num_requests for i in group))


def open_executor(task: Task, kind: Kind = "local", *, processes: int | None = None) -> Executor:
    """The executor that a name stands for.

    Args:
        task: What all jobs share.
        kind: "local" or "ray".
        processes: At most this many at a time; None for one per core of this machine, or for all
            that a Ray cluster has.

    Raises:
        HardwareError: If Ray is asked for and not installed.
    """
    if kind == "ray":
        return RayExecutor(task, processes)
    return LocalExecutor(task, num_cores() if processes is None else processes)


class LocalExecutor(Executor):
    """Runs jobs in this process while they are small, otherwise in a pool of processes.

    Args:
        task: What all jobs share.
        processes: Size of the pool; 1 for this process alone.
    """

    def __init__(self, task: Task, processes: int = 1) -> None:
        self._task = task
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        self._tokens_each = tokens_each(task)

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Yield (number of the job, outcome) in any order."""
        tokens = sum(job.num_requests for job in jobs) * self._tokens_each
        is_small = self._pool is None and tokens < _SMALL
        if self._processes == 1 or len(jobs) == 1 or is_small:
            yield from ((number, run_job(self._task, job)) for number, job in enumerate(jobs))
            return
        pool = self._start()
        groups = grouped(jobs, self._tokens_each)
        try:
            futures = {pool.submit(_run_in_worker, [jobs[i] for i in g]): g for g in groups}
            for future in as_completed(futures):
                yield from zip(futures[future], future.result(), strict=True)
        except BrokenProcessPool as err:
            raise HardwareError(
                "a simulation process was killed, perhaps for lack of memory. Run fewer at a time "
                "with --processes N; add --resume to keep what was finished"
            ) from err

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._pool is None:
            return
        # Known to the pool alone: another search may have processes, too.
        workers = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=error is None, cancel_futures=True)
        if error is not None:  # an interrupted search does not wait for what runs
            for worker in workers:
                worker.terminate()

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                # A progress bar runs a thread, with which no process may be forked.
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._task,),
            )
        return self._pool


class RayExecutor(Executor):
    """Runs jobs on a Ray cluster: what is connected, else RAY_ADDRESS, else one on this machine.

    codesign must be installed on every node.

    Args:
        task: What all jobs share.
        most: Most jobs at a time; None for no limit but the cluster's.

    Raises:
        HardwareError: If Ray is not installed.
    """

    def __init__(self, task: Task, most: int | None = None) -> None:
        try:
            import ray
        except ImportError as err:
            raise HardwareError(
                "--executor ray needs Ray, which is not installed. Install it: "
                "pip install 'codesign[ray]'; or use all cores of this machine: --executor local"
            ) from err
        self._ray: Any = ray
        self._task = task
        self._most = most
        self._is_ours = False

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Yield (number of the job, outcome) in any order."""
        waiting = grouped(jobs, tokens_each(self._task))[::-1]
        running: dict[Any, list[int]] = {}
        most = len(jobs) if self._most is None else self._most
        while waiting or running:
            while waiting and len(running) < most:
                group = waiting.pop()
                running[self._remote.remote(self._shared, [jobs[i] for i in group])] = group
            ready, _ = self._ray.wait(list(running), num_returns=1)
            for reference in ready:
                yield from zip(running.pop(reference), self._ray.get(reference), strict=True)

    def __enter__(self) -> RayExecutor:
        if not self._ray.is_initialized():
            try:
                self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, TimeoutError) as err:
                raise HardwareError(
                    f"no Ray cluster at {os.environ.get('RAY_ADDRESS', 'this machine')} ({err}). "
                    "Start one: ray start --head; or use all cores of this machine: "
                    "--executor local"
                ) from err
            self._is_ours = True
        self._shared = self._ray.put(self._task)
        self._remote = self._ray.remote(run_jobs)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        del self._shared
        if self._is_ours:
            self._ray.shutdown()


_worker_task: Task | None = None


def _start_worker(task: Task) -> None:
    global _worker_task
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to answer
    Thread(target=_end_with_parent, daemon=True).start()
    _worker_task = task


def _end_with_parent() -> None:
    """A search that is killed stops no worker, and a worker that waits for jobs never learns it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_worker(jobs: Sequence[Job]) -> list[Outcome]:
    assert _worker_task is not None
    return run_jobs(_worker_task, jobs)
