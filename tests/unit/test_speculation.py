from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.errors import InputError
from codesign.policy.adaptive import INITIAL_CONFIDENCE
from codesign.policy.batch_round import BatchRound
from codesign.policy.cost import Calibration, StepTime
from codesign.policy.host_cost import HostCost
from codesign.policy.interface import Progress, last_confidence
from codesign.policy.row_prices import RowPrices
from codesign.policy.speculation import (
    FAMILIES,
    MAX_TREE_ROWS,
    Goodput,
    Speculation,
    SpeculationSpec,
    build_speculation,
    parse_policy,
)
from codesign.policy.traffic import COLD, START_OUTPUT, START_PROMPT, Traffic
from codesign.policy.tree import DraftTree

DRAFT = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.001)
TARGET = StepTime.linear(alpha=0.0, gamma=0.001, delta=0.019)  # one row: 20 ms
STAIRS = StepTime(0.0, (1, 4, 5), (0.02, 0.02, 0.08))  # four rows cost as much as one
DEAR = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.005)
SLO_TPOT = 0.03


def new_trees(count: int, *, base_len: int = 10, max_depth: int = 50) -> list[DraftTree]:
    return [DraftTree(0, base_len=base_len, max_depth=max_depth) for _ in range(count)]


def step(
    policy: Speculation, trees: list[DraftTree], leaves: list[list[int]], chances: list[float]
) -> None:
    """One draft forward; each leaf's first child has its tree's chance, the others halve it."""
    for tree, nodes, chance in zip(trees, leaves, chances, strict=True):
        tree.expand(nodes)
        for node in nodes:
            log_probs = [math.log(chance / 2**i) for i in range(policy.fanout)]
            tree.add_children(node, list(range(policy.fanout)), policy.weigh(log_probs))


def draft(
    policy: Speculation,
    trees: list[DraftTree],
    *steps: list[float],
    progress: Sequence[Progress] = (),
) -> int:
    """A round's drafting with confidences per step and tree; returns the forwards made."""
    policy.begin(trees, progress or [Progress()] * len(trees))
    done = 0
    while any(leaves := policy.leaves(trees, done)):
        step(policy, trees, leaves, steps[min(done, len(steps) - 1)])
        done += 1
    return done


def goodput(
    *, draft: StepTime = DRAFT, target: StepTime = TARGET, slo_tpot: float | None = None
) -> Goodput:
    return Goodput(draft, target, slo_tpot=slo_tpot, prompt_seconds=lambda rows: 0.0)


def specserve(label: str = "specserve-5", estimator: Goodput | None = None) -> Speculation:
    return build_speculation(parse_policy(label), goodput=estimator or goodput())


# Policies as data.


def all_specs() -> list[SpeculationSpec]:
    switches = list(itertools.product([True, False], repeat=3))
    return [
        SpeculationSpec(),
        *(SpeculationSpec(kind="chain", max_depth=n) for n in (1, 3, 12)),
        *(
            SpeculationSpec(kind="threshold", max_depth=5, threshold=t)
            for t in (0.0, 1e-05, 0.123456789, 0.4, 1.0)
        ),
        *(
            SpeculationSpec(kind="tree", is_async=a, rows=8, width=4, expansions=2)
            for a in (True, False)
        ),
        *(
            SpeculationSpec(
                kind="specserve",
                max_depth=7,
                adaptive_drafter=drafter,
                confidence_prior=prior,
                slo_aware=slo,
            )
            for drafter, prior, slo in switches
        ),
        *(family.spec for family in FAMILIES),
        parse_policy("static-tree-4"),
        parse_policy("static-tree-1x2x3x4"),
        parse_policy("eagle-8x4x2@1.0"),
        parse_policy("async-eagle-8x4x2@0.123"),
    ]


@pytest.mark.parametrize("spec", all_specs(), ids=lambda spec: spec.label)
def test_label_and_dictionary_lead_back_to_the_policy(spec):
    assert parse_policy(spec.label) == spec
    assert SpeculationSpec(**json.loads(json.dumps(spec.to_dict()))) == spec
    assert len({spec, parse_policy(spec.label)}) == 1


def test_a_plan_of_the_first_version_is_still_read():
    values = parse_policy("tree-8x4x2").to_dict()
    del values["widths"], values["feature_decay"]
    assert SpeculationSpec(**values) == parse_policy("tree-8x4x2")


