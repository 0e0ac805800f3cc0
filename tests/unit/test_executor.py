from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

import codesign.planner.executor
from codesign.candidate import Candidate
from codesign.config import SLO, Deployment, Serving
from codesign.errors import HardwareError
from codesign.planner import Question, search, task_of
from codesign.planner.executor import Job, LocalExecutor, grouped, open_executor, run_job
from codesign.policy.speculation import parse_policy


@pytest.fixture
def question(machine_fit):
    rng = np.random.default_rng(1)
    requests = pd.DataFrame(
        {
            "arrival": np.cumsum(rng.exponential(1.0, 10)),
            "prompt_tokens": rng.integers(20, 80, 10),
            "output_tokens": rng.integers(12, 40, 10),
            "category": "",
        }
    )
    serving = Serving(max_kv_tokens=4096)
    policies = ("plain", "chain-2")
    return Question(
        requests, machine_fit, SLO(), serving, workers=2, max_batch=2, policies=policies
    )


def job(policy="plain", *, end=10, seed=0, **changes) -> Job:
    plain = Job(Candidate(Deployment(2), parse_policy(policy), 2), seed, 0, end)
    return dataclasses.replace(plain, **changes)


def test_a_pool_of_processes_makes_the_same_plan_as_this_process(question, monkeypatch):
    monkeypatch.setattr(codesign.planner.executor, "_SMALL", 0)
    with LocalExecutor(task_of(question), 2) as executor:
        answer = search(question, executor=executor)
        assert executor._pool is not None
    assert answer == search(question)


def test_a_stopped_search_ends_its_own_processes_and_no_others(question, monkeypatch):
    monkeypatch.setattr(codesign.planner.executor, "_SMALL", 0)
    jobs = [job(), job("chain-2")]
    stopped, other = LocalExecutor(task_of(question), 2), LocalExecutor(task_of(question), 2)
    started = []

    def stop_midway():
        with stopped:
            next(stopped.run(jobs))
            next(other.run(jobs))  # another visitor's, which starts later
            started.extend(stopped._pool._processes.values())
            raise InterruptedError

    with other:
        with pytest.raises(InterruptedError):
            stop_midway()
        # The pool's own thread may be the one that reaps a worker: look again until it has said so.
        end = time.monotonic() + 60
        while any(worker.is_alive() for worker in started):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert len(list(other.run(jobs))) == 2


_SEARCH = """
import pickle, sys, time
import codesign.planner.executor as executor
executor._SMALL = 0
task, jobs = pickle.load(open(sys.argv[1], "rb"))
pool = executor.LocalExecutor(task, 2)
list(pool.run(jobs))
print(len(pool._pool._processes), flush=True)
time.sleep(600)
"""


def test_the_processes_of_a_search_that_is_killed_end_with_it(question, tmp_path):
    file = tmp_path / "task.pickle"
    file.write_bytes(pickle.dumps((task_of(question), [job(), job("chain-2")])))
    command = [sys.executable, "-c", _SEARCH, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as search_process:
        assert search_process.stdout is not None
        assert search_process.stdout.readline() == "2\n"
        search_process.kill()
        search_process.communicate(timeout=60)  # its output ends when nobody can write any more


def test_when_a_process_is_killed_one_line_says_what_to_do(question, monkeypatch):
    monkeypatch.setattr(codesign.planner.executor, "_SMALL", 0)
    executor = LocalExecutor(task_of(question), 2)
    list(executor.run([job(), job("chain-2")]))
    for worker in executor._pool._processes.values():
        worker.kill()
    with executor, pytest.raises(HardwareError, match=r"killed.*--processes N.*--resume"):
        list(executor.run([job(), job("chain-2")]))


def test_small_searches_start_no_process(question):
    with LocalExecutor(task_of(question), 2) as executor:
        assert len(list(executor.run([job(), job("chain-2")]))) == 2
        assert executor._pool is None


def test_a_stretch_starts_at_its_first_request_and_a_rate_stretches_time(question):
    task = task_of(question)
    whole = run_job(task, job())
    assert whole.num_requests == 10
    part = run_job(task, job(first=4, end=9))
    assert part.num_requests == 5
    arrival = question.requests["arrival"]
    assert part.figures["seconds"] < arrival[8] - arrival[4] + 3.0
    slower = run_job(task, job(rate=0.1))
    assert slower.figures["seconds"] > 9 * arrival.max()


def test_jobs_of_a_policy_stay_together_on_short_stretches_alone():
    jobs = [job(), job("chain-2"), job(seed=1), job("chain-2", seed=1)]
    assert sorted(grouped(jobs, 10.0)) == [[0, 2], [1, 3]]
    assert sorted(grouped(jobs, 1e6)) == [[0], [1], [2], [3]]


def test_longer_jobs_start_first():
    jobs = [job(end=2), job("chain-1", end=8), job("chain-2", end=5)]
    assert grouped(jobs, 1.0) == [[1], [2], [0]]


def test_without_ray_one_line_says_how_to_get_it(question, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HardwareError, match=r"pip install 'codesign\[ray\]'.*--executor local"):
        open_executor(task_of(question), "ray")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_ray_cluster_makes_the_same_plan(question):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        with open_executor(task_of(question), "ray", processes=2) as executor:
            answer = search(question, executor=executor)
        assert ray.is_initialized()  # not ours to stop
    finally:
        ray.shutdown()
    assert answer == search(question)
