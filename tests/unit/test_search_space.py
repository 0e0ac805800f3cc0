from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

from codesign.config import Serving
from codesign.errors import InputError
from codesign.planner.search_space import (
    MAX_PLAYED_TOKENS,
    default_policies,
    deployments,
    search_space,
)
from codesign.policy.cost import RoundCost, StepTime

STEP = StepTime.linear(alpha=0.0, gamma=0.001, delta=0.01)
COST = RoundCost(STEP, STEP, STEP, STEP)


def costs(*labels, kv_tokens=None):
    return {label: dataclasses.replace(COST, kv_tokens=kv_tokens) for label in labels}


def every_split(workers):
    """Step times of every group and split of up to so many workers."""
    sizes = range(1, workers + 1)
    return costs(*(f"{n}" for n in sizes), *(f"{n - d}+{d}" for n in sizes for d in range(1, n)))


def requests(prompt=100, output=50, num=3) -> pd.DataFrame:
    columns = {"arrival": [0.0] * num, "prompt_tokens": [prompt] * num, "output_tokens": output}
    return pd.DataFrame(columns)


def test_every_family_is_tried_and_every_candidate_uses_all_workers():
    space = search_space(costs("2", "1+1"), workers=2, max_batch=8)
    families = {"plain", "chain", "threshold", "specserve", "tree", "batch-tree"}
    families |= {"async-tree", "async-batch-tree"}
    assert {c.family for c in space.candidates} == families
    assert {c.deployment.num_workers for c in space.candidates} == {2}
    assert len({c.label for c in space.candidates}) == len(space.candidates)
    assert space.notes == ()


def test_a_policy_in_two_spellings_is_tried_once():
    labels = ("threshold-5", "threshold-5@0.4", "plain", "chain-3", "chain-03", "plain")
    space = search_space(costs("2"), workers=2, max_batch=2, policies=labels)
    assert len(space.candidates) == len(set(space.candidates)) == 3 * 2


def test_only_asynchronous_policies_are_tried_on_splits():
    space = search_space(costs("4", "3+1", "2+2", "1+3"), workers=4, max_batch=1)
    for candidate in space.candidates:
        assert (candidate.deployment.draft_workers > 0) == candidate.speculation.is_async
    assert {c.deployment.label for c in space.candidates} == {"4", "3+1", "2+2", "1+3"}


def test_every_way_to_use_all_workers_is_named_once():
    labels = [d.label for d in deployments(4, every_split(4))]
    assert labels == [
        "4", "3+1", "2+2", "1+3", "2x2", "2x1+1", "4x1",
        "3/p1", "2+1/p1", "1+2/p1", "3x1/p1",
        "2/p2", "1+1/p2", "2x1/p2",
        "1/p3",
    ]  # fmt: skip
    eight = deployments(8, every_split(8))
    assert len({d.label for d in eight}) == len(eight)
    assert {d.num_workers for d in eight} == {8}
    assert {"2x4", "4x2", "2x3+1", "6+2"} <= {d.label for d in eight}


def test_a_number_of_workers_beyond_all_machines_is_refused_at_once():
    with pytest.raises(InputError, match=r"no step times for 99,999 workers, only for 2, 1\+1"):
        search_space(costs("2", "1+1"), workers=99_999, max_batch=8)
    space = search_space(costs("1"), workers=99_999, max_batch=1)
    assert {c.deployment.label for c in space.candidates} == {"99999x1", "99998x1/p1"}
    assert space.notes[0].count(",") < 20


def test_replicas_and_prompt_pools_need_the_step_times_of_their_parts_alone():
    space = search_space(costs("2", "1+1", "4"), workers=4, max_batch=1)
    assert {c.deployment.label for c in space.candidates} == {
        "4", "2x2", "2x1+1", "2/p2", "1+1/p2"
    }  # fmt: skip