def test_labels_are_distinct():
    specs = set(all_specs())
    labels = [spec.label for spec in specs]
    assert len(set(labels)) == len(labels)
    assert {"plain", "chain-3", "threshold-5@0.4", "tree-8x4x2", "async-tree-8x4x2"} < set(labels)
    assert "specserve-7-no-drafter-no-prior-no-slo" in labels


@pytest.mark.parametrize(
    "label",
    [
        "",
        "chain",
        "chain-",
        "chain-x",
        "chain-3.5",
        "plain-3",
        "tree-8",
        "tree-8x4",
        "tree-8x4x2x1",
        "async-chain-3",
        "async-tree",
        "threshold-@0.4",
        "threshold-5@high",
        "specserve",
        "specserve-5-no-",
        "specserve-5-no-tree",
        "eagle-3",
        "eagle-8x4x2@high",
        "async-pearl-4",
        "static-tree",
        "static-tree-",
        "static-tree-2x",
        "adaserve-4x2",
        "ssd-4",
        "amusd-",
    ],
)
def test_unknown_label_is_an_input_error_with_examples(label):
    with pytest.raises(InputError, match=r"unknown policy .*; write plain, chain-3"):
        parse_policy(label)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("chain-0", "chain needs max_depth >= 1, got 0"),
        ("specserve-0", "specserve needs max_depth >= 1"),
        ("tree-1x4x2", "a tree needs rows >= 2"),
        ("tree-8x0x2", "width >= 1"),
        ("async-tree-8x4x0", "expansions >= 1"),
        ("threshold-3@1.5", r"threshold must be in \[0, 1\], got 1.5"),
        ("threshold-3@nan", "threshold must be in"),
        ("static-tree-0", "a static-tree needs widths >= 1"),
        ("static-tree-2x0", "a static-tree needs widths >= 1"),
        ("static-tree-64x2x1", "needs 193 draft KV rows per request and round, at most 128"),
        ("inflight-tree-1x2x3", "an inflight-tree needs rows >= 2"),
        ("pipeinfer-4x2x0", "pipeinfer needs rows >= 2, width >= 1 and expansions >= 1"),
        ("pearl-0", "pearl needs max_depth >= 1"),
        ("pearl-64", "needs 129 draft KV rows"),
        ("turbospec-0", "turbospec needs max_depth >= 1"),
        ("adaserve-4x0x9", "adaserve needs width >= 1"),
        ("adaserve-4x2x1", "adaserve needs width >= 1 and rows >= 2, got 2, 1"),
        ("ssd-3x0", "ssd needs outcomes >= 1"),
        ("ssd-8x2", "ssd-8x2 needs 153 draft KV rows per request and round, at most 128"),
        ("eagle-8x4x2@1.5", r"feature_decay must be in \[0, 1\], got 1.5"),
    ],
)
def test_policy_without_a_meaning_is_refused(label, message):
    with pytest.raises(InputError, match=message):
        parse_policy(label)


def test_unknown_kinds_and_asynchronous_serial_ones_are_refused():
    with pytest.raises(InputError, match="unknown policy 'beam'"):
        SpeculationSpec(kind="beam")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="chain does not run asynchronously"):
        SpeculationSpec(kind="chain", max_depth=3, is_async=True)
    with pytest.raises(InputError, match="pearl runs asynchronously only"):
        SpeculationSpec(kind="pearl", max_depth=3)


@pytest.mark.parametrize(
    ("label", "rows"),
    [
        ("plain", 1),
        ("chain-3", 4),
        ("tree-8x4x2", 8),
        ("specserve-5", 6),
        ("static-tree-3x2x1", 1 + 3 + 6 + 6),
        ("adaserve-4x2x32", 9),
        ("adaserve-4x2x5", 5),
        ("ssd-4x3", 5),
        ("pearl-4", 5),
        ("eagle-8x4x2", 8),
    ],
)
def test_max_rows_counts_the_root(label, rows):
    assert parse_policy(label).max_rows == rows


@pytest.mark.parametrize(
    ("label", "rows"),
    [("plain", 1), ("chain-3", 4), ("tree-8x4x2", 8), ("tree-4x4x4", 16), ("async-tree-8x9x8", 72),
     ("static-tree-4x2x1", 21), ("pearl-4", 9), ("ssd-4x3", 65), ("adaserve-6x4x5", 21)],
)  # fmt: skip
def test_kv_rows_are_those_of_the_model_that_needs_more(label, rows):
    assert parse_policy(label).kv_rows == rows


