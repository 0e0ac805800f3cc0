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
    (folder / "kept.jsonl").unlink()
    folder.rmdir()
    job = Job(Candidate(Deployment(2), parse_policy("plain"), 1), 0, 0, 5)
    with pytest.raises(InputError, match=r"cannot write .*kept\.jsonl"):
        cache.put(job, Outcome("plain on 2, batch 1", 0, {"goodput": 1.0}, {}, 1))
    assert len(cache) == 0
