from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

from codesign.candidate import Candidate
from codesign.config import SLO, Deployment, Serving
from codesign.errors import InputError
from codesign.planner.executor import Job
from codesign.planner.predict import Outcome
from codesign.planner.search_cache import SearchCache, search_key
from codesign.policy.speculation import parse_policy

JOB = Job(Candidate(Deployment(2), parse_policy("plain"), 1), 0, 0, 5)
MADE = Outcome("plain on 2, batch 1", 0, {"goodput": 1.0}, {}, 1, num_requests=5)


def test_an_outcome_that_cannot_be_kept_is_named_and_not_counted(tmp_path):
    folder = tmp_path / "gone"
    cache = SearchCache("one", folder / "kept.jsonl")
    folder.rmdir()
    with pytest.raises(InputError, match=r"cannot write .*kept\.jsonl"):
        cache.put(JOB, MADE)
    assert len(cache) == 0


def test_a_search_that_keeps_nothing_leaves_no_file(tmp_path):
    path = tmp_path / "kept.jsonl"
    path.write_text("of an earlier search")
    SearchCache("one", path)
    assert not path.exists()


def test_a_line_that_was_cut_off_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "kept.jsonl"
    SearchCache("one", path).put(JOB, MADE)
    path.write_text(path.read_text()[:-9])  # interrupted while it wrote
    again = SearchCache("one", path, resume=True)
    assert len(again) == 0
    again.put(JOB, MADE)
    assert SearchCache("one", path, resume=True).get(JOB) == MADE  # interrupted once more


def test_a_damaged_line_does_not_lose_the_others(tmp_path):
    path = tmp_path / "kept.jsonl"
    SearchCache("one", path).put(JOB, MADE)
    path.write_bytes(b"\xff\xfe\n" + path.read_bytes())
    assert SearchCache("one", path, resume=True).get(JOB) == MADE


def test_what_was_kept_for_another_question_is_not_used(tmp_path):
    path = tmp_path / "kept.jsonl"
    SearchCache("one", path).put(JOB, MADE)
    assert SearchCache("other", path, resume=True).get(JOB) is None
    assert SearchCache("one", path, resume=True).get(JOB) == MADE
    assert SearchCache("one", path).get(JOB) is None  # without resume it starts anew


def test_what_was_kept_of_another_stretch_or_rate_is_not_used():
    cache = SearchCache("one")
    slower = dataclasses.replace(JOB, rate=0.5)
    cache.put(slower, MADE)
    assert cache.get(JOB) is None
    cache.put(JOB, MADE)
    assert cache.get(JOB) == MADE
    others = (slower, dataclasses.replace(JOB, end=6), dataclasses.replace(JOB, seed=1))
    assert [cache.get(other) for other in others] == [None] * 3


def test_the_key_of_a_search_depends_on_all_that_its_simulations_do():
    columns = {"arrival": [0.0, 1.0], "prompt_tokens": [5, 6], "output_tokens": 9, "category": ""}
    base = {"requests": pd.DataFrame(columns), "fit_sha256": "a", "slo": SLO(tpot=0.1)}
    base["serving"] = Serving(max_kv_tokens=4096)
    added = {"arrival": 0.5, "hash_ids": [[1], [2]], "speculates": [True, False], "slo_tpot": 0.1}
    changes = [{"requests": base["requests"].assign(**{k: v})} for k, v in added.items()]
    changes += [{"fit_sha256": "b"}, {"slo": SLO(tpot=0.2)}, {"serving": Serving()}]
    changes += [{"serving": Serving(max_kv_tokens=4096, prefill_chunk=64)}]
    keys = [search_key(**base), *(search_key(**{**base, **change}) for change in changes)]
    assert len(set(keys)) == len(keys) == 9
    assert search_key(**base) == keys[0]
