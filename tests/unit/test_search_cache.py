from __future__ import annotations

import pytest

from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.errors import InputError
from codesign.planner.executor import Job
from codesign.planner.predict import Outcome
from codesign.planner.search_cache import SearchCache
from codesign.policy.speculation import parse_policy


def test_an_outcome_that_cannot_be_kept_is_named_and_not_counted(tmp_path):
    folder = tmp_path / "gone"
    cache = SearchCache("one", folder / "kept.jsonl")
    folder.rmdir()
    job = Job(Candidate(Deployment(2), parse_policy("plain"), 1), 0, 0, 5)
    with pytest.raises(InputError, match=r"cannot write .*kept\.jsonl"):
        cache.put(job, Outcome("plain on 2, batch 1", 0, {"goodput": 1.0}, {}, 1))
    assert len(cache) == 0


def test_a_search_that_keeps_nothing_leaves_no_file(tmp_path):
    path = tmp_path / "kept.jsonl"
    path.write_text("of an earlier search")
    SearchCache("one", path)
    assert not path.exists()


def test_a_line_that_was_cut_off_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "kept.jsonl"
    job = Job(Candidate(Deployment(2), parse_policy("plain"), 1), 0, 0, 5)
    made = Outcome("plain on 2, batch 1", 0, {"goodput": 1.0}, {}, 1, num_requests=5)
    SearchCache("one", path).put(job, made)
    path.write_text(path.read_text()[:-9])  # interrupted while it wrote
    again = SearchCache("one", path, resume=True)
    assert len(again) == 0
    again.put(job, made)
    assert SearchCache("one", path, resume=True).get(job) == made  # interrupted once more
