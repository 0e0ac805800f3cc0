from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path
from typing import cast

import pandas as pd
import pytest

from codesign.candidate import Candidate
from codesign.config import SLO, Deployment, Serving
from codesign.fit import Fit
from codesign.planner import search_cache
from codesign.planner.executor import Job, Task, run_job
from codesign.planner.predict import Outcome
from codesign.planner.search_cache import SearchCache, SearchKey
from codesign.planner.slo_figures import times_of
from codesign.policy.speculation import parse_policy
from codesign.records import RequestRecord

JOB = Job(Candidate(Deployment(2), parse_policy("plain"), 1), 0, 0, 5)
REQUESTS = pd.DataFrame(
    {"arrival": [0.0, 1.0], "prompt_tokens": [5, 6], "output_tokens": 9, "category": ""}
)
TASK = Task(REQUESTS, cast("Fit", None), SLO(tpot=0.1), Serving(max_kv_tokens=4096))
ONE, OTHER = SearchKey(TASK, "one"), SearchKey(TASK, "other")
MADE = Outcome("plain on 2, batch 1", 0, {"goodput": 1.0}, {}, 1, num_requests=5)


def test_a_search_whose_outcomes_cannot_be_kept_goes_on_and_says_so_once(tmp_path):
    folder, said = tmp_path / "gone", []
    cache = SearchCache(ONE, folder / "kept.jsonl", warn=said.append)
    cache.put(JOB, MADE)
    shutil.rmtree(folder)
    others = [dataclasses.replace(JOB, rate=rate) for rate in (0.5, 2.0)]
    for other in others:
        cache.put(other, MADE)
    assert [cache.get(job) for job in (JOB, *others)] == [MADE] * 3
    assert (len(cache), cache.num_of_any_slo, cache.num_lost) == (1, 0, 2)
    (words,) = said
    assert f"cannot write {folder / 'kept.jsonl'}: No such file or directory; the search" in words