@pytest.mark.parametrize("label", ["specserve-5", "turbospec-5", "adaserve-4x2x9", "amusd"])
def test_policies_that_decide_by_step_times_need_them(label):
    spec = parse_policy(label)
    assert spec.needs_step_times
    with pytest.raises(InputError, match=f"{spec.kind} needs fitted step times: codesign fit"):
        build_speculation(spec)


def test_all_other_policies_are_built_without_step_times():
    for family in FAMILIES:
        if not family.spec.needs_step_times:
            build_speculation(family.spec)


# Plain, chains.


def test_plain_never_drafts():
    policy, trees = build_speculation(parse_policy("plain")), new_trees(2)
    assert draft(policy, trees, [0.9, 0.9]) == 0
    assert policy.select(trees) == [[0], [0]]


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_chain_has_its_length_whatever_the_confidence(depth):
    policy, trees = build_speculation(parse_policy(f"chain-{depth}")), new_trees(2)
    assert draft(policy, trees, [0.99, 0.01]) == depth
    assert policy.select(trees) == [list(range(depth + 1))] * 2
    assert trees[0].depths == list(range(depth + 1))


def test_chain_ends_where_the_request_ends():
    policy = build_speculation(parse_policy("chain-5"))
    trees = [*new_trees(1), *new_trees(1, max_depth=2), *new_trees(1, max_depth=0)]
    draft(policy, trees, [0.9] * 3)
    assert [len(tree) for tree in trees] == [6, 3, 1]


def test_chain_counts_tokens_left_over_from_the_last_round():
    policy, trees = build_speculation(parse_policy("chain-3")), new_trees(1)
    draft(policy, trees, [0.9])
    trees[0].reroot([0])  # the target took its own token, which is the chain's first
    assert len(trees[0]) == 3
    assert draft(policy, trees, [0.9]) == 1
    assert policy.select(trees) == [[0, 1, 2, 3]]


def test_threshold_stops_after_the_first_unsure_token_and_still_sends_it():
    policy, trees = build_speculation(parse_policy("threshold-5@0.4")), new_trees(3)
    draft(policy, trees, [0.9, 0.9, 0.39], [0.9, 0.3, 0.9], [0.4, 0.9, 0.9], [0.1, 0.9, 0.9])
    assert [len(tree) - 1 for tree in trees] == [4, 2, 1]
    assert policy.select(trees)[2] == [0, 1]


def test_threshold_judges_a_token_by_itself_not_by_its_path():
    policy, trees = build_speculation(parse_policy("threshold-5@0.5")), new_trees(1)
    assert draft(policy, trees, [0.6]) == 5  # 0.6 ** 2 is below 0.5 already
    assert last_confidence(trees[0]) == pytest.approx(0.6)


# Trees.


@pytest.mark.parametrize("label", ["tree-8x4x2", "tree-4x1x3", "tree-2x5x1"])
def test_serial_tree_makes_its_expansions_and_sends_its_rows(label):
    spec = parse_policy(label)
    policy, trees = build_speculation(spec), new_trees(3)
    assert draft(policy, trees, [0.6, 0.5, 0.4]) == spec.expansions
    chosen = policy.select(trees)
    for tree, nodes in zip(trees, chosen, strict=True):
        assert tree.num_expanded == 1 + spec.width * (spec.expansions - 1)
        assert nodes == tree.best(spec.rows)
        assert len(nodes) == spec.rows


def test_asynchronous_tree_expands_once_after_a_miss_and_not_after_a_hit():
    policy, trees = build_speculation(parse_policy("async-tree-8x4x2")), new_trees(1)
    assert draft(policy, trees, [0.6]) == 1
    assert len(trees[0]) == 8
    assert policy.overlap == 2
    for _ in range(policy.overlap):
        leaves = policy.overlap_leaves(trees)
        assert len(leaves[0]) == 4
        step(policy, trees, leaves, [0.6])
    trees[0].reroot([0])
    assert draft(policy, trees, [0.6]) == 0
    assert len(policy.select(trees)[0]) == 8
    trees[0].reroot([77])
    assert draft(policy, trees, [0.6]) == 1


def test_serial_policies_overlap_nothing():
    for label in ("plain", "chain-3", "threshold-3@0.4", "tree-8x4x2"):
        policy, trees = build_speculation(parse_policy(label)), new_trees(1)
        assert policy.overlap == 0
        draft(policy, trees, [0.6])


