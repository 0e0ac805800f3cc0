from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pandas as pd
import pytest

from codesign.artifacts import header, write_table
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Deployment, Serving
from codesign.errors import InputError
from codesign.file_ref import FileRef
from codesign.fit.shipped import DEFAULT_FIT
from codesign.plan import Economics, Plan
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling


def scored(policy: str, *, max_batch: int = 4, tpot: float = 0.05) -> ScoredCandidate:
    spec = parse_policy(policy)
    deployment = Deployment(1, 1) if spec.is_async else Deployment(2)
    return ScoredCandidate(
        Candidate(deployment, spec, max_batch),
        {"tpot_mean": Interval(tpot, tpot * 0.9, tpot * 1.1)},
        {"target": 0.03, "draft": 0.01},
        "fitted",
        is_feasible=True,
        num_seeds=3,
    )


@pytest.fixture
def plan(tmp_path):
    requests = pd.DataFrame(
        {"arrival": [0.0], "prompt_tokens": [9], "output_tokens": [5], "category": ["chat"]}
    )
    folder = tmp_path / "made"
    write_table(folder / "trace.parquet", requests, header("trace", seed=None))
    (folder / "fit.json").write_text("{}")
    return Plan(
        target="target",
        draft="draft",
        slo=SLO(ttft=1.0, percentile=95.0),
        objective="goodput",
        sampling=Sampling(temperature=0.7, seed=3),
        serving=Serving(max_kv_tokens=4096, prefill_chunk=512, routing="least-loaded"),
        trace=FileRef.of(folder / "trace.parquet"),
        num_requests=1,
        fit=FileRef.of(folder / "fit.json"),
        seed=7,
        num_seeds=3,
        chosen=scored("async-tree-8x2x3"),
        alternatives=(scored("tree-8x2x3"), scored("tree-4x1x2"), scored("plain")),
        ties=("tree-8x2x3 on 2, batch 4",),
        reason="verification takes 71 % of a round",
        notes=("only the first request",),
        runner_up="tree-8x2x3 on 2, batch 4: 3% more mean latency",
        economics=Economics(
            null_plan="plain on 2, batch 4",
            speculative="async-tree-8x2x3 on 1+1, batch 4",
            gain=1.4,
            crossover=24,
            largest_batch=64,
            batch=3.5,
            break_even_length=1.6,
            acceptance_length=2.2,
            break_even_rate=None,
            oracle_gain=2.5,
        ),
    )


def test_a_plan_comes_back_as_it_was_saved(plan, tmp_path):
    path = tmp_path / "made" / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert list(Plan.load(path).simulation_seeds) == [7, 8, 9]


def test_a_plan_that_chose_nothing_is_refused_in_plain_words(plan, tmp_path):
    path = tmp_path / "made" / "plan.json"
    plan.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chosen": None}))
    with pytest.raises(InputError, match="not a whole plan: a value that it needs is null"):
        Plan.load(path)


def test_a_plan_that_moved_finds_the_same_files_beside_it_or_in_the_package(plan, tmp_path):
    shipped = FileRef.of(DEFAULT_FIT)
    dataclasses.replace(plan, fit=shipped).save(tmp_path / "made" / "plan.json")
    moved = tmp_path / "other" / "machine"
    moved.mkdir(parents=True)
    for name in ("plan.json", "trace.parquet"):
        shutil.move(tmp_path / "made" / name, moved / name)
    assert Plan.load(moved / "plan.json").fit == shipped
    values = json.loads((moved / "plan.json").read_text())
    values["trace"]["path"] = "elsewhere/trace.parquet"
    (moved / "plan.json").write_text(json.dumps(values))
    assert Plan.load(moved / "plan.json").trace.check() == moved / "trace.parquet"
    (moved / "trace.parquet").write_text("another trace")
    with pytest.raises(InputError, match=r"elsewhere/trace\.parquet, which the plan names"):
        Plan.load(moved / "plan.json").trace.check()


@pytest.mark.parametrize(
    ("of_plan", "of_fit", "rows"), [(4096, None, 4096), (None, 900, 900), (4096, 900, 900)]
)
def test_the_kv_rows_of_a_replica_are_the_plans_and_no_more_than_the_fit_says(
    plan, of_plan, of_fit, rows
):
    step = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.01)
    cost = RoundCost(step, step, step, step, kv_tokens=of_fit)
    limited = dataclasses.replace(plan, serving=Serving(max_kv_tokens=of_plan))
    assert limited.max_kv_tokens(cost, has_draft=True) == rows


def test_a_plan_that_knows_no_limit_of_kv_rows_says_how_to_set_one(plan):
    with pytest.raises(InputError, match="--max-kv-tokens"):
        dataclasses.replace(plan, serving=Serving()).max_kv_tokens(None, has_draft=True)


def test_a_plan_folder_can_be_moved(plan, tmp_path):
    plan.save(tmp_path / "made" / "plan.json")
    shutil.move(tmp_path / "made", tmp_path / "elsewhere")
    moved = Plan.load(tmp_path / "elsewhere" / "plan.json")
    assert moved.requests()["prompt_tokens"].tolist() == [9]