def test_pools_for_prompts_are_not_searched_where_requests_join_by_their_targets():
    serving = Serving(scheduling="slo")
    space = search_space(costs("2", "1+1", "4"), workers=4, max_batch=1, serving=serving)
    assert {c.deployment.label for c in space.candidates} == {"4", "2x2", "2x1+1"}
    assert space.notes[-1] == "not searched: pools for prompts, which serve who comes first"
    space = search_space(costs("4"), workers=4, max_batch=1, serving=serving)
    assert not any("pools" in note for note in space.notes)


def test_batch_limits_end_at_the_one_asked_for():
    limits = {c.max_batch for c in search_space(costs("2"), workers=2, max_batch=6).candidates}
    assert limits == {1, 2, 4, 6}


def test_a_split_without_measurements_is_named_with_the_command_that_adds_it():
    space = search_space(costs("3", "2+1"), workers=3, max_batch=1)
    assert {c.deployment.label for c in space.candidates} == {"3", "2+1"}
    assert len(space.notes) == 1
    assert "1+2" in space.notes[0]
    assert "Add them: codesign profile --out profile, then codesign fit profile" in space.notes[0]
    measure = "codesign profile --device cuda --workers 3 --out profile"
    asked = search_space(costs("3", "2+1"), workers=3, max_batch=1, measure=measure)
    assert f"Add them: {measure}, then codesign fit profile" in asked.notes[0]


def test_a_split_whose_memory_is_too_small_is_not_said_to_lack_a_profile():
    known = costs("4", "3+1", kv_tokens=400)
    space = search_space(known, workers=4, max_batch=1, origin="roofline")
    assert "not searched, the weights do not fit: 2+2, 1+3" in space.notes
    profiled = search_space(known, workers=4, max_batch=1)  # that knows its memory says less
    assert profiled.notes[0].startswith("not searched, no step times: 2+2, 1+3.")


def test_a_split_that_no_policy_needs_is_not_called_missing():
    policies = ["plain", "chain-3"]
    assert search_space(costs("2"), workers=2, max_batch=1, policies=policies).notes == ()


def test_one_worker_cannot_be_split_and_the_notes_say_so():
    notes = search_space(costs("1"), workers=1, max_batch=1).notes
    assert any("at least 2 workers" in note for note in notes)


def test_a_fit_of_another_machine_is_refused_with_what_it_holds():
    with pytest.raises(InputError, match=r"no step times for 7 workers, only for 4, 3\+2"):
        search_space(costs("4", "3+2"), workers=7, max_batch=1)


def test_policies_that_cannot_run_here_are_refused():
    with pytest.raises(InputError, match="async-tree-8x2x2"):
        search_space(costs("2"), workers=2, max_batch=1, policies=["async-tree-8x2x2"])


def test_the_search_can_be_restricted_to_named_policies():
    space = search_space(costs("2"), workers=2, max_batch=1, policies=["chain-7", "plain"])
    assert {c.speculation.label for c in space.candidates} == {"chain-7", "plain"}


def test_what_cannot_hold_the_longest_request_is_left_out_and_named():
    small, large = costs("1", "1+1", kv_tokens=160), costs("2", kv_tokens=400)
    space = search_space(small | large, workers=2, max_batch=1, requests=requests())
    labels = {c.label for c in space.candidates}
    assert "plain on 2x1, batch 1" in labels  # 150 tokens and a row
    assert "tree-8x2x2 on 2x1, batch 1" in labels
    assert "tree-16x2x2 on 2x1, batch 1" not in labels  # 166 rows
    assert "tree-16x2x2 on 2, batch 1" in labels
    longer = search_space(small | large, workers=2, max_batch=1, requests=requests(160))
    assert {c.deployment.label for c in longer.candidates} == {"2"}
    assert any("KV memory" in note and "2x1" in note for note in longer.notes)


def test_a_pool_for_prompts_that_cannot_hold_the_longest_request_is_left_out():
    known = costs("2", kv_tokens=400) | costs("1", kv_tokens=140)
    labels = [
        {
            c.deployment.label
            for c in search_space(fit, workers=3, max_batch=1, requests=asked).candidates
        }
        for fit, asked in ((known | costs("3"), requests()), (known | costs("3"), requests(80)))
    ]
    assert labels == [{"3"}, {"3", "2/p1", "3x1", "1/p2", "2x1/p1"}]