def test_fanout_leaves_no_better_row_or_leaf_behind():
    # All the weight may lie below one node: then it must fill the rows, and the next width, alone.
    assert build_speculation(parse_policy("tree-8x4x2")).fanout == 7
    assert build_speculation(parse_policy("tree-4x6x2")).fanout == 6
    assert build_speculation(parse_policy("chain-5")).fanout == 1


@pytest.mark.parametrize("label", ["tree-8x4x2", "async-tree-8x4x2"])
def test_tree_s_kv_rows_stay_bounded(label):
    policy, trees = build_speculation(parse_policy(label)), new_trees(1, max_depth=1000)
    for _ in range(60):  # nothing is ever verified
        draft(policy, trees, [0.6])
        step(policy, trees, policy.overlap_leaves(trees), [0.6])
    assert trees[0].num_expanded <= MAX_TREE_ROWS


# Calibration.


def test_calibrated_weights_are_the_log_chance_of_acceptance():
    calibration = Calibration(slope=0.5, intercept=-0.2)
    policy = build_speculation(parse_policy("chain-3"), calibration=calibration)
    for confidence in (1e-5, 0.1, 0.5, 0.9, 0.99999):
        logit = math.log(confidence / (1 - confidence))
        expected = 1 / (1 + math.exp(-(0.5 * logit - 0.2)))
        (weight,) = policy.weigh([math.log(confidence)])
        assert math.exp(weight) == pytest.approx(expected)


def test_identity_calibration_changes_no_bit():
    log_probs = [-0.1, -2.5, -40.0]
    assert build_speculation(parse_policy("chain-3")).weigh(log_probs) == log_probs


@given(st.floats(-200, 0), st.floats(-3, 3), st.floats(-40, 40))
def test_calibrated_weights_are_finite_and_at_most_zero(log_prob, slope, intercept):
    policy = Speculation(Calibration(slope=slope, intercept=intercept))
    (weight,) = policy.weigh([log_prob])
    assert -1000 < weight <= 0.0


# SpecServe's estimator.


def test_goodput_is_tokens_over_the_time_of_draft_and_target():
    estimate = Goodput(
        StepTime.linear(alpha=1e-6, gamma=1e-5, delta=1e-3),
        StepTime.linear(alpha=2e-6, gamma=1e-4, delta=2e-2),
        host=HostCost(reroot=5e-4),
    )
    seconds = 2e-6 * 900 + 1e-4 * (3 + 5) + 2e-2 + 5e-4  # target: 3 roots and 5 draft tokens
    seconds += sum(1e-6 * (900 + 3 * j) + 1e-5 * 3 + 1e-3 for j in range(2))
    found = estimate(batch=3, context=900, steps=2, draft_tokens=5, accepted=2.5)
    assert found == pytest.approx(5.5 / seconds)


def test_goodput_counts_what_every_further_request_costs_a_step_and_the_re_root():
    alone = StepTime.linear(alpha=0.0, gamma=0.0, delta=1e-3)
    draft, target = replace(alone, each=2e-4), replace(alone, each=3e-4)
    estimate = Goodput(draft, target, host=HostCost(reroot=1e-4, reroot_each=5e-5))
    seconds = 1e-3 + 4 * 3e-4 + 3 * (1e-3 + 4 * 2e-4) + 1e-4 + 4 * 5e-5
    assert estimate.seconds(batch=5, context=0, steps=3, draft_tokens=9) == pytest.approx(seconds)
    assert estimate.seconds(batch=5, context=0, steps=0, draft_tokens=0) == pytest.approx(2.2e-3)
    assert estimate.num_beside(batch=5, context=0, draft_tokens=0) == 1  # 1.8 of 2.2 ms


@given(
    chances=st.lists(st.floats(0.0, 1.0), max_size=12),
    batch=st.integers(1, 16),
    each=st.floats(0.0, 1e-3),
    longest=st.floats(0.01, 0.03) | st.just(math.inf),
)
def test_the_best_choice_is_the_one_with_most_goodput_that_is_not_too_long(
    chances, batch, each, longest
):
    estimate = Goodput(
        replace(StepTime.linear(alpha=1e-7, gamma=1e-5, delta=1e-3), each=each),
        replace(StepTime.linear(alpha=1e-7, gamma=3e-4, delta=1e-2), each=each),
        host=HostCost(reroot=2e-4, reroot_each=each),
    )
    this, traffic = BatchRound(estimate), Traffic(estimate.prompt_seconds, hears_late=True)
    this.begin(batch, 100, traffic=traffic, sharing=(0, 0))
    this.wait_for(this.draft.of(batch, 100))
    chances.sort(reverse=True)
    ask = {"batch": batch, "context": 100, "steps": 1}
    values = [
        estimate(**ask, draft_tokens=n, accepted=sum(chances[:n]))
        if not n or estimate.seconds(**ask, draft_tokens=n) <= longest
        else 0.0
        for n in range(len(chances) + 1)
    ]
    best = this.best([float(batch), *chances], longest).rows
    assert values[best] == pytest.approx(max(values))