def test_a_trace_that_changed_after_planning_is_refused(plan, tmp_path):
    plan.save(tmp_path / "made" / "plan.json")
    (tmp_path / "made" / "trace.parquet").write_bytes(b"other")
    with pytest.raises(InputError, match="has changed since the plan was made"):
        Plan.load(tmp_path / "made" / "plan.json").requests()
    (tmp_path / "made" / "trace.parquet").unlink()
    with pytest.raises(InputError, match=r"was not found, nor .*plan again: codesign plan"):
        Plan.load(tmp_path / "made" / "plan.json").requests()


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("", "async-tree-8x2x3"),
        ("tree", "tree-8x2x3"),
        ("tree-4x1x2", "tree-4x1x2"),
        ("plain on 2, batch 4", "plain"),
    ],
)
def test_a_candidate_is_found_by_label_policy_or_family(plan, name, policy):
    assert plan.find(name).candidate.speculation.label == policy


def test_an_unknown_candidate_is_answered_with_those_there_are(plan):
    with pytest.raises(InputError, match=r"no candidate 'chain-9'.*plain on 2, batch 4"):
        plan.find("chain-9")


def test_a_plan_with_a_missing_or_an_unknown_field_is_refused(plan, tmp_path):
    path = tmp_path / "made" / "plan.json"
    plan.save(path)
    values = json.loads(path.read_text())
    for change in ("chosen", "slo"):
        broken = {key: value for key, value in values.items() if key != change}
        path.write_text(json.dumps(broken))
        with pytest.raises(InputError, match=change):
            Plan.load(path)
    values["chosen"]["candidate"]["speculation"]["colour"] = "red"
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match="colour"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("num_seeds",), math.nan, "num_seeds"),
        (("num_seeds",), -3, "num_seeds must be at least 1"),
        (("num_requests",), 0, "num_requests must be at least 1"),
        (("seed",), {}, "not supported"),
        (("seed",), -1, "seed must be at least 0"),
        (("seed",), 2**63, "seed is no number"),
        (("draft",), 10**30, "draft is no str"),
        (("notes", 0), [[]], "one of notes is no str"),
        (("economics", "oracle_gain"), None, "oracle_gain is no number"),
        (("serving", "prefix_cache"), "1", "prefix_cache is no bool"),
        (("sampling", "top_p"), "x", "not supported"),
        (("slo", "percentile"), -1.0, "percentile must be in"),
        (("trace", "path"), 3, "unsupported operand"),
        (("chosen", "is_feasible"), 1, "is_feasible is no bool"),
        (("chosen", "predicted", "tpot_mean", "low"), "0.1", "low is no number"),
        (("chosen", "candidate", "max_batch"), 1.5, "max_batch is no number"),
        (("chosen", "candidate", "speculation", "rows"), True, "rows"),
        (("alternatives", 0, "candidate", "deployment", "replicas"), 0, "at least 1 replica"),
    ],
)
def test_a_plan_with_a_value_that_cannot_be_is_refused_in_one_line(
    plan, tmp_path, place, value, named
):
    path = tmp_path / "made" / "plan.json"
    plan.save(path)
    values = json.loads(path.read_text())
    inside = values
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=rf"whole plan: .*{named}.*\. Plan again: codesign plan"):
        Plan.load(path)


def test_only_asynchronous_trees_have_draft_workers_of_their_own():
    with pytest.raises(InputError, match="needs no workers of its own"):
        Candidate(Deployment(1, 1), parse_policy("chain-3"), 1)
    with pytest.raises(InputError, match="needs workers of its own"):
        Candidate(Deployment(2), parse_policy("async-tree-8x2x3"), 1)


def test_a_batch_of_none_is_refused():
    with pytest.raises(InputError, match="max_batch"):
        Candidate(Deployment(2), parse_policy("plain"), 0)


def test_simpler_candidates_sort_first():
    policies = ("async-tree-4x1x1", "tree-16x4x2", "chain-5", "tree-4x1x1", "chain-1", "plain")
    candidates = [scored(policy).candidate for policy in policies]
    ordered = [c.speculation.label for c in sorted(candidates, key=lambda c: c.complexity)]
    assert ordered == [
        "plain", "chain-1", "chain-5", "tree-4x1x1", "tree-16x4x2", "async-tree-4x1x1"
    ]  # fmt: skip


def test_intervals_that_touch_overlap_and_disjoint_ones_do_not():
    assert Interval(1, 0, 2).overlaps(Interval(3, 2, 4))
    assert not Interval(1, 0, 2).overlaps(Interval(3, 2.5, 4))
    assert Interval(1, 0, 2).contains(2)
    assert not Interval(1, 0, 2).contains(2.1)


def test_labels_are_unique_over_deployment_policy_and_batch():
    base = scored("chain-3").candidate
    others = [
        dataclasses.replace(base, max_batch=8),
        dataclasses.replace(base, deployment=Deployment(4)),
        dataclasses.replace(base, speculation=parse_policy("chain-4")),
    ]
    assert len({c.label for c in (base, *others)}) == 4
