"""Who takes part in rounds of plain decoding, where fewer at a time decode faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from codesign.policy.batch_round import BatchRound
from codesign.policy.cost import RoundCost
from codesign.policy.goodput import Goodput
from codesign.policy.messages import Admission, Candidates, RequestCandidates
from codesign.policy.resting import FIRST_SHARE
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.policy.step_time import StepTime
from codesign.policy.target_side import TargetSide
from codesign.policy.traffic import Traffic
from codesign.policy.turns import WORTH, TurnPrices, Turns, turn_prices
from codesign.sim.timing import timing_of
from codesign.sim.turns_batch import TurnsBatch
from codesign.sim.work import Entering, Work

# Buckets of 4 and 8 rows: from the fifth row on a step takes twice as long.
STAIRS = StepTime(alpha=1e-7, rows=(1, 4, 5, 8, 9, 16), seconds=(1.0, 1.01, 2.0, 2.01, 4.0, 4.01))
LINE = StepTime.linear(alpha=1e-7, gamma=1e-3, delta=0.01)


def side_of(num: int, turns: Turns | None, output: int = 50) -> TargetSide:
    side = TargetSide(turns=turns)
    for number in range(num):
        join(side, number, output)
    return side


def join(side: TargetSide, number: int, output: int = 50) -> None:
    side.admit(Admission(number, (7,) * (3 + number), output))
    side.commit_first(number, 1)


def plain_round(side: TargetSide) -> list[int]:
    rows = side.verify_rows(None)
    for request in rows:
        side.judge(request, lambda row: 1)
    return [request.request_id for request in rows]


def test_as_many_take_part_as_yield_most_tokens_a_second():
    prices = TurnPrices(STAIRS)
    assert [prices.count(n, 100 * n) for n in range(1, 17)] == [
        1, 2, 3, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16,
    ]  # fmt: skip
    assert prices.fewest == 5


def test_all_take_part_where_more_rows_cost_no_more_than_their_share():
    prices = TurnPrices(LINE)
    assert prices.fewest == inf
    assert prices.count(200, 10_000) == 200
    assert prices.saved(200, 10_000) == 0.0


def test_turns_that_gain_little_are_not_taken():
    # Four of five rows: 1.25 rounds for a token of each.
    step = replace(STAIRS, seconds=(1.0, 1.0, 1.25 * WORTH - 1e-3, 9.0, 9.0, 9.0), alpha=0.0)
    assert TurnPrices(step).count(5, 0) == 5
    step = replace(step, seconds=(1.0, 1.0, 1.25 * WORTH + 1e-3, 9.0, 9.0, 9.0))
    assert TurnPrices(step).count(5, 0) == 4


def test_what_a_token_takes_less_is_told():
    prices, context = TurnPrices(replace(STAIRS, alpha=0.0)), 500
    assert prices.saved(5, context) == pytest.approx(2.0 - 1.01 * 5 / 4)
    assert prices.saved(4, context) == 0.0


def test_a_step_by_turns_waits_for_its_host():
    step = replace(STAIRS, alpha=0.0, ahead=0.2)  # of plain rounds of all
    assert TurnPrices(step).saved(5, 0) == pytest.approx(1.8 - 1.01 * 5 / 4)


@pytest.mark.parametrize("num", [5, 6, 7, 9, 13])
def test_everyone_gets_its_turn_equally_often(num):
    side = side_of(num, Turns(turn_prices(STAIRS)))
    rounds = [plain_round(side) for _ in range(29)]
    assert all(each == sorted(each) for each in rounds)
    (count,) = {len(each) for each in rounds}
    taken = [[number in each for each in rounds] for number in range(num)]
    assert max(map(sum, taken)) - min(map(sum, taken)) <= 1
    assert count >= num / 2
    assert all(a or b for mine in taken for a, b in pairwise(mine))  # nobody sits out twice


def test_nobody_waits_for_ever_where_few_take_part():
    prices = TurnPrices(STAIRS)
    prices.count = lambda num, context: 2
    turns, contexts = Turns(prices), dict.fromkeys(range(7), 10)
    taken = [number for _ in range(70) for number in turns.take(contexts)]
    assert [taken.count(number) for number in range(7)] == [20] * 7


def test_whoever_joins_comes_after_those_who_sat_out():
    side = side_of(6, Turns(turn_prices(STAIRS)))
    assert plain_round(side) == [0, 1, 2, 3]
    join(side, 6)
    assert plain_round(side) == [0, 1, 4, 5]
    assert plain_round(side) == [2, 3, 4, 6]


def test_turns_change_no_token_and_every_request_ends():
    taking, all_at_once = (
        side_of(7, turns, output=9) for turns in (Turns(turn_prices(STAIRS)), None)
    )
    for side in (taking, all_at_once):
        outputs = {}
        while side.request_ids:
            for request in side.verify_rows(None):
                verdict, _ = side.judge(request, lambda row, r=request: r.positions[row] % 5)
                outputs.setdefault(request.request_id, []).extend(verdict.tokens)
        assert {number: len(tokens) for number, tokens in outputs.items()} == dict.fromkeys(
            range(7), 8
        )
        assert all(
            tokens == [(2 + number + 1 + i) % 5 for i in range(8)]
            for number, tokens in outputs.items()
        )


@pytest.mark.parametrize(("rows", "shares"), [(0, False), (64, False), (64, True)])
def test_turns_are_priced_beside_prompts_that_have_a_forward_of_their_own(rows, shares):
    cost = RoundCost(STAIRS, LINE, LINE, LINE, shares_forwards=shares)
    this = BatchRound(Goodput.of_cost(cost))
    this.begin(6, 600, traffic=Traffic(LINE, hears_late=True), sharing=(rows, 1))
    saved = 0.0 if shares else turn_prices(STAIRS).saved(6, 600)
    everyone = this.target.of(this.num_base, 600)
    assert this.plain_seconds == pytest.approx(everyone - saved)
    assert (saved > 0.4) == (not shares)


@pytest.mark.parametrize("label", ["batch-tree-8x2x4", "async-batch-tree-8x2x4", "specserve-4"])
def test_looks_are_their_share_of_rounds_by_turns(label):
    step = replace(STAIRS, alpha=0.0)
    look, dear = 2.5 * FIRST_SHARE / 2 * step(4), StepTime.linear(alpha=0.0, gamma=0.0, delta=9.0)
    cost = RoundCost(step, dear, LINE, LINE, deciding=look)
    policy = build_speculation(parse_policy(label), goodput=Goodput.of_cost(cost))
    trees = [policy.tree_type(9, base_len=100, max_depth=50) for _ in range(6)]
    policy.begin(trees)
    assert not any(policy.leaves(trees, 0))
    policy.select(trees)
    # Of three rounds of four requests a look is less than its share; two of all six are as long.
    assert [policy.stays_at_rest() for _ in range(3)] == [True, True, False]


def test_whoever_drafts_does_not_take_turns():
    side = side_of(6, Turns(turn_prices(STAIRS)))
    tree = RequestCandidates(2, 6, (1, 9), (-1, 0), (1.0, 0.5))
    assert len(side.verify_rows(Candidates(0, (tree,)))) == 6
    root = RequestCandidates(2, 6, (1,), (-1,), (1.0,))
    assert len(side.verify_rows(Candidates(0, (root,)))) == 4


def test_no_step_may_be_run_ahead_of_those_who_take_turns():
    side = side_of(6, Turns(turn_prices(STAIRS)))
    assert not side.all_go_on()
    assert side_of(4, Turns(turn_prices(STAIRS))).all_go_on()
    assert side_of(6, None).all_go_on()
    ending = side_of(3, Turns(turn_prices(STAIRS)))
    for number in (3, 4):
        join(ending, number, output=2)
    assert ending.all_go_on()  # the two are over then


def test_who_is_evicted_comes_back_as_the_last():
    side = side_of(6, Turns(turn_prices(STAIRS)))
    plain_round(side)
    side.evict(4)
    join(side, 4)
    assert plain_round(side) == [0, 1, 2, 5]


def test_a_simulated_batch_takes_the_turns_of_the_target_s_side():
    side = side_of(7, Turns(turn_prices(STAIRS)), output=12)
    batch = TurnsBatch(Turns(turn_prices(STAIRS)), round_rows=3)
    entering = [Entering(number, "", 3 + number, 12) for number in range(7)]
    while side.request_ids:
        work, entering = batch.begin(entering, 0.0), []
        rows = side.verify_rows(None)
        assert (work.batch, work.rows, work.context) == (
            len(rows), len(rows), sum(r.context for r in rows)
        )  # fmt: skip
        assert work.running == batch.num_requests
        assert batch.kv_tokens == 3 * batch.num_requests + sum(
            2 + number + len(side.output(number)) for number in side.request_ids
        )
        over = [r.request_id for r in rows if side.judge(r, lambda row: 1)[0].is_finished]
        assert batch.end() == (len(rows), over)
        assert all(batch.tally(number).num_rounds == 11 for number in over)


@pytest.mark.parametrize("is_apart", [False, True])
def test_whoever_sits_out_is_drafted_for_all_the_same(is_apart):
    draft = replace(LINE, each=1e-3)
    cost = RoundCost(
        STAIRS, draft, LINE, LINE, link=1e-3, link_each=1e-4, reroot=1e-3, reroot_each=1e-4,
        choice=1e-3, choice_each=1e-4, choice_row=1e-5, deciding=1e-3, deciding_each=1e-4,
    )  # fmt: skip
    everyone = Work(5, 5, 500, drafting=[(5, 500)], overlapped=[(5, 505)], looks=2, looks_beside=1)
    some = replace(everyone, batch=4, rows=4, context=400, num_sitting=1)
    ours, theirs = (
        timing_of(cost, is_apart=is_apart).spans(0.0, 0.0, work) for work in (some, everyone)
    )
    assert ours.target < theirs.target
    assert replace(ours, target=theirs.target) == theirs


def test_a_simulated_request_that_is_evicted_tells_what_it_emitted():
    batch = TurnsBatch(Turns(turn_prices(LINE)), round_rows=0)
    batch.begin([Entering(0, "", 5, 9), Entering(1, "", 5, 9)], 0.0)
    batch.end()
    assert batch.drop(1) == 2
    assert batch.tally(1).num_rounds == 1
    assert batch.num_requests == 1