@given(
    confidence=st.floats(0.01, 1.0),
    batch=st.integers(1, 32),
    context=st.integers(1, 100_000),
    coefficients=st.tuples(*[st.floats(0.0, 1.0)] * 6),
)
def test_goodput_has_one_maximum_over_the_length(confidence, batch, context, coefficients):
    # SpecServe, section 4.3: rises first, if at all, and then falls for good.
    a_d, g_d, d_d, a_t, g_t, d_t = coefficients
    estimate = Goodput(
        StepTime.linear(alpha=a_d * 1e-6, gamma=g_d * 1e-4, delta=d_d * 1e-2),
        StepTime.linear(alpha=a_t * 1e-6, gamma=g_t * 1e-3, delta=1e-4 + d_t * 1e-1),
    )
    curve = [
        estimate(
            batch=batch,
            context=context,
            steps=s,
            draft_tokens=batch * s,
            accepted=batch * sum(confidence**j for j in range(1, s + 1)),
        )
        for s in range(25)
    ]
    peak = max(range(25), key=curve.__getitem__)
    tolerance = 1e-9 * curve[peak]
    assert all(b >= a - tolerance for a, b in itertools.pairwise(curve[: peak + 1]))
    assert all(b <= a + tolerance for a, b in itertools.pairwise(curve[peak:]))


def test_context_is_the_kv_rows_before_the_forward(monkeypatch):
    asked, priced, of = [], [], RowPrices.of

    class Asked(StepTime):
        def __call__(self, rows: float, context: float = 0.0, requests: float = 1.0) -> float:
            asked.append((rows, context, requests))
            return 0.02

    def noted(self: RowPrices, rows: float, context: int) -> float:
        priced.append((rows, context))
        return of(self, rows, context)

    monkeypatch.setattr(RowPrices, "of", noted)
    step = Asked(0.0, (1,), (0.02,))
    policy = specserve("specserve-1-no-drafter-no-prior", Goodput(step, step))
    trees = new_trees(2, base_len=10)
    draft(policy, trees, [0.9, 0.9])
    # Two roots and two draft tokens behind 2 x 9 rows; the draft runs the two roots. Two prompts,
    # which the draft runs one by one, and such as are expected.
    assert set(priced) == {(2, 18), (4, 18)}
    expected = {(START_PROMPT, 0, 1), (policy.traffic.mean_prompt, 0, 1)}
    assert set(asked) == {(2, 18, 2), (20, 0, 1), (10, 0, 1), *expected}


# SpecServe's drafter.


def test_running_mean_starts_at_the_initial_confidence_and_takes_in_every_token():
    policy, trees = specserve("specserve-2-no-drafter"), new_trees(2)
    assert policy.mean_confidence == INITIAL_CONFIDENCE
    draft(policy, trees, [0.9, 0.5], [0.8, 0.2])
    assert policy.mean_confidence == pytest.approx((INITIAL_CONFIDENCE + 0.9 + 0.5 + 0.8 + 0.2) / 5)


def test_drafter_goes_on_while_sure_and_stops_when_unsure():
    policy, trees = specserve("specserve-8"), new_trees(1)
    assert draft(policy, trees, [0.95]) == 8
    policy, trees = specserve("specserve-8"), new_trees(1)
    # A step costs 2 of 20 ms and more: at chances of 0.95, 0.1 the second brings too little.
    assert draft(policy, trees, [0.95], [0.1], [0.1]) == 2


def test_step_that_did_not_pay_is_the_last_and_is_judged_like_any_other():
    for label, nodes in (("specserve-8-no-prior", [0, 1, 2]), ("specserve-8", [0, 1])):
        policy, trees = specserve(label), new_trees(1)
        assert draft(policy, trees, [0.95], [0.01]) == 2
        assert policy.select(trees) == [nodes]


