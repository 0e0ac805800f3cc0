"""Trees that share the rows of the batch: who gets rows, when to draft, when to rest."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codesign.calibration_log import CalibrationLog
from codesign.candidate import Candidate
from codesign.config import Serving, parse_deployment
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.policy import batch_ahead, batch_round, batch_rows
from codesign.policy.batch_ahead import best_forwards, next_forward, with_gains
from codesign.policy.batch_drafting import MARGIN
from codesign.policy.batch_round import Choice
from codesign.policy.batch_rows import best_nodes, gains_of, leaves_worth
from codesign.policy.batch_tree import BatchTree
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.cost import Calibration, StepTime
from codesign.policy.first_look import FirstLook
from codesign.policy.host_cost import HostCost
from codesign.policy.interface import Progress
from codesign.policy.online_calibration import BATCH, OnlineCalibration
from codesign.policy.protocol import RequestVerdict, VerifyRows
from codesign.policy.row_prices import RowPrices
from codesign.policy.speculation import Goodput, build_speculation, parse_policy
from codesign.policy.traffic import REPAID, START_OUTPUT, Traffic
from codesign.policy.tree import DraftTree
from codesign.policy.urgency import MOST_URGENT, urgencies
from codesign.sim import simulate

DRAFT = StepTime.linear(alpha=0.0, gamma=1e-6, delta=0.001)
TARGET = StepTime.linear(alpha=0.0, gamma=1e-5, delta=0.010)
DEAR = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.020)  # no forward pays beside the target


def policy_of(
    label: str = "batch-tree-8x2x4",
    *,
    target: StepTime = TARGET,
    draft: StepTime = DRAFT,
    slo_tpot: float | None = None,
    deciding: float = 0.0,
) -> BatchTree:
    goodput = Goodput(draft, target, slo_tpot=slo_tpot, host=HostCost(deciding=deciding))
    policy = build_speculation(parse_policy(label), goodput=goodput)
    assert isinstance(policy, BatchTree)
    return policy


def trees_of(policy: BatchTree, count: int, *, prompt: int = 5) -> list[BudgetTree]:
    return [policy.tree_type(9, base_len=prompt, max_depth=50) for _ in range(count)]


def play(
    policy: BatchTree,
    trees: Sequence[BudgetTree],
    chances: Sequence[Sequence[float]],
    progress: Sequence[Progress] = (),
) -> tuple[list[list[int]], int]:
    """Draft until the policy stops; the nodes to verify and how many forwards were made."""
    policy.begin(trees, progress or [Progress()] * len(trees))
    done = 0
    while any(leaves := policy.leaves(trees, done)):
        run(trees, leaves, chances)
        done += 1
    return policy.select(trees), done


def run(
    trees: Sequence[BudgetTree], leaves: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
) -> None:
    for tree, nodes, own in zip(trees, leaves, chances, strict=True):
        if nodes:
            tree.expand(nodes)
        for node in nodes:
            tree.add_children(node, range(len(own)), [math.log(chance) for chance in own])


def test_rows_go_to_the_request_whose_tokens_are_likely():
    policy = policy_of(target=StepTime.linear(alpha=0.0, gamma=1e-3, delta=0.010))
    trees = trees_of(policy, 2)
    chosen, _ = play(policy, trees, [[0.3, 0.2], [0.9, 0.05]])
    assert len(chosen[1]) > len(chosen[0])


def drafted_once(policy, firsts):
    """Trees of a round in which their roots were expanded, with these chances of the children."""
    trees = trees_of(policy, len(firsts))
    policy.begin(trees, [Progress()] * len(trees))
    for tree, chances in zip(trees, firsts, strict=True):
        tree.expand([0])
        ordered = sorted(np.array(chances) / max(sum(chances), 1.0), reverse=True)
        tree.add_children(0, range(len(ordered)), np.log(ordered).tolist())
    policy._choice = policy._choose(trees)
    return trees


@given(
    st.lists(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=6), min_size=1, max_size=5),
    st.floats(1e-6, 3e-3),
)
def test_the_chosen_rows_have_the_best_quotient_of_tokens_and_seconds(firsts, gamma):
    target = StepTime.linear(alpha=0.0, gamma=gamma, delta=0.010)
    policy = policy_of("batch-tree-8x4x4", target=target)
    trees = drafted_once(policy, firsts)
    chosen = policy.select(trees)
    ranked = sorted((math.exp(w) for t in trees for w in t.log_weights[1:]), reverse=True)

    def quotient(count: int) -> float:
        batch = len(trees)
        return (batch + sum(ranked[:count])) / target(batch + count)

    taken = sum(map(len, chosen)) - len(trees)
    assert quotient(taken) == pytest.approx(max(map(quotient, range(len(ranked) + 1))), rel=1e-9)
    for tree, nodes in zip(trees, chosen, strict=True):
        assert all(tree.parents[node] in nodes for node in nodes[1:])


STAIRS = StepTime(
    alpha=0.0, rows=(1, 8, 9, 16, 17, 32), seconds=(0.00707, 0.00707, 0.0093, 0.0093, 0.018, 0.018)
)


def test_nodes_that_are_worth_the_same_never_open_another_stair_of_rows():
    policy = policy_of(target=STAIRS)
    trees = trees_of(policy, 6)
    chosen, _ = play(policy, trees, [[0.3, 0.15]] * 6)
    assert sum(map(len, chosen)) == 8


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.sampled_from([1.0, 0.7, 0.5, 0.2, 0.1]), min_size=1, max_size=4),
        min_size=1,
        max_size=7,
    ),
)
def test_no_more_rows_are_verified_than_were_priced_and_none_without_its_parent(firsts):
    policy = policy_of("batch-tree-16x2x8", target=STAIRS)
    trees = trees_of(policy, len(firsts))
    chances = [sorted(own, reverse=True) for own in firsts]
    for _ in range(3):
        chosen, _ = play(policy, trees, chances)
        assert sum(map(len, chosen)) - len(trees) == policy._choice.rows
        for tree, nodes in zip(trees, chosen, strict=True):
            assert all(tree.parents[node] in nodes for node in nodes[1:])
            tree.reroot([0, 0, 9] if len(tree) > 4 else [7])


def test_prompts_in_a_forward_of_their_own_leave_the_stairs_where_they_are():
    goodput = Goodput(DRAFT, STAIRS, prompt_seconds=lambda rows: 0.005, shares_forwards=False)
    policy = build_speculation(parse_policy("batch-tree-8x2x4"), goodput=goodput)
    assert isinstance(policy, BatchTree)
    policy.sharing = (64, 0)
    chosen, forwards = play(policy, trees_of(policy, 6), [[0.3, 0.15]] * 6)
    assert (sum(map(len, chosen)), forwards) == (16, 1)  # the second stair is full, too
    seconds = 0.005 + STAIRS(16) + DRAFT(12, 24)  # each root with a token that it missed
    assert policy._choice.value == pytest.approx(policy._choice.tokens / seconds)


def test_a_stair_that_unlikely_siblings_fill_does_not_end_drafting():
    # As two H200 did: 8 rows of 2 requests were full of siblings after one forward, and the
    # children of the likeliest were priced as rows 9 and 10. SpecServe made 2.9 forwards there.
    draft = StepTime.linear(alpha=0.0, gamma=1e-5, delta=0.0008)
    policy = policy_of("batch-tree-16x2x8", target=STAIRS, draft=draft)
    trees = trees_of(policy, 2)
    chosen, forwards = play(policy, trees, [[0.8, 0.1, 0.05, 0.03]] * 2)
    assert forwards >= 3
    assert sum(map(len, chosen)) == 8
    assert (
        max(tree.depths[node] for tree, nodes in zip(trees, chosen, strict=True) for node in nodes)
        >= 3
    )


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.02, 0.9), min_size=0, max_size=20),
    st.lists(st.floats(0.01, 0.9), min_size=1, max_size=8),
    st.integers(1, 5),
    st.floats(0.0, 3e-4),
)
def test_what_further_forwards_promise_is_the_best_mix_of_old_and_new_nodes(
    nodes, gains, left, gamma
):
    draft = StepTime.linear(alpha=0.0, gamma=gamma, delta=0.0008)
    policy = policy_of("batch-tree-16x2x8", target=STAIRS, draft=draft)
    trees, batch = trees_of(policy, len(gains)), len(gains)
    policy.begin(trees, [Progress()] * batch)
    policy._worth = [float(batch), *sorted(nodes, reverse=True)]
    confidence = [0.6] * batch

    def best(depth: int, drafting: float) -> float:
        new = [gain * 0.6**d for d in range(depth) for gain in gains]
        worth = np.cumsum(sorted(nodes + new, reverse=True))
        values = [
            (batch + tokens) / (drafting + STAIRS(batch + rows))
            for rows, tokens in enumerate(worth, start=1)
        ]
        return max(values, default=0.0)

    found, _ = policy._best_ahead(gains, confidence, left)
    depths = range(1, left + 1)
    most = max(best(depth, depth * draft(batch)) for depth in depths)
    bound = max(best(depth, draft(1) + (depth - 1) * draft(0)) for depth in depths)
    assert found <= bound * (1 + 1e-9)
    without = best(0, draft(batch))  # if that is best, none of the new nodes are worth a row
    assert found >= most * (1 - 1e-9) or most <= without * (1 + 1e-9)
    this, worth, rate = policy._round, policy._worth, policy._choice.rate
    once = next_forward(this, worth, with_gains(worth, gains), gains, rate)
    assert once == pytest.approx(policy._best_ahead(gains, confidence, 1))
    # By arrays the same bits.
    arrays = np.array(worth)
    assert next_forward(this, arrays, with_gains(arrays, gains), gains, rate) == once
    assert policy._best_ahead(gains, confidence, left)[0] == found
    drafting = draft(batch)
    this.wait_for(drafting)
    for longest in (math.inf, drafting + STAIRS(batch + 8)):
        assert this.best(worth, longest) == this.best(np.array(worth), longest)


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("nodes", [[], [0.95, 0.3]])
def test_a_forward_makes_as_many_nodes_as_there_are_cheap_rows(nodes, as_array):
    # 24 of 32 rows are roots; drafted nodes that are left out compete for the others, leaves that
    # do not run do not.
    target = StepTime(alpha=0.0, rows=(1, 32, 33, 64), seconds=(0.009, 0.009, 0.013, 0.013))
    policy = policy_of(target=target, draft=StepTime.linear(alpha=0.0, gamma=4e-5, delta=0.0008))
    policy.begin(trees_of(policy, 24), [Progress()] * 24)
    gains = [0.8 - 0.02 * number for number in range(24)]
    worth = [24.0, *nodes]
    found = np.array(worth) if as_array else worth
    rate = policy._choice.rate
    _, level = next_forward(policy._round, found, with_gains(found, gains), gains, rate)
    kept = sum(node > 0.7 for node in nodes)
    assert sum(gain >= level for gain in gains) == 8 - kept
    assert best_forwards(policy._round, found, gains, gains, 1, rate)[1] == level


BUMPS = replace(STAIRS, seconds=(0.007, 0.008, 0.0078, 0.009, 0.0088, 0.0105), cross=3e-8)


@settings(max_examples=200)
@given(
    st.lists(st.floats(0.02, 0.9), min_size=0, max_size=20),
    st.lists(st.floats(0.01, 0.9), min_size=1, max_size=8),
    st.sampled_from([STAIRS, BUMPS, TARGET]),
    st.sampled_from([DRAFT, BUMPS]),
    st.booleans(),
)
def test_what_cannot_gain_by_one_look_does_not_gain_by_a_closer_one(
    nodes, gains, target, draft, is_first
):
    policy, batch = policy_of(target=target, draft=draft), len(gains)
    policy.begin(trees_of(policy, batch), [Progress()] * batch)
    this, worth = policy._round, [float(batch), *sorted(nodes, reverse=True)]
    if not is_first:
        this.wait_for(draft(batch))
    choice = this.best(worth)
    value, _ = next_forward(this, worth, with_gains(worth, gains), gains, choice.rate)
    found = this.cannot_gain(len(nodes), gains, choice.value)
    assert not found or value <= choice.value
    assert this.cannot_gain(len(nodes), [1e-6] * batch, choice.value), "where it is plain"


@pytest.mark.parametrize("label", ["batch-tree-16x2x8", "async-batch-tree-16x2x4"])
@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 6), seed=st.integers(0, 2**32), waiting=st.integers(0, 2))
def test_every_decision_is_the_same_by_lists_and_by_arrays(label, batch, seed, waiting):
    decided = []
    for few in (0, 8, 1000):
        with ExitStack() as patches:
            for module in (batch_rows, batch_ahead, batch_round):
                patches.enter_context(mock.patch.object(module, "FEW", few))
            decided.append(decisions(label, batch, seed, waiting, settles=1))
    assert decided[0] == decided[1] == decided[2]


@pytest.mark.parametrize("label", ["batch-tree-16x2x8", "async-batch-tree-16x2x4"])
@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 40), seed=st.integers(0, 2**32), waiting=st.integers(0, 2))
def test_no_decision_depends_on_what_is_settled_while_a_forward_runs(label, batch, seed, waiting):
    never, once, often = (decisions(label, batch, seed, waiting, settles=n) for n in (0, 1, 3))
    assert never == once == often


def decisions(
    label: str, batch: int, seed: int, waiting: int, *, settles: int = 0
) -> list[list[list[int]]]:
    """What is drafted and verified in rounds of requests that come, go, and differ.

    Args:
        settles: How often the policy is told that a forward runs, while it does.
    """
    draws = np.random.default_rng(seed)
    policy = policy_of(label, target=STAIRS, slo_tpot=0.02, deciding=5e-5)
    trees, found = trees_of(policy, batch), []
    for number in range(12):
        if draws.random() < 0.2:
            trees[int(draws.integers(batch))] = trees_of(policy, 1, prompt=40)[0]
        policy.now = 0.02 * number
        policy.sharing = (32, waiting) if waiting and number % 3 == 0 else (0, 0)
        policy.begin(trees, [Progress(elapsed=draws.random() / 10, tokens=number)] * batch)
        done = 0
        while any(leaves := policy.leaves(trees, done)):
            found.append(leaves)
            for _ in range(settles):
                policy.settle()
            run(trees, leaves, random_chances(draws, batch))
            done += 1
        found.append(policy.select(trees))
        for _ in range(settles):
            policy.settle()
        while policy.overlap and any(leaves := policy.overlap_leaves(trees)):
            found.append(leaves)
            run(trees, leaves, random_chances(draws, batch))
        policy.settle()  # as before each verdict is taken in
        for tree in trees:
            tree.reroot([0, 99] if tree.child(0, 0) is not None and draws.random() < 0.6 else [99])
    return found


def random_chances(draws: np.random.Generator, batch: int) -> list[list[float]]:
    """Of each request, descending."""
    return np.sort(draws.dirichlet([2.0, 0.7, 0.5, 0.5], batch))[:, ::-1].clip(1e-6).tolist()


def test_a_sibling_that_learning_has_made_likelier_takes_the_row_alone():
    policy = policy_of(target=StepTime.linear(alpha=0.0, gamma=1e-3, delta=0.010))
    trees = drafted_once(policy, [[0.6, 0.3]])
    trees[0].log_weights[1:] = [math.log(0.05), math.log(0.8)]
    trees[0].open = [(math.log(0.8), 2), (math.log(0.05), 1)]
    policy._choice = policy._choose(trees)
    assert policy.select(trees) == [[0, 2]]


def test_a_root_is_verified_even_where_tokens_of_an_urgent_request_weigh_more():
    trees = drafted_once(policy_of(), [[0.9], [0.9]])
    choice = Choice(value=1.0, rate=1.0, tokens=4.8, rows=1, level=1.8)
    assert best_nodes(trees, choice, 8, np.array([2.0, 1.0])) == [[0, 1], [0]]


def paying(
    prompt: StepTime | Callable[[float], float], rows: list[int], saved: float
) -> list[bool]:
    """Which of these prompts are worth running, where drafting saves so much on each."""
    goodput = Goodput(DRAFT, TARGET, draft_prompt_seconds=prompt)
    return goodput.paying_prompts(rows, np.full(len(rows), saved)).tolist()


def test_prompts_that_share_a_forward_pay_once_for_what_it_takes_without_rows():
    shared = StepTime.linear(alpha=0.0, gamma=1e-5, delta=0.010)
    apart = replace(shared, apart=True)
    for prompt in (shared, apart, apart.__call__):
        assert paying(prompt, [100], 0.0105) == [False]
        assert paying(prompt, [100], 0.0115) == [True]
    for count in (2, 6, 7, 20):  # 1 ms each, and 10 ms once or each
        assert paying(shared, [100] * count, 0.0026) == [count > 6] * count
        assert paying(apart, [100] * count, 0.0026) == [False] * count
    assert paying(shared, [100, 5000, 100], 0.0070) == [True, False, True]  # 50 ms for one alone
    assert paying(shared, [100, 5000, 5000], 0.0070) == [False] * 3


@given(st.lists(st.integers(1, 600), min_size=1, max_size=6), st.floats(0.0, 0.02))
def test_no_other_prompts_save_more_than_those_that_are_run(rows, saved):
    prompt = StepTime.linear(alpha=0.0, gamma=2e-5, delta=0.010)

    def gain(which: Sequence[bool]) -> float:
        run = [(count, 0) for count, pays in zip(rows, which, strict=True) if pays]
        return saved * len(run) - prompt.of_prompts(run) if run else 0.0

    best = max(map(gain, itertools.product((False, True), repeat=len(rows))))
    assert gain(paying(prompt, rows, saved)) == pytest.approx(best, abs=1e-9)


def test_it_decodes_plainly_where_rows_are_dear_and_returns_only_for_a_margin():
    drafting = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.0059)
    policy = policy_of("batch-tree-2x1x1", draft=drafting)
    trees = trees_of(policy, 1)
    gain = (1 + trees[0].confidence) / (0.010 + 0.0059 + 2e-5) * (0.010 + 1e-5)
    assert 1.0 < gain < 1.0 + MARGIN  # at 0.6, as all requests begin
    chosen, forwards = play(policy, trees, [[0.9]])
    assert (chosen, forwards) == ([[0]], 0)
    assert policy.rests
    policy._was_plain = False  # had it been drafting, it would go on
    _, forwards = play(policy, trees, [[0.9]])
    assert forwards == 1
    assert not policy.rests


def test_a_batch_that_drafts_never_rests():
    policy = policy_of(deciding=9e-3)
    trees = trees_of(policy, 2)
    for _ in range(5):
        assert not policy.stays_at_rest()
        assert play(policy, trees, [[0.9]] * 2)[1]
        for tree in trees:
            tree.reroot((9,))


def test_a_request_behind_its_target_gets_rows_first_unless_it_is_lost():
    target = StepTime.linear(alpha=0.0, gamma=1e-3, delta=0.010)
    fair, late, lost = Progress(0.1, 10), Progress(0.6, 10), Progress(9.0, 10)
    rows = {}
    for name, other in (("fair", fair), ("late", late), ("lost", lost)):
        policy = policy_of(target=target, slo_tpot=0.05)
        chosen, _ = play(policy, trees_of(policy, 2), [[0.7, 0.2]] * 2, [fair, other])
        rows[name] = [len(nodes) for nodes in chosen]
    assert rows["fair"] == rows["lost"]
    assert rows["late"][1] > rows["fair"][1]
    assert rows["late"][0] <= rows["fair"][0]
    assert urgencies([Progress(0.8, 10)], target(1), 0.05)[0] == MOST_URGENT


def test_urgency_is_that_of_this_round_s_batch_whatever_was_there_before():
    urgency = []
    for before in (1, 40):
        policy = build_speculation(
            parse_policy("batch-tree-8x2x4"),
            goodput=Goodput(DRAFT, replace(TARGET, each=0.001), slo_tpot=0.05),
        )
        for count in (before, 2):
            policy.begin(trees_of(policy, count), [Progress(0.55, 10)] * count)
        urgency.append(policy._urgency.weights.tolist())
    assert urgency[0] == urgency[1]
    assert 1.0 < urgency[0][0] < MOST_URGENT


@pytest.mark.parametrize("label", ["batch-tree-8x2x4", "async-batch-tree-8x2x4"])
def test_prompts_that_wait_stall_a_round_as_long_as_the_fit_s_prompts_take(label):
    # 200 rows at once cost a sixth of what a decoding step of as many rows would take.
    goodput = Goodput(DRAFT, TARGET, prompt_seconds=lambda rows: 1e-5 * rows)
    policy = build_speculation(parse_policy(label), goodput=goodput)
    assert isinstance(policy, BatchTree)
    for second in range(1, 50):
        policy.now, policy.sharing = 0.01 * second, (0, 3)
        policy.begin(trees_of(policy, 2, prompt=100), [Progress()] * 2)
    assert policy.traffic.share == pytest.approx(49 * 2e-3 / (5.0 + 0.49), rel=0.1)
    rows = 3 * policy.traffic.mean_prompt if label.startswith("batch") else 200
    assert policy.traffic.stall == pytest.approx(policy.traffic.share**3 * 1e-5 * rows)


def test_a_re_root_that_grows_with_the_batch_ends_drafting_where_it_costs_more_than_it_brings():
    drafted = {}
    for each in (0.0, 0.01):  # beside a step of 10 ms: 70 for a batch of 8
        goodput = Goodput(DRAFT, TARGET, host=HostCost(reroot_each=each))
        policy = build_speculation(parse_policy("batch-tree-8x2x4"), goodput=goodput)
        for batch in (1, 8):
            _, drafted[each, batch] = play(policy, trees_of(policy, batch), [[0.9, 0.05]] * batch)
    assert drafted[0.0, 1] == drafted[0.01, 1] > 0
    assert drafted[0.0, 8] > 0
    assert drafted[0.01, 8] == 0


@pytest.mark.parametrize("hears_late", [True, False])
def test_prompts_that_wait_stall_a_busy_machine_and_those_that_share_forwards_never_do(hears_late):
    policy = policy_of()
    busy, idle, shared = (Traffic(lambda rows: 1e-3 * rows, hears_late=hears_late) for _ in "123")
    for second in range(20):
        trees = trees_of(policy, 2, prompt=450)  # 0.9 of every second
        busy.observe(trees, float(second), (0, 2))
        idle.observe(trees[:1] if second == 19 else [], float(second), (0, 2))
        shared.observe(trees, float(second), (64, 2))
    assert busy.share > 0.8
    waiting = 2 * busy.mean_prompt * 1e-3 if hears_late else 0.9
    assert busy.stall == pytest.approx(busy.share**3 * waiting)
    assert 0.0 < idle.stall < 0.3 * busy.stall
    assert shared.stall == 0.0


def reads(policy: BatchTree, count: int = 1, *, prompt: int = 200, stall: float = 0.0) -> int:
    """For how many of so many new requests the draft reads the prompt in the first round."""
    policy.now += 1e6  # what drafting saved before is long ago
    policy.traffic.stall = stall
    policy.traffic.observe = lambda *_: None  # type: ignore[method-assign]
    policy.begin(trees := trees_of(policy, count, prompt=prompt), [Progress()] * count)
    return sum(map(bool, policy.leaves(trees, 0)))


def test_a_prompt_is_read_once_what_drafting_saves_is_more_than_it_costs():
    # Up to 4 tokens for a target's step and 4 of the draft save 4 ms a token; 96 are expected.
    for seconds, count in ((0.1, 1), (0.5, 0)):
        prompts = Goodput(DRAFT, TARGET, draft_prompt_seconds=lambda rows, s=seconds: s)
        policy = build_speculation(parse_policy("batch-tree-8x2x4"), goodput=prompts)
        assert isinstance(policy, BatchTree)
        assert reads(policy) == count
        assert reads(policy, 8) == 0  # eight prompts for steps that are shared by eight
        assert reads(policy, stall=1.0) == 1  # of fewer rounds fewer are stalled


@pytest.mark.parametrize(
    ("answer", "seconds", "count"), [(10.0, 0.1, 0), (None, 0.1, 1), (300.0, 0.5, 1)]
)
def test_a_prompt_is_read_if_answers_are_as_long_as_the_plan_expects(answer, seconds, count):
    prompts = Goodput(
        DRAFT, TARGET, draft_prompt_seconds=lambda rows: seconds, answer_tokens=answer
    )
    policy = build_speculation(parse_policy("batch-tree-8x2x4"), goodput=prompts)
    assert isinstance(policy, BatchTree)
    assert reads(policy) == count


def test_drafting_does_not_begin_for_those_few_whose_prompt_is_read_already():
    target = StepTime(alpha=0.0, rows=(1, 4, 5, 16), seconds=(0.010, 0.010, 0.0145, 0.0145))
    prompts = Goodput(DRAFT, target, draft_prompt_seconds=lambda rows: 9.0)
    policy = build_speculation(parse_policy("batch-tree-8x1x4"), goodput=prompts)
    trees = trees_of(policy, 4, prompt=200)
    run(trees[:1], [[0]], [[0.9]])
    trees[0].reroot([5])
    _, forwards = play(policy, trees, [[0.6]] * 4)
    assert forwards == 0
    for tree in trees[1:]:
        run([tree], [[0]], [[0.9]])
        tree.reroot([5])
    _, forwards = play(policy, trees, [[0.6]] * 4)
    assert forwards > 0


def test_a_newcomer_s_prompt_counts_what_it_adds_to_drafting_for_most_others():
    # By shares it saves 47 ms, beside three that are drafted for 122 ms; its prompt takes 60.
    target = StepTime(alpha=0.0, rows=(1, 4, 5, 16), seconds=(0.010, 0.010, 0.0145, 0.0145))
    prompts = Goodput(DRAFT, target, draft_prompt_seconds=lambda rows: 1e-4 * rows)

    def is_read(others: int, warm: int = 3) -> bool:
        policy = build_speculation(parse_policy("batch-tree-8x1x4"), goodput=prompts)
        assert isinstance(policy, BatchTree)
        trees = trees_of(policy, 3, prompt=others)
        for tree in trees[:warm]:
            run([tree], [[0]], [[0.6]])
            tree.reroot([5])
        trees += trees_of(policy, 1, prompt=600)
        policy.begin(trees, [Progress()] * 4)
        return bool(policy.leaves(trees, 0)[3])

    assert is_read(200)
    assert not is_read(200, warm=2)  # half of them is not most
    assert not is_read(600)  # if all prompts are as long, drafting on and on does not pay


def test_an_average_prompt_need_not_repay_all_that_it_takes_while_others_are_drafted_for():
    policy = policy_of()
    traffic = Traffic(lambda rows: 0.0, lambda rows: 1e-3 * rows, hears_late=True)
    trees = [*trees_of(policy, 1, prompt=100), *trees_of(policy, 1, prompt=300)]
    traffic.observe(trees, 0.0, (0, 0))
    assert traffic.draft_prompt == pytest.approx(0.2)

    def repays(seconds: float) -> list[bool]:
        saved = seconds / START_OUTPUT
        return [traffic.repays_prompts(saved, is_drafting=drafting) for drafting in (False, True)]

    assert repays(1.05 * 0.2) == [True, True]
    assert repays(1.05 * REPAID * 0.2) == [False, True]
    assert repays(0.95 * REPAID * 0.2) == [False, False]


def test_what_a_request_still_emits_is_told_by_those_that_were_longer():
    policy = policy_of()
    traffic = Traffic(lambda rows: 0.0, hears_late=True)
    trees = trees_of(policy, 41)
    traffic.observe(trees, 0.0, (0, 0))
    for tree, length in zip(trees, [10] * 20 + [100] * 20, strict=False):
        tree.base_len += length
    traffic.observe(trees[-1:], 1.0, (0, 0))
    assert traffic.expected_left(trees[-1].emitted) == pytest.approx(55.0, abs=2.5)
    trees[-1].base_len += 50
    assert traffic.expected_left(trees[-1].emitted) == pytest.approx(50.0, abs=2.5)
    trees[-1].base_len += 50
    assert traffic.expected_left(trees[-1].emitted) == START_OUTPUT  # nobody was as long


def test_at_first_the_short_answers_that_finish_do_not_stand_for_those_that_go_on():
    policy = policy_of()
    traffic = Traffic(lambda rows: 0.0, hears_late=True)
    trees = trees_of(policy, 4)
    traffic.observe(trees, 0.0, (0, 0))
    for tree, length in zip(trees, [10, 50, 50, 50], strict=True):
        tree.base_len += length
    traffic.observe(trees[1:], 1.0, (0, 0))
    lengths = [10, *[50 + START_OUTPUT] * 3]  # nobody was longer than 50
    assert traffic.left_at_first == pytest.approx((START_OUTPUT + sum(lengths)) / 5)


@pytest.mark.parametrize("rate", [3.0, 12.0])
def test_where_a_prompt_of_the_draft_costs_many_plain_steps_nothing_is_lost(rate):
    name = "h200-llama-3.1-8b-int4+llama-3.2-1b-int4"
    fit = Fit.load(DEFAULT_FIT.parents[1] / name / "fit.json")
    dear = StepTime.linear(alpha=0.0, gamma=1e-5, delta=4 * fit.costs["2"].target(1))
    # Its looks, 0.06 ms in each round of 1.5, are lost whatever a prompt costs, and what ranks gain
    # that do not wait for them: looks that take no time are made in each round.
    asked = replace(fit.costs["2"].target, ahead=0.0, ahead_each=0.0)
    cost = replace(fit.costs["2"], draft_prefill=dear, deciding=0.0, deciding_each=0.0)
    cost = replace(cost, target=asked)
    fit = replace(fit, costs={"2": cost})
    arrivals = np.random.default_rng(1).exponential(1.0 / rate, 60).cumsum()
    requests = pd.DataFrame(
        {"arrival": arrivals, "prompt_tokens": 200, "output_tokens": [30, 120] * 30}
    )
    latency = {}
    for label in ("plain", "batch-tree-16x2x8"):
        candidate = Candidate(parse_deployment("2"), parse_policy(label), 8)
        run = simulate(requests, candidate, fit, serving=Serving(max_kv_tokens=1 << 16), seed=1)
        latency[label] = np.mean([r.finish - r.arrival for r in run.requests])
    assert latency["batch-tree-16x2x8"] < 1.02 * latency["plain"]


@pytest.mark.parametrize("label", ["batch-tree-16x2x8 on 2", "async-batch-tree-16x2x8 on 1+1"])
def test_every_look_of_a_batch_s_policy_is_charged_where_the_target_waits_for_it(label):
    policy, deployment = label.split(" on ")
    fit = Fit.load(DEFAULT_FIT)
    requests = pd.DataFrame({"arrival": [0.0] * 3, "prompt_tokens": 20, "output_tokens": 30})
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), 4)
    drafts = []
    for first, each in ((0.0, 0.0), (1e-5, 1e-6)):  # too little to decide otherwise
        cost = replace(fit.costs[deployment], deciding=first, deciding_each=each)
        known = replace(fit, costs={deployment: cost})
        run = simulate(requests, candidate, known, serving=Serving(max_kv_tokens=4096), seed=1)
        drafts.append(run.rounds)
    free, charged = drafts
    looks = charged.column("num_expansions") + 1.0
    longest = looks * (1e-5 + 1e-6 * charged.column("batch"))
    added = charged.column("seconds").sum() - free.column("seconds").sum()
    assert (charged.column("num_expansions") == free.column("num_expansions")).all()
    if "+" in deployment:  # those beside the verification are hidden, as far as it lasts
        assert 1e-5 * len(looks) <= added < longest.sum()
    else:
        grown = charged.column("draft") - free.column("draft")
        assert grown == pytest.approx(longest)


def test_a_batch_waits_for_its_requests_that_missed_only_if_they_are_many():
    waits = {}
    for missed in (1, 5):
        policy = policy_of("async-batch-tree-8x2x4")
        trees = trees_of(policy, 8, prompt=5)
        for tree in trees[missed:]:  # these have drafted, and are sure
            run([tree], [[0]], [[0.97]])
            run([tree], [[1]], [[0.97]])
            tree.confidence = 0.6
            tree.open.clear()
        policy.begin(trees, [Progress()] * 8)
        waits[missed] = any(policy.leaves(trees, 0))
    assert waits == {1: False, 5: True}


def test_forwards_beside_the_verification_end_where_it_ends():
    for seconds, most in ((0.0021, 5), (0.0051, 2), (0.02, 1)):
        drafting = StepTime.linear(alpha=0.0, gamma=0.0, delta=seconds)
        policy = policy_of("async-batch-tree-8x2x8", draft=drafting)
        trees = trees_of(policy, 4)
        play(policy, trees, [[0.8, 0.1]] * 4)
        made = 0
        for _ in range(policy.overlap):
            if any(leaves := policy.overlap_leaves(trees)):
                run(trees, leaves, [[0.8, 0.1]] * 4)
                made += 1
        assert made <= most
        assert made * seconds > 0.010 - 2 * seconds or made == most


@given(
    st.lists(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=5), min_size=1, max_size=6),
    st.floats(1e-6, 2e-3),
    st.integers(1, 4),
)
def test_leaves_beside_the_verification_are_those_whose_children_are_worth_a_row(
    firsts, row, width
):
    draft = StepTime.linear(alpha=0.0, gamma=row, delta=0.0)
    policy = policy_of(f"async-batch-tree-8x{width}x8", draft=draft)
    trees = drafted_once(policy, firsts)
    policy.select(trees)
    level = row * policy._choice.rate
    wanted = [
        [n for weight, n in t.open[:width] if math.exp(min(weight, 0.0)) * t.confidence >= level]
        for t in trees
    ]
    found = policy.overlap_leaves(trees)
    assert found == wanted or not any(found)  # or it is late
    assert any(found) == (any(wanted) and policy.drafting_beside.may_draft)


@pytest.mark.parametrize("apart", [False, True])
def test_prompts_beside_the_verification_are_late_together_only_where_each_has_a_forward(apart):
    # Late by 140 ms for one or both, by 290 for two forwards: 200 ms would yield as many tokens.
    prompt = StepTime.linear(alpha=0.0, gamma=1e-6, delta=0.150)
    goodput = Goodput(DRAFT, TARGET, draft_prompt_seconds=replace(prompt, apart=apart))
    policy = build_speculation(parse_policy("async-batch-tree-8x2x8"), goodput=goodput)
    assert isinstance(policy, BatchTree)
    trees = trees_of(policy, 2, prompt=200)
    for tree in trees:
        tree.reroot([5])
    play(policy, trees, [[0.8, 0.1]] * 2)
    policy.drafting_beside.may_draft = True
    assert sum(map(bool, policy.overlap_leaves(trees))) == (1 if apart else 2)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 200), max_size=300), st.integers(0, 220))
def test_lengths_are_ranked_as_requests_finish_the_last_ones_alone(lengths, emitted):
    policy = policy_of()
    traffic = Traffic(lambda rows: 0.0, hears_late=True)
    waiting = trees_of(policy, 1)[0]
    for length in lengths:
        tree = trees_of(policy, 1)[0]
        traffic.observe([waiting, tree], 0.0, (0, 0))
        tree.base_len += length
        traffic.observe([waiting], 0.0, (0, 0))
    waiting.base_len += emitted
    known: list[float] = lengths[-128:]
    if 0 < len(known) < 128:  # the one that waits counts with what the others say of it
        known = [*known, (START_OUTPUT + sum(known)) / (1 + len(known))]
    left = [length - emitted for length in known if length > emitted]
    expected = (START_OUTPUT + sum(left)) / (1 + len(left))
    assert traffic.expected_left(waiting.emitted) == pytest.approx(expected)


def test_requests_beside_the_batch_make_rows_dearer():
    target = StepTime(alpha=0.0, rows=(1, 16, 17, 32), seconds=(0.010, 0.010, 0.040, 0.041))
    rows = {}
    for beside in ((0, 0), (12, 900)):
        policy = policy_of(target=target)
        policy.beside = beside
        chosen, _ = play(policy, trees_of(policy, 2), [[0.8, 0.1]] * 2)
        rows[beside[0]] = sum(map(len, chosen))
    assert rows[0] > rows[12]


# Trees.


@settings(max_examples=30)
@given(st.data())
def test_the_open_nodes_are_those_that_a_search_finds(data):
    tree = BudgetTree(1, base_len=4, max_depth=6, calibration=OnlineCalibration())
    for _ in range(data.draw(st.integers(1, 6))):
        found = tree.leaves(data.draw(st.integers(1, 3)))
        by_weight = DraftTree.leaves(tree, len(tree))
        weights = tree.log_weights
        assert [weights[n] for n in found] == [weights[n] for n in by_weight[: len(found)]]
        if found:
            tree.expand(found)
            for node in found:
                chances = data.draw(st.lists(st.floats(0.01, 0.4), min_size=1, max_size=3))
                tree.add_children(
                    node, range(len(chances)), sorted(map(math.log, chances), reverse=True)
                )
        if data.draw(st.booleans()):
            tree.reroot(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=2)))
        assert {n for _, n in tree.open} == set(DraftTree.leaves(tree, len(tree)))
        rest = set(range(len(tree))) - {n for _, n in tree.open}
        assert sorted(tree.closed) == sorted(rest)
        places = {n: place for place, n in enumerate(tree.closed)}
        parents = [places.get(tree.parents[n], -1) for n in tree.closed]
        assert all(above < place for place, above in enumerate(parents))
        assert tree.missing <= tree.base_len - 1


def test_what_was_judged_moves_the_chances_towards_what_was_accepted():
    calibration = OnlineCalibration(Calibration(1.0, 0.0))
    generator = np.random.default_rng(3)
    before = calibration.log_chances([math.log(0.6), math.log(0.2)], -20.0)
    for _ in range(12 * BATCH):
        said = float(generator.uniform(0.2, 0.8))
        first, sibling = calibration.log_chances([math.log(said), math.log(0.2)], -20.0)
        is_taken = bool(generator.random() < 0.5 * said)  # half as often as the draft says
        calibration.learn([(first, True, is_taken), (sibling, False, generator.random() < 0.2)])
    after = calibration.log_chances([math.log(0.6), math.log(0.2)], -20.0)
    assert math.exp(before[0]) == pytest.approx(0.6, abs=0.01)
    assert math.exp(after[0]) == pytest.approx(0.3, abs=0.04)
    assert math.exp(after[1]) == pytest.approx(0.2, abs=0.03)


def test_chances_are_learned_where_the_fit_found_that_confidences_say_nothing():
    calibration = OnlineCalibration(Calibration(0.0, 1.0))
    generator = np.random.default_rng(4)
    for _ in range(12 * BATCH):
        said = float(generator.uniform(0.2, 0.8))
        (chance,) = calibration.log_chances([math.log(said)], -20.0)
        calibration.learn([(chance, True, generator.random() < 0.4)])
    (after,) = calibration.log_chances([math.log(0.5)], -20.0)
    assert math.exp(after) == pytest.approx(0.4, abs=0.05)


def test_a_tree_tells_what_was_accepted_and_what_was_not():
    calibration = OnlineCalibration()
    seen = []
    calibration.learn = seen.extend  # type: ignore[method-assign]
    tree = BudgetTree(9, base_len=3, max_depth=20, calibration=calibration)
    run([tree], [[0]], [[0.6, 0.3]])
    run([tree], [[1]], [[0.8, 0.1]])
    tree.sent = [0, 1, 2, 3]
    tree.reroot([0, 5])
    assert not seen  # nobody waits for it
    calibration.settle()
    judged = [(round(math.exp(chance), 1), *told) for chance, *told in seen]
    assert judged == [(0.6, True, True), (0.3, False, False), (0.8, True, False)]
    run([tree], [[0]], [[0.6, 0.3]])
    tree.sent = [0, 1, 2]
    tree.reroot([5])
    run([tree], [[0]], [[0.6, 0.3]])  # by what was learned before
    assert len(seen) == 5


# What a run reports.


def test_calibration_errors_are_counted_by_category_and_for_judged_tokens_alone():
    log = CalibrationLog()
    rows = VerifyRows(1, (7, 1, 2, 3), (-1, 0, 0, 1), (4, 5, 5, 6), 4, (1.0, 0.75, 0.25, 0.5))
    for _ in range(3):
        log.add("chat", rows, RequestVerdict(1, 5, (1, 3, 8)))
    log.add("chat", rows, RequestVerdict(1, 5, (2, 9)))
    # 0.75: three of four. 0.25: one of four. 0.5 was judged three times, always right.
    assert log.errors() == {"all": pytest.approx(1.5 / 11), "chat": pytest.approx(1.5 / 11)}
    log.add("code", rows, RequestVerdict(1, 5, (4,)))
    assert log.errors()["code"] == pytest.approx((0.75 + 0.25) / 2)
    log.add("none", VerifyRows(1, (7,), (-1,), (4,), 4), RequestVerdict(1, 5, (4,)))
    assert "none" not in log.errors()


def test_the_controller_takes_less_than_two_percent_of_a_round_on_this_cpu():
    cost = Fit.load(DEFAULT_FIT).costs["2"]
    for batch in (1, 8):
        goodput = Goodput.of_cost(cost, slo_tpot=0.1)
        policy = build_speculation(parse_policy("batch-tree-16x4x8"), goodput=goodput)
        shares = []
        for _ in range(12):
            trees = trees_of(policy, batch, prompt=9)
            progress = [Progress(0.2, 3)] * batch
            spent = -time.thread_time()
            policy.begin(trees, progress)
            done, round_seconds = 0, 0.0
            while any(leaves := policy.leaves(trees, done)):
                spent += time.thread_time()
                run(trees, leaves, [[0.7, 0.15]] * batch)
                round_seconds += cost.draft(sum(map(len, leaves)), 100 * batch)
                spent -= time.thread_time()
                done += 1
            rows = sum(map(len, policy.select(trees)))
            spent += time.thread_time()
            shares.append(spent / (round_seconds + cost.target(rows, 100 * batch)))
        assert done
        assert min(shares) < 0.02


@given(
    st.integers(1, 40), st.integers(0, 10_000), st.floats(0.0, 1e-4), st.lists(st.integers(0, 300))
)
def test_the_price_of_one_number_of_rows_is_that_in_the_list_to_the_last_digit(
    batch, context, each, counts
):
    step = replace(BUMPS, alpha=1e-8, cross=3e-10, each=1e-5, tile=4)
    prices = RowPrices(step, each)
    for other in (batch + 1, batch):  # what is known of another batch stays there
        prices.begin(other, context, other, 1e-4)
        for count in counts:
            assert prices.at(count) == prices(count)[count] == prices(count)[-1]
            assert prices.listed(count)[: count + 1] == prices(count).tolist()
            assert prices.of(other + count, context) == prices.at(count)
            seconds = step(other + count, context, other) + 1e-4 + each * count
            assert prices.at(count) == pytest.approx(seconds)
            assert prices.of(other + count + 0.0, context) == pytest.approx(seconds)
        few = prices(60)
        assert np.diff(few).min() >= prices.rise - 1e-12
        assert (np.maximum.accumulate(few) - few).max() <= prices.fall + 1e-12


@given(st.lists(st.sampled_from([0.2, 0.5, 0.9]), min_size=1, max_size=6), st.floats(0.1, 1.0))
def test_of_roots_alone_the_same_pay_as_where_each_tree_is_searched(gains, share):
    trees = trees_of(policy_of(), len(gains))
    level = share * max(gains)
    found = [leaves_worth(trees, 2, gains, level, are_roots=roots) for roots in (True, False)]
    assert found[0] == found[1]
    assert any(found[0])
    trees[0].max_depth = 0
    trees[0]._reset(9)
    assert FirstLook(trees).gains() == gains_of(trees)
