"""What a policy takes a round to last is what the simulator makes it last, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from codesign.policy.batch_drafting import MARGIN
from codesign.policy.batch_round import BatchRound
from codesign.policy.batch_rows import prospects
from codesign.policy.batch_tree import BatchTree
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.host_cost import Drafting
from codesign.policy.interface import Progress
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.policy.traffic import Traffic
from codesign.policy.tree import DraftTree
from codesign.sim.timing import timing_of
from codesign.sim.work import Work

STEP = StepTime.linear(alpha=0.0, gamma=0.0, delta=1e-2)
HOST = ("reroot_row", "reroot_node", "choice_row", "choice_alone")
FANOUT = 4
LABELS = ("batch-tree-8x1x4", "async-batch-tree-8x1x4", "specserve-4", "turbospec-4")

seconds = st.floats(0.0, 1e-3)
few = st.floats(0.0, 1e-5)
corrections = st.builds(
    StepTime, few, st.just((1, 8, 16)), st.tuples(*[st.floats(-1e-4, 1e-3)] * 3)
)
steps = st.builds(
    StepTime,
    st.floats(0.0, 1e-6),
    st.just((1, 8, 16, 32)),
    st.tuples(*[st.floats(1e-3, 1e-2)] * 4),
    cross=st.floats(0.0, 1e-8),
    each=seconds,
    tile=st.sampled_from([0, 4, 8]),
    alone=st.none() | corrections,
)
hosts = st.fixed_dictionaries(
    {
        **dict.fromkeys(("reroot", "reroot_each", "choice", "choice_each", "deciding"), seconds),
        **dict.fromkeys(("deciding_each", "reroot_row", "reroot_node", "child", "choice_row"), few),
        "choice_alone": seconds,
    }
)


def costs(target: StepTime, draft: StepTime, host: Any, link: float) -> RoundCost:
    return RoundCost(target, draft, STEP, STEP, link=link, **host)


@given(
    target=steps,
    draft=steps,
    host=hosts,
    link=seconds,
    batch=st.integers(1, 12),
    context=st.integers(0, 10_000),
    forwards=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    nodes=st.integers(0, 60),
    is_apart=st.booleans(),
)
def test_a_batch_s_round_is_priced_as_it_is_simulated(
    target, draft, host, link, batch, context, forwards, nodes, is_apart
):
    cost = costs(target, draft, host, link if is_apart else 0.0)
    this = BatchRound(Goodput.of_cost(cost).drafting(Drafting(FANOUT)))
    this.begin(batch, context, traffic=Traffic(STEP, hears_late=True), sharing=(0, 0), looking=1.0)
    for rows in forwards:
        this.wait_for(this.draft.of(rows, context), this.look)
        assert this.draft(rows)[rows] == pytest.approx(this.draft.of(rows, context))
    work = Work(
        batch,
        batch + nodes,
        context,
        drafting=[(rows, context) for rows in forwards],
        looks=1 + len(forwards),
    )
    spans = timing_of(cost.drafting(Drafting(FANOUT)), is_apart=is_apart).spans(0.0, 0.0, work)
    assert this.fixed + this.target.of(batch + nodes, context) == pytest.approx(spans.seconds)
    assert this.fixed + this.target(nodes)[nodes] == pytest.approx(spans.seconds)


@given(
    target=steps,
    draft=steps,
    host=hosts,
    batch=st.integers(1, 12),
    context=st.integers(0, 10_000),
    length=st.integers(0, 5),
)
def test_a_round_of_chains_is_priced_as_it_is_simulated(
    target, draft, host, batch, context, length
):
    cost = costs(target, draft, host, 0.0)
    work = Work(
        batch,
        batch * (1 + length),
        context,
        drafting=[(batch, context + batch * j) for j in range(length)],
        rests=not length,
    )
    goodput = Goodput.of_cost(cost).drafting(Drafting(1))
    found = goodput.seconds(batch=batch, context=context, steps=length, draft_tokens=batch * length)
    if not length:  # the round of all is simulated, and those who take turns are priced
        found += goodput.turns.saved(batch, context)
    spans = timing_of(cost.drafting(Drafting(1)), is_apart=False).spans(0.0, 0.0, work)
    assert found == pytest.approx(spans.seconds)


dear_hosts = st.fixed_dictionaries(
    {
        **dict.fromkeys(("reroot", "reroot_each", "choice", "choice_each"), seconds),
        **dict.fromkeys(("reroot_row", "choice_row"), st.floats(1e-5, 2e-3)),
        "reroot_node": st.floats(0.0, 2e-4),
        "choice_alone": seconds,
    }
)


def policy_of(cost: RoundCost, label: str = "async-batch-tree-8x1x4") -> Any:
    return build_speculation(parse_policy(label), goodput=Goodput.of_cost(cost))


def trees_of(policy: BatchTree, count: int) -> list[Any]:
    return [policy.tree_type(9, base_len=5, max_depth=50) for _ in range(count)]


def run(trees: Sequence[DraftTree], leaves: Sequence[Sequence[int]], chance: float) -> None:
    for tree, nodes in zip(trees, leaves, strict=True):
        tree.expand(nodes)
        for node in nodes:
            tree.add_children(node, [1], [log(chance)])


def seconds_of(cost: RoundCost, work: Work) -> float:
    """Of a round of an asynchronous policy after one that was the same."""
    timing = timing_of(cost, is_apart=True)
    first = timing.spans(0.0, 0.0, work).seconds
    return timing.spans(first, 0.0, work).seconds


@given(
    delta=st.floats(2e-3, 7e-3),
    host=dear_hosts,
    batch=st.integers(1, 2),
    chance=st.floats(0.4, 0.95),
    num_levels=st.integers(0, 4),
)
@example(
    delta=3e-3, host={"reroot_row": 1e-3, "choice_row": 1e-3}, batch=1, chance=0.9, num_levels=1
)
def test_a_forward_beside_the_verification_is_made_where_it_gains_what_it_takes_in_simulation(
    delta, host, batch, chance, num_levels
):
    cost = costs(STEP, StepTime.linear(alpha=0.0, gamma=0.0, delta=delta), host, 0.0)
    policy = policy_of(cost)
    cost, trees, drafting = cost.drafting(policy.drafting), trees_of(policy, batch), []
    for node in range(num_levels):  # in the round before
        run(trees, [[node]] * batch, chance)
    policy.begin(trees)
    while any(leaves := policy.leaves(trees, len(drafting))):
        run(trees, leaves, chance)
        drafting.append((batch, 0))
    work = Work(batch, sum(map(len, policy.select(trees))), 0, drafting=drafting)
    for _ in range(policy.overlap):
        confidence, tops = prospects(trees)
        gain = sum([mean * exp(top) for mean, top in zip(confidence, tops, strict=True)])
        more = replace(work, overlapped=[*work.overlapped, (batch, 0)])
        price = (seconds_of(cost, more) - seconds_of(cost, work)) * policy._choice.rate
        assume(abs(price - gain) > 1e-6)
        leaves = policy.overlap_leaves(trees)
        assert any(leaves) == (price < gain)
        if not any(leaves):
            break
        run(trees, leaves, chance)
        work = more


@given(
    delta=st.floats(5e-3, 1e-2),
    host=dear_hosts,
    batch=st.integers(1, 4),
    chance=st.floats(0.05, 0.5),
)
def test_trees_are_drafted_beside_plain_rounds_where_rounds_with_them_are_better_in_simulation(
    delta, host, batch, chance
):
    cost = costs(STEP, StepTime.linear(alpha=0.0, gamma=0.0, delta=delta), host, 0.0)
    policy = policy_of(cost)
    policy.calibration.confidence = chance
    cost, trees = cost.drafting(policy.drafting), trees_of(policy, batch)
    policy.begin(trees)
    assume(not any(policy.leaves(trees, 0)))
    policy.select(trees)
    num_levels = int(STEP(batch) / delta)
    tokens, values = float(batch), []
    for node in range(1, 1 + batch * num_levels):
        tokens += chance ** (1 + (node - 1) // batch)
        work = Work(batch, batch + node, 0, overlapped=[(node, 0)])
        values.append(tokens / timing_of(cost, is_apart=True).spans(0.0, 0.0, work).seconds)
    least = (1.0 + MARGIN) * batch / seconds_of(cost, Work(batch, batch, 0, rests=True))
    assume(abs(max(values) - least) > 1e-6)
    assert (policy.overlap > 0) == (max(values) > least)


@pytest.mark.parametrize("term", ["reroot_row", "reroot_node", "choice_row"])
def test_a_request_is_owed_the_tokens_of_the_host_s_seconds_too(term):
    chosen = []
    for seconds in (0.0, 0.5):
        policy = policy_of(replace(costs(STEP, STEP, {}, 0.0), **{term: seconds}), "adaserve-1x2x4")
        trees = [DraftTree(9, base_len=5, max_depth=50) for _ in range(2)]
        for tree, chance in zip(trees, (0.9, 0.1), strict=True):
            tree.expand([0])
            tree.add_children(0, [1, 2], [log(chance), log(0.9 * chance)])
        policy.begin(trees, [Progress(), Progress(slo_tpot=0.1)])
        chosen.append([len(nodes) for nodes in policy.select(trees)])
    assert chosen == [[3, 1], [1, 3]]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("term", HOST)
def test_nothing_is_drafted_where_only_the_host_s_seconds_speak_against_it(label, term):
    if term == "choice_alone" and label.startswith("async"):
        pytest.skip("a draft with workers of its own has first_alone")
    drafted = {}
    for is_dear in (False, True):
        draft = StepTime.linear(alpha=0.0, gamma=0.0, delta=1e-3)
        cost = replace(RoundCost(STEP, draft, STEP, STEP), **{term: 0.5 * is_dear})
        policy = policy_of(cost, label)
        trees = trees_of(policy, 1)
        policy.begin(trees)
        drafted[is_dear] = any(policy.leaves(trees, 0))
        policy.select(trees)
        drafted[is_dear] |= policy.overlap > 0
    assert drafted == {False: True, True: False}