def test_a_large_file_that_cannot_be_made_smaller_is_used_as_it_is(tmp_path, monkeypatch):
    path, said = tmp_path / "kept.jsonl", []
    SearchCache(OTHER, path).put(JOB, MADE)
    SearchCache(ONE, path, resume=True).put(JOB, MADE)
    before = path.read_text()
    monkeypatch.setattr(search_cache, "MOST_BYTES", 1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert SearchCache(ONE, path, resume=True, warn=said.append).get(JOB) == MADE
    assert (path.read_text(), said) == (before, [])


def test_a_search_that_keeps_nothing_leaves_no_file(tmp_path):
    path = tmp_path / "kept.jsonl"
    path.write_text("of an earlier search")
    SearchCache(ONE, path)
    assert not path.exists()


def test_a_line_that_was_cut_off_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "kept.jsonl"
    SearchCache(ONE, path).put(JOB, MADE)
    path.write_text(path.read_text()[:-9])  # interrupted while it wrote
    again = SearchCache(ONE, path, resume=True)
    assert len(again) == 0
    again.put(JOB, MADE)
    assert SearchCache(ONE, path, resume=True).get(JOB) == MADE  # interrupted once more


def test_a_damaged_line_does_not_lose_the_others(tmp_path):
    path = tmp_path / "kept.jsonl"
    SearchCache(ONE, path).put(JOB, MADE)
    path.write_bytes(b"\xff\xfe\n" + path.read_bytes())
    assert SearchCache(ONE, path, resume=True).get(JOB) == MADE


def test_what_was_kept_for_another_question_is_not_used(tmp_path):
    path = tmp_path / "kept.jsonl"
    SearchCache(ONE, path).put(JOB, MADE)
    assert SearchCache(OTHER, path, resume=True).get(JOB) is None
    assert SearchCache(ONE, path, resume=True).get(JOB) == MADE
    assert SearchCache(ONE, path).get(JOB) is None  # without resume it starts anew


def test_what_was_kept_of_another_stretch_or_rate_is_not_used():
    cache = SearchCache(ONE)
    slower = dataclasses.replace(JOB, rate=0.5)
    cache.put(slower, MADE)
    assert cache.get(JOB) is None
    assert cache.get(slower) == MADE
    others = (JOB, dataclasses.replace(JOB, end=6), dataclasses.replace(JOB, seed=1))
    assert [cache.get(other) for other in others] == [None] * 3


def test_a_search_that_found_nothing_need_not_try_its_rates_again(tmp_path):
    path, slower = tmp_path / "kept.jsonl", dataclasses.replace(JOB, rate=0.5)
    SearchCache(ONE, path).put(slower, MADE)
    again = SearchCache(ONE, path, resume=True)
    assert again.get(slower) == MADE
    assert again.get(JOB) is None


def test_a_line_that_lacks_the_times_of_some_requests_is_none(tmp_path):
    path = tmp_path / "kept.jsonl"
    timed = dataclasses.replace(MADE, times=((1.0,) * 5, (2.0,) * 5))
    SearchCache(ONE, path).put(JOB, timed)
    assert len(SearchCache(ONE, path, resume=True)) == 1
    path.write_text(path.read_text().replace("[2.0, ", "[", 1))
    assert len(SearchCache(ONE, path, resume=True)) == 0


def keys(task, fit_sha256="a"):
    key = SearchKey(task, fit_sha256)
    return key.of_any_slo, key.of_this_slo


def test_the_key_of_a_search_depends_on_all_that_its_simulations_do():
    added = {"arrival": 0.5, "hash_ids": [[1], [2]], "speculates": [True, False], "slo_tpot": 0.1}
    changed = [{"requests": REQUESTS.assign(**{k: v})} for k, v in added.items()]
    changed += [{"serving": Serving()}, {"serving": Serving(max_kv_tokens=4096, prefill_chunk=64)}]
    found = [keys(TASK), keys(TASK, "b"), *(keys(dataclasses.replace(TASK, **c)) for c in changed)]
    assert len({key for both in found for key in both}) == 2 * len(found) == 16
    assert keys(TASK) == found[0]
    other = keys(dataclasses.replace(TASK, slo=SLO(tpot=0.2)))
    assert (other[0] == found[0][0], other[1] == found[0][1]) == (True, False)


@pytest.mark.parametrize("scheduling", ["fcfs", "slo"])
@pytest.mark.parametrize("policy", ["chain-3", "specserve-5"])
def test_only_what_no_target_steers_is_taken_for_other_targets(
    machine_fit, tmp_path, policy, scheduling
):
    """And then all its figures are those of a simulation that was made for these."""
    arrival = [0.0, 0.0, 0.1, 0.1, 0.2]
    columns = {"arrival": arrival, "prompt_tokens": 50, "output_tokens": [9, 20, 5, 12, 8]}
    own = [0.02, float("nan"), float("nan"), 0.1, float("nan")]
    requests = pd.DataFrame({**columns, "category": "", "slo_tpot": own})
    serving = Serving(max_kv_tokens=4096, scheduling=scheduling)
    first = Task(requests, machine_fit, SLO(ttft=2.0, tpot=0.1), serving)
    second = dataclasses.replace(first, slo=SLO(ttft=0.15, tpot=0.03, percentile=50.0))
    job = Job(Candidate(Deployment(2), parse_policy(policy), 2), 0, 1, 5)
    path = tmp_path / "kept.jsonl"
    made = run_job(first, job)
    SearchCache(SearchKey(first, "fit"), path).put(job, made)
    assert SearchCache(SearchKey(first, "fit"), path, resume=True).get(job) == made
    again = SearchCache(SearchKey(second, "fit"), path, resume=True)
    expected = run_job(second, job)
    assert expected.figures["slo_attainment"] < made.figures["slo_attainment"]
    is_taken = (policy, scheduling) == ("chain-3", "fcfs")
    assert again.get(job) == (expected if is_taken else None)
    assert len(again) == again.num_of_any_slo == is_taken


def test_lines_of_others_leave_a_file_that_has_become_large(tmp_path, monkeypatch):
    path = tmp_path / "kept.jsonl"
    SearchCache(OTHER, path).put(JOB, MADE)
    SearchCache(ONE, path, resume=True).put(JOB, MADE)
    both = path.read_text()
    SearchCache(ONE, path, resume=True)
    assert path.read_text() == both
    monkeypatch.setattr(search_cache, "MOST_BYTES", len(both) - 1)
    assert SearchCache(ONE, path, resume=True).get(JOB) == MADE
    assert path.read_text() == both.splitlines(keepends=True)[1]


def test_what_other_code_simulated_is_not_used(tmp_path, monkeypatch):
    path = tmp_path / "kept.jsonl"
    SearchCache(SearchKey(TASK, "one"), path).put(JOB, MADE)
    assert len(SearchCache(SearchKey(TASK, "one"), path, resume=True)) == 1
    monkeypatch.setattr(search_cache, "_of_this_code", lambda: b"edited")
    assert len(SearchCache(SearchKey(TASK, "one"), path, resume=True)) == 0


def test_a_simulation_of_many_requests_is_kept_for_its_own_targets(tmp_path):
    path = tmp_path / "kept.jsonl"
    SearchCache(ONE, path).put(JOB, MADE)  # without the times of its requests
    other = SearchKey(dataclasses.replace(TASK, slo=SLO(tpot=0.2)), "a")
    assert SearchCache(other, path, resume=True).get(JOB) is None
    assert times_of([record(1.0, 2.0), record(3.0, 4.0)]) == ((1.0, 3.0), (2.0, 4.0))
    assert times_of([record(1.0, None)]) == ()
    assert times_of([record(1.0, 2.0)] * 20_001) == ()


def record(first, last):
    return RequestRecord(0, "", 0.0, 5, 5, first_token=first, finish=last)
