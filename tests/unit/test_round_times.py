from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from codesign.planner.behaviour import Behaviour
from codesign.planner.round_times import BehaviourTable, round_seconds
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.host_cost import Drafting

COST = RoundCost(
    target=StepTime.linear(alpha=0.0, gamma=0.001, delta=0.01),
    draft=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.004),
    prefill=StepTime.linear(alpha=0.0, gamma=0.001, delta=0.0),
    draft_prefill=StepTime.linear(alpha=0.0, gamma=0.0002, delta=0.0),
    reroot=0.0005,
    link=0.0002,
    slowdown=0.1,
)


@pytest.mark.parametrize(
    ("behaviour", "batch", "is_apart", "seconds"),
    [
        (Behaviour(1.0, 1.0), 2, False, 0.012),
        (Behaviour(2.0, 4.0, (1.0,) * 3, (1.0,) * 3), 2, False, 0.018 + 3 * 0.004 + 0.0005),
        # a cut chain: of two requests, one or both go on in three rounds of four
        (Behaviour(2.0, 4.0, (1.0, 0.5), (1.0, 1.0)), 2, False, 0.018 + 1.75 * 0.004 + 0.0005),
        # verification hides two forwards and is slowed by them
        (Behaviour(2.0, 4.0, overlapped=2.0), 1, True, 0.014 + 0.0008 + 0.0005 + 0.0004),
        # five forwards take longer than the verification and its messages
        (Behaviour(2.0, 4.0, overlapped=5.0), 1, True, 0.020 + 0.0005),
        # half of the requests miss
        (Behaviour(2.0, 4.0, (0.5,), (1.0,), 2.0), 2, True, 0.018 + 0.0008 + 0.003 + 0.0009),
    ],
)
def test_the_seconds_of_a_round_by_hand(behaviour, batch, is_apart, seconds):
    table = BehaviourTable.of([behaviour])
    found = round_seconds(table, COST, batch=batch, context=100, is_apart=is_apart)
    assert found.shape == (1, 1)
    assert found[0, 0] == pytest.approx(seconds)


@pytest.mark.parametrize(
    "time",
    [
        StepTime.linear(alpha=1e-6, gamma=0.001, delta=0.01),
        StepTime(1e-6, (2, 8, 16), (0.01, 0.03, 0.04), cross=1e-8),
    ],
)
def test_steps_of_arrays_take_as_long_as_each_alone(time):
    rows, context = np.array([1.0, 2.0, 5.0, 16.0, 40.0]), np.array([0.0, 10.0, 99.0, 7.0, 800.0])
    for requests in (1.0, 4.0):
        expected = [time(r, c, requests) for r, c in zip(rows, context, strict=True)]
        assert time.of_arrays(rows, context, requests) == pytest.approx(expected)


def test_policies_and_batches_are_priced_as_each_alone():
    behaviours = [Behaviour(1.0, 1.0), Behaviour(2.5, 4.0, (1.0, 0.4, 0.1), (1.5, 1.0, 1.0))]
    both = round_seconds(
        BehaviourTable.of(behaviours), COST, batch=[1, 3, 9], context=50, is_apart=False
    )
    for index, behaviour in enumerate(behaviours):
        for column, batch in enumerate([1, 3, 9]):
            alone = round_seconds(
                BehaviourTable.of([behaviour]), COST, batch=batch, context=50, is_apart=False
            )
            assert both[index, column] == pytest.approx(alone[0, 0])


def test_what_trees_keep_and_the_first_forward_of_a_row_and_more_messages_cost_their_seconds():
    behaviour = Behaviour(2.0, 4.0, (0.5,), (2.0,), 5.0, 3.0, kept_trees=0.5, kept_nodes=9.0)
    table = BehaviourTable.of([behaviour])

    def more(batch: int, **terms: float) -> float:
        cost = replace(COST, **terms)
        now, then = (
            round_seconds(table, c, batch=batch, context=100, is_apart=True) for c in (cost, COST)
        )
        return float((now - then)[0, 0])

    assert more(4, reroot_tree=1e-3, reroot_kept=1e-4) == pytest.approx(4 * (0.5e-3 + 9e-4))
    assert more(3, reroot_any=1e-3) == pytest.approx((1.0 - 0.5**3) * 1e-3)
    assert more(1, first_alone=1e-3) == pytest.approx(0.5e-3 + 1e-3)  # half of them miss
    assert more(2, first_alone=1e-3) == 0.0
    beside = replace(behaviour, overlapped=0.0)
    table = BehaviourTable.of([beside])
    assert more(4, link_each=1e-4) == pytest.approx(6e-4)


def test_kept_trees_are_re_rooted_by_the_children_of_their_rows():
    def seconds(fanout: int, cost: RoundCost) -> float:
        behaviour = Behaviour(2.0, 4.0, (0.5,), (2.0,), 2.0, 3.0, fanout=fanout)
        table = BehaviourTable.of([behaviour])
        return float(round_seconds(table, cost, batch=2, context=100, is_apart=True)[0, 0])

    by_nodes = replace(COST, reroot_node=1e-5)
    for fanout in (1, 7):
        assert seconds(fanout, by_nodes) - seconds(fanout, COST) == pytest.approx(
            1e-5 * 2 * 7.0 * fanout
        )
        assert seconds(fanout, by_nodes) == pytest.approx(
            seconds(1, by_nodes.drafting(Drafting(fanout)))
        )


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_children_are_priced_as_a_cost_with_the_policy_s_fanout_does(batch, is_apart):
    def seconds(fanout: int, cost: RoundCost) -> float:
        behaviour = Behaviour(2.0, 4.0, (0.5,), (2.0,), 2.0, 3.0, fanout=fanout)
        table = BehaviourTable.of([behaviour])
        found = round_seconds(table, cost, batch=batch, context=100, is_apart=is_apart)
        return float(found[0, 0])

    dear = replace(COST, child=1e-4)
    assert (seconds(7, dear) > seconds(7, COST)) == (batch > 1)
    assert seconds(7, dear) == pytest.approx(seconds(1, dear.drafting(Drafting(7))))


def test_choosing_more_rows_takes_longer():
    table = BehaviourTable.of([Behaviour(2.0, 4.0, (1.0,), (1.0,))])
    costs = COST, replace(COST, choice_row=1e-4)
    plain, by_rows = (
        round_seconds(table, cost, batch=3, context=9, is_apart=False) for cost in costs
    )
    assert float((by_rows - plain)[0, 0]) == pytest.approx(1e-4 * 12)
