"""What a policy takes a round to last is what the simulator makes it last, term by term."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.policy.batch_round import BatchRound
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.policy.traffic import Traffic
from codesign.sim.timing import timing_of
from codesign.sim.work import Work

STEP = StepTime.linear(alpha=0.0, gamma=0.0, delta=1e-2)
HOST = ("reroot_row", "reroot_node", "choice_row", "choice_alone")
FANOUT = 4

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
        **dict.fromkeys(("deciding_each", "reroot_row", "reroot_node", "choice_row"), few),
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
    this = BatchRound(Goodput.of_cost(cost).with_fanout(FANOUT))
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
    spans = timing_of(cost.with_fanout(FANOUT), is_apart=is_apart).spans(0.0, 0.0, work)
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
    found = (
        Goodput.of_cost(cost)
        .with_fanout(1)
        .seconds(batch=batch, context=context, steps=length, draft_tokens=batch * length)
    )
    spans = timing_of(cost.with_fanout(1), is_apart=False).spans(0.0, 0.0, work)
    assert found == pytest.approx(spans.seconds)


@pytest.mark.parametrize("label", ["batch-tree-8x1x4", "specserve-4", "turbospec-4"])
@pytest.mark.parametrize("term", HOST)
def test_nothing_is_drafted_where_only_the_host_s_seconds_speak_against_it(label, term):
    drafted = {}
    for is_dear in (False, True):
        draft = StepTime.linear(alpha=0.0, gamma=0.0, delta=1e-3)
        cost = replace(RoundCost(STEP, draft, STEP, STEP), **{term: 0.5 * is_dear})
        policy = build_speculation(parse_policy(label), goodput=Goodput.of_cost(cost))
        tree = policy.tree_type(9, base_len=5, max_depth=50)
        policy.begin([tree])
        drafted[is_dear] = bool(policy.leaves([tree], 0)[0])
    assert drafted == {False: True, True: False}