def test_drafter_does_not_start_when_the_prediction_falls():
    dear = goodput(draft=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.03))
    policy, trees = specserve("specserve-8", dear), new_trees(1)
    assert draft(policy, trees, [0.99]) == 0
    assert policy.select(trees) == [[0]]


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 6),
    delta=st.floats(1e-4, 2e-2),
    gamma=st.floats(0, 3e-3),
)
def test_drafter_with_known_confidence_finds_the_best_length(seed, batch, delta, gamma):
    # With confidences that equal the running mean, predictions are true and the peak is found.
    estimate = goodput(
        draft=StepTime.linear(alpha=0.0, gamma=0.0, delta=delta),
        target=StepTime.linear(alpha=0.0, gamma=gamma, delta=0.02),
    )
    policy, trees = specserve("specserve-9-no-prior", estimate), new_trees(batch)
    c = INITIAL_CONFIDENCE
    done = draft(policy, trees, [c] * batch)
    curve = [
        estimate(
            batch=batch,
            context=9 * batch,
            steps=s,
            draft_tokens=batch * s,
            accepted=batch * sum(c**j for j in range(1, s + 1)),
        )
        for s in range(10)
    ]
    assert curve[done] >= max(curve) * (1 - 1e-9)
    assert policy.select(trees) == [list(range(done + 1))] * batch


def test_requests_at_their_end_take_part_without_a_draft_token():
    policy = specserve("specserve-4")
    trees = [*new_trees(1, max_depth=0), *new_trees(1, max_depth=1), *new_trees(1)]
    draft(policy, trees, [0.95] * 3)
    assert [len(tree) for tree in trees] == [1, 2, 5]
    assert policy.select(trees) == [[0], [0, 1], [0, 1, 2, 3, 4]]
    assert draft(policy, new_trees(2, max_depth=0), [0.9, 0.9]) == 0
    assert draft(policy, [], []) == 0


# SpecServe's verifier.


def with_room(seconds: float, plain: float) -> Progress:
    """Of a request that keeps its target if a round of one token takes so long, then plain ones."""
    expected = START_OUTPUT * (SLO_TPOT - plain) + SLO_TPOT
    return Progress(elapsed=expected - seconds, slo_tpot=SLO_TPOT)


def round_seconds(estimate: Goodput, trees: list[DraftTree], steps: int, count: int) -> float:
    context = sum(tree.base_len - 1 for tree in trees)
    return estimate.seconds(batch=len(trees), context=context, steps=steps, draft_tokens=count)


def set_goodput(estimate: Goodput, trees: list[DraftTree], steps: int, nodes: list) -> float:
    return estimate(
        batch=len(trees),
        context=sum(tree.base_len - 1 for tree in trees),
        steps=steps,
        draft_tokens=len(nodes),
        accepted=sum(math.exp(trees[i].log_weights[node]) for i, node in nodes),
    )


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 3),
    gamma=st.floats(0, 2e-2),
    room=st.sampled_from([None, 0.0205, 0.025, 0.03]),
)
def test_no_other_set_of_drafted_tokens_has_a_larger_goodput(seed, batch, gamma, room):
    rng = random.Random(seed)
    table = StepTime(1e-6, (1, 4, 5, 9), (0.02, 0.02 + gamma, 0.021 + 2 * gamma, 0.03 + 2 * gamma))
    estimate = goodput(target=table)
    policy, trees = specserve("specserve-3-no-drafter", estimate), new_trees(batch)
    plain, longest = table(batch, 9 * batch), math.inf
    progress = [] if room is None else [with_room(room, plain)] * batch
    if room is not None and room >= plain:
        longest = room + INITIAL_CONFIDENCE * plain
    chances = [[rng.uniform(0.05, 1) for _ in trees] for _ in range(3)]
    steps = draft(policy, trees, *chances, progress=progress)
    chosen = policy.select(trees)
    assert all(nodes == list(range(len(nodes))) for nodes in chosen), "not a prefix of its chain"
    found = [(i, node) for i, nodes in enumerate(chosen) for node in nodes[1:]]
    drafted = [(i, node) for i, tree in enumerate(trees) for node in range(1, len(tree))]
    best = max(
        set_goodput(estimate, trees, steps, list(nodes))
        if not nodes or round_seconds(estimate, trees, steps, len(nodes)) <= longest
        else 0.0
        for size in range(len(drafted) + 1)
        for nodes in itertools.combinations(drafted, size)
    )
    assert set_goodput(estimate, trees, steps, found) == pytest.approx(best)


def test_verifier_gives_sure_requests_more_rows_than_unsure_ones():
    flat = goodput(target=StepTime.linear(alpha=0.0, gamma=0.006, delta=0.014))
    policy, trees = specserve("specserve-3-no-drafter", flat), new_trees(2)
    draft(policy, trees, [0.95, 0.2])
    chosen = policy.select(trees)
    assert len(chosen[0]) > len(chosen[1])


