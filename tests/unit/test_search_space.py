from __future__ import annotations

import pytest

from codesign.errors import InputError
from codesign.plan import FAMILIES
from codesign.planner.search_space import default_policies, search_space, splits


def test_every_family_is_tried_and_every_candidate_uses_all_workers():
    candidates, notes = search_space(["2", "1+1"], workers=2, max_batch=8)
    assert {c.family for c in candidates} == set(FAMILIES)
    assert {c.deployment.num_workers for c in candidates} == {2}
    assert len({c.label for c in candidates}) == len(candidates)
    assert notes == []


def test_only_asynchronous_trees_are_tried_on_splits():
    candidates, _ = search_space(["4", "3+1", "2+2", "1+3"], workers=4, max_batch=1)
    for candidate in candidates:
        assert (candidate.deployment.draft_workers > 0) == candidate.speculation.is_async
    assert {c.deployment.label for c in candidates} == {"4", "3+1", "2+2", "1+3"}


def test_splits_give_both_sides_at_least_one_worker():
    assert [d.label for d in splits(3)] == ["3", "2+1", "1+2"]
    assert [d.label for d in splits(1)] == ["1"]


def test_batch_limits_end_at_the_one_asked_for():
    limits = {c.max_batch for c in search_space(["2"], workers=2, max_batch=6)[0]}
    assert limits == {1, 2, 4, 6}


def test_a_split_without_measurements_is_named_with_the_command_that_adds_it():
    candidates, notes = search_space(["3", "2+1"], workers=3, max_batch=1)
    assert {c.deployment.label for c in candidates} == {"3", "2+1"}
    assert len(notes) == 1
    assert "1+2" in notes[0]
    assert "codesign profile" in notes[0]


def test_a_split_that_no_policy_needs_is_not_called_missing():
    assert search_space(["2"], workers=2, max_batch=1, policies=["plain", "chain-3"])[1] == []


def test_one_worker_cannot_be_split_and_the_notes_say_so():
    _, notes = search_space(["1"], workers=1, max_batch=1)
    assert any("at least 2 workers" in note for note in notes)


def test_a_fit_of_another_machine_is_refused_with_what_it_holds():
    with pytest.raises(InputError, match=r"no step times for 8 workers, only for 2, 1\+1"):
        search_space(["2", "1+1"], workers=8, max_batch=1)


def test_policies_that_cannot_run_here_are_refused():
    with pytest.raises(InputError, match="async-tree-8x2x2"):
        search_space(["2"], workers=2, max_batch=1, policies=["async-tree-8x2x2"])


def test_the_search_can_be_restricted_to_named_policies():
    candidates, _ = search_space(["2"], workers=2, max_batch=1, policies=["chain-7", "plain"])
    assert {c.speculation.label for c in candidates} == {"chain-7", "plain"}


def test_no_policy_is_tried_twice():
    labels = [spec.label for spec in default_policies()]
    assert len(set(labels)) == len(labels)