def test_a_request_that_fits_nowhere_is_refused_with_the_flags_that_help():
    with pytest.raises(InputError, match=r"needs 5,050 .* \(2: at most 400\)\. .*--max-prompt"):
        search_space(costs("2", kv_tokens=400), workers=2, max_batch=1, requests=requests(5000))


def test_the_smaller_of_the_users_limit_and_the_memory_holds():
    cost = dataclasses.replace(COST, kv_tokens=400, plain_kv_tokens=600)
    for limit, rooms in ((None, (400, 600)), (300, (300, 300)), (500, (400, 500))):
        assert (cost.kv_room(limit, has_draft=True), cost.kv_room(limit, has_draft=False)) == rooms
    assert COST.kv_room(None, has_draft=False) is None
    same = dataclasses.replace(COST, kv_tokens=400)
    assert same.kv_room(None, has_draft=False) == 400


def test_memory_that_holds_the_target_alone_is_searched_without_a_draft():
    small = dataclasses.replace(COST, kv_tokens=0, plain_kv_tokens=400)
    space = search_space({"1": small}, workers=1, max_batch=1, requests=requests())
    assert {c.speculation.label for c in space.candidates} == {"plain"}
    with pytest.raises(InputError, match="KV rows and a round's draft"):
        search_space(
            {"1": small}, workers=1, max_batch=1, policies=["chain-1"], requests=requests()
        )


def test_outcomes_that_ssd_drafts_need_room_too():
    cost = costs("1+1", kv_tokens=200)
    space = search_space(
        cost, workers=2, max_batch=1, policies=["ssd-4x1", "ssd-4x3"], requests=requests()
    )
    assert [c.speculation.label for c in space.candidates] == ["ssd-4x1"]  # 25 rows against 65


def test_policies_whose_every_round_is_played_need_a_short_trace_or_to_be_asked_for():
    long = requests(num=MAX_PLAYED_TOKENS // 50 + 1)
    space = search_space(costs("2"), workers=2, max_batch=1, requests=long)
    assert "specserve" not in {c.family for c in space.candidates}
    assert any("specserve-5" in note and "--policies" in note for note in space.notes)
    asked = search_space(
        costs("2"), workers=2, max_batch=1, requests=long, policies=["specserve-5"]
    )
    assert {c.family for c in asked.candidates} == {"specserve", "plain"}
    short = search_space(costs("2"), workers=2, max_batch=1, requests=requests())
    assert "specserve" in {c.family for c in short.candidates}


def test_eight_workers_have_at_least_5000_candidates():
    assert len(search_space(every_split(8), workers=8, max_batch=256).candidates) >= 5000


def test_no_policy_is_tried_twice():
    labels = [spec.label for spec in default_policies()]
    assert len(set(labels)) == len(labels)


def test_plain_decoding_on_all_workers_is_always_compared(machine_fit):
    space = search_space(machine_fit.costs, workers=2, max_batch=2, policies=("chain-2",))
    plain = [c.label for c in space.candidates if c.speculation.kind == "plain"]
    assert plain == ["plain on 2, batch 1", "plain on 2, batch 2"]


def test_one_worker_is_no_workers():
    with pytest.raises(InputError, match=r"no step times for 1 worker, only for 4\. Measure them"):
        search_space(costs("4"), workers=1, max_batch=1)


def test_what_the_engine_does_not_run_can_be_left_out():
    known = costs("4", "3", "2", "1", "3+1")
    every = search_space(known, workers=4, max_batch=1)
    assert any(c.deployment.prefill_workers for c in every.candidates)
    space = search_space(known, workers=4, max_batch=1, runnable=True)
    assert {c for c in every.candidates if c.runs_in_engine} == set(space.candidates)
    assert (
        "not searched: pools for prompts, which the engine here has not (--runnable)" in space.notes
    )
    with pytest.raises(InputError, match=r"eagle-8x4x2@0.96 runs in the simulator only"):
        search_space(known, workers=4, max_batch=1, policies=("eagle-8x4x2",), runnable=True)