def test_verifier_charges_the_forwards_made_in_this_round_only():
    # Two tokens are left over from the last round; there is room for them, which take 32 ms, but
    # for no forward more than is made.
    steep = goodput(target=StepTime.linear(alpha=0.0, gamma=0.006, delta=0.014))
    policy, trees = specserve("specserve-2", steep), new_trees(1)
    for node in (0, 1):
        trees[0].expand([node])
        trees[0].add_children(node, [node], [math.log(0.9)])
    room = with_room(0.0205, 0.02)  # and 12 ms for a token that comes with a chance of 0.6
    assert draft(policy, trees, [0.9], progress=[room]) == 0
    assert policy.select(trees) == [[0, 1, 2]]


def test_chain_cut_by_the_verifier_lives_on_within_its_length():
    policy, trees = specserve("specserve-4-no-drafter"), new_trees(1)
    draft(policy, trees, [0.95])
    trees[0].reroot([0, 0])  # the walk ended in the chain: two tokens are left
    assert len(trees[0]) == 3
    assert draft(policy, trees, [0.95]) == 2
    assert policy.select(trees) == [[0, 1, 2, 3, 4]]


# SpecServe's SLO and its ablations.


@pytest.mark.parametrize("label", ["specserve-5", "specserve-5-no-drafter", "specserve-5-no-prior"])
@given(
    seed=st.integers(0, 2**32),
    rooms=st.lists(st.floats(0.015, 0.05), min_size=1, max_size=4),
    leftover=st.integers(0, 3),
)
def test_no_round_is_so_long_that_plain_ones_could_not_keep_a_target_any_more(
    label, seed, rooms, leftover
):
    rng = random.Random(seed)
    batch = len(rooms)
    policy, plain = specserve(label, goodput(draft=DEAR)), TARGET(batch)
    trees = [new_trees(1, base_len=rng.choice((COLD, COLD + 1)))[0] for _ in rooms]
    longest = math.inf
    for tree, room in zip(trees, rooms, strict=True):
        for node in range(rng.randint(0, leftover)):
            tree.expand([node])
            tree.add_children(node, [node], [math.log(rng.uniform(0.3, 1))])
        more = INITIAL_CONFIDENCE if tree.missing < COLD else 0.0
        longest = min(longest, room + more * plain if room >= plain else math.inf)
    progress = [with_room(room, plain) for room in rooms]
    chances = [[rng.uniform(0.3, 1) for _ in trees] for _ in range(5)]
    steps = draft(policy, trees, *chances, progress=progress)
    rows = sum(len(nodes) for nodes in policy.select(trees))
    assert rows == batch or steps * DEAR(1) + TARGET(rows) <= longest + 1e-9


def test_the_less_room_there_is_the_shorter_the_draft_until_nothing_is_left_to_lose():
    # A round with n tokens takes 20 + 6 n ms; a request that the draft knows expects 0.6 tokens
    # more of it, for which plain rounds would take 12 ms.
    for base_len, expected in ((COLD, [5, 2, 3, 4, 5]), (COLD + 1, [5, 0, 1, 2, 5])):
        lengths = []
        for room in (0.019, 0.0205, 0.027, 0.033, 1.0):
            policy = specserve("specserve-5", goodput(draft=DEAR))
            trees, progress = new_trees(1, base_len=base_len), [with_room(room, 0.02)]
            lengths.append(draft(policy, trees, [0.95], progress=progress))
        assert lengths == expected


def test_a_request_whose_end_is_near_counts_on_no_more_than_that():
    policy, trees = specserve("specserve-5", goodput(draft=DEAR)), new_trees(1)
    policy.traffic.expected_left = lambda emitted: np.zeros(np.shape(emitted))
    progress = [Progress(elapsed=SLO_TPOT - 0.0205, slo_tpot=SLO_TPOT)]
    assert draft(policy, trees, [0.95], progress=progress) == 0


def test_prompts_between_rounds_count_in_what_plain_decoding_takes():
    # Half of the time is prompts': plain rounds take 40 ms, not 20, and miss a target of 30.
    policy, trees = specserve("specserve-5"), new_trees(1, base_len=COLD + 1)
    assert draft(policy, trees, [0.95], progress=[with_room(0.0205, 0.02)]) == 0
    policy, trees = specserve("specserve-5"), new_trees(1, base_len=COLD + 1)
    policy.traffic.observe = lambda *_: setattr(policy.traffic, "share", 0.5)
    assert draft(policy, trees, [0.95], progress=[with_room(0.0205, 0.02)]) == 5


