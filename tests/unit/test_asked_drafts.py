"""Draft forwards that the host asks for one by one: policies whose ranks never run ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.host_cost import Drafting
from codesign.policy.speculation import (
    FAMILIES,
    build_speculation,
    drafting_of,
    parse_policy,
)
from codesign.sim.timing import draft_seconds
from codesign.sim.work import Work

US = 1e-6
STEP = StepTime.linear(alpha=0.0, gamma=0.0, delta=500 * US)
PROMPT = replace(STEP, apart=True)
COST = RoundCost(
    STEP, STEP, PROMPT, PROMPT, choice=10 * US, choice_alone=80 * US, deciding=45 * US, child=2 * US
)
ASKS, DECIDES = Drafting(4, asks=True), Drafting(4, asks=True, decides=True)
AHEAD = ("chain-3", "tree-8x4x4", "async-tree-8x4x6")
ASKED = (
    "threshold-8@0.4",
    "turbospec-8",
    "specserve-8",
    "adaserve-4x2x64",
    "batch-tree-16x2x8",
    "async-batch-tree-16x2x8",
)


def drafting(cost: RoundCost, forwards: int, requests: int, looks: int = 0) -> float:
    """Microseconds before the target's step."""
    work = Work(requests, requests, 100, drafting=[(requests, 100)] * forwards, looks=looks)
    return draft_seconds(cost, work)[0] / US


@pytest.mark.parametrize("place", ["choice_alone", "first_alone"])
@pytest.mark.parametrize("how", [ASKS, DECIDES])
def test_each_forward_of_one_request_waits_as_the_first_one_does(how: Drafting, place: str) -> None:
    cost = replace(COST, **({"choice_alone": 0.0} | {place: 80 * US}))
    asked = cost.drafting(how)
    look = 45 if how.decides else 0
    for forwards in (1, 2, 5):
        looks = forwards + 1 if how.decides else 0
        ahead = drafting(cost, forwards, 1, looks)
        more = (forwards - 1) * (80 - look)
        assert drafting(asked, forwards, 1, looks) == pytest.approx(ahead + more)
        several = drafting(cost, forwards, 2, looks) + forwards * 2 * 2 * 4  # their children
        assert drafting(asked, forwards, 2, looks) == pytest.approx(several)
    assert asked.drafting(how) == asked, "counted once"
    assert asked.draft_prompt(64) == pytest.approx(cost.draft_prompt(64))


def test_a_look_that_takes_longer_than_the_wait_leaves_nothing_to_add() -> None:
    slow = replace(COST, deciding=100 * US)
    assert slow.waiting(DECIDES) == 0.0
    assert slow.drafting(DECIDES).choice_alone == slow.choice_alone


def test_policies_price_their_forwards_as_they_are_simulated() -> None:
    goodput = Goodput.of_cost(COST)
    assert goodput.drafting(DECIDES).draft(1, 100, 1) == pytest.approx(535 * US)
    assert goodput.drafting(Drafting(4)).draft(1, 100, 1) == pytest.approx(500 * US)
    assert goodput.drafting(DECIDES).host.choice_alone == pytest.approx(45 * US)


@pytest.mark.parametrize(
    "name", [*AHEAD, *ASKED, *(f.spec.label for f in FAMILIES if f.spec.runs_in_engine)]
)
def test_a_policy_asks_if_it_never_tells_of_forwards_to_come(name: str) -> None:
    spec = parse_policy(name)
    if spec.kind == "plain":
        pytest.skip("drafts nothing")
    policy = build_speculation(spec, goodput=Goodput(STEP, STEP))
    tree = policy.tree_type(7, base_len=100, max_depth=8)
    told = policy.following(tree, 0) + policy.overlap_following(tree, 0)
    assert policy.asks == (told == 0)
    assert policy.asks == (name in ASKED) or name not in {*AHEAD, *ASKED}
    assert drafting_of(spec) == policy.drafting