def test_without_slo_awareness_the_target_is_ignored_in_every_decision():
    policy, trees = specserve("specserve-5-no-slo"), new_trees(1)
    assert draft(policy, trees, [0.95], progress=[with_room(0.0205, 0.02)]) == 5
    assert policy.select(trees) == [[0, 1, 2, 3, 4, 5]]


def test_without_the_adaptive_drafter_chains_have_full_length_within_the_target():
    policy, trees = specserve("specserve-5-no-drafter"), new_trees(1)
    assert draft(policy, trees, [0.05]) == 5
    assert len(policy.select(trees)[0]) < 6
    policy, trees = specserve("specserve-5-no-drafter", goodput(draft=DEAR)), new_trees(1)
    assert draft(policy, trees, [0.05], progress=[with_room(0.0205, 0.02)]) == 2


def test_without_the_confidence_prior_all_that_was_drafted_is_verified():
    for label, rows in (("specserve-5-no-drafter", 2), ("specserve-5-no-drafter-no-prior", 6)):
        policy, trees = specserve(label), new_trees(1)
        draft(policy, trees, [0.9], [0.01])
        assert len(policy.select(trees)[0]) == rows


def test_without_anything_specserve_is_a_chain():
    policy = specserve("specserve-3-no-drafter-no-prior-no-slo", goodput(slo_tpot=1e-6))
    trees = new_trees(2)
    assert draft(policy, trees, [0.01, 0.9], progress=[with_room(0.0215, 0.021)] * 2) == 3
    assert policy.select(trees) == [[0, 1, 2, 3]] * 2


# What SpecServe's rounds cost beyond the paper's.


def test_the_run_s_own_target_counts_where_a_request_has_none():
    for slo_tpot, length in ((SLO_TPOT, 0), (1.0, 5)):
        policy = specserve("specserve-5", goodput(slo_tpot=slo_tpot))
        trees = new_trees(1, base_len=COLD + 1)
        progress = replace(with_room(0.0205, 0.02), slo_tpot=None)
        assert draft(policy, trees, [0.95], progress=[progress]) == length


def test_prompts_that_run_after_a_round_make_longer_rounds_pay():
    # A forward of 15 ms beside a step of 20 does not pay by itself.
    dear = goodput(draft=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.015))
    policy, trees = specserve("specserve-5", dear), new_trees(1)
    assert draft(policy, trees, [0.8]) == 0
    policy.traffic.observe = lambda *_: setattr(policy.traffic, "stall", 0.2)
    assert draft(policy, trees, [0.8]) > 1


@pytest.mark.parametrize(
    ("prompt", "answer", "is_read"),
    [(0.05, None, True), (5.0, None, False), (0.05, 2.0, False), (5.0, 3000.0, True)],
)
def test_a_prompt_is_run_by_the_draft_only_if_drafting_saves_more(prompt, answer, is_read):
    # Two thirds of some 96 tokens, 20 ms each, may be saved; half of that with two requests.
    dear = Goodput(DRAFT, TARGET, draft_prompt_seconds=lambda rows: prompt, answer_tokens=answer)
    policy = build_speculation(parse_policy("specserve-5"), goodput=dear)
    read = new_trees(1)[0]
    step(policy, [read], [[0]], [0.9])
    trees = [read, *new_trees(1, base_len=400)]
    draft(policy, trees, [0.9, 0.9])
    chosen = policy.select(trees)
    assert len(chosen[0]) > 1
    assert (len(chosen[1]) > 1) == is_read
    policy.settle()
    assert policy.reads_prompts == is_read
    everyone = build_speculation(parse_policy("specserve-5-no-drafter"), goodput=dear)
    trees = new_trees(1, base_len=400)
    assert draft(everyone, trees, [0.9]) == 5
    everyone.select(trees)
    everyone.settle()
    assert everyone.reads_prompts


def test_requests_that_are_not_drafted_for_have_a_row_too():
    policy, trees = specserve("specserve-5", goodput(target=STAIRS)), new_trees(1)
    assert draft(policy, trees, [0.95]) == 3  # four rows cost as much as one
    policy, trees = specserve("specserve-5", goodput(target=STAIRS)), new_trees(1)
    policy.beside = (2, 100)
    assert draft(policy, trees, [0.95]) == 1
