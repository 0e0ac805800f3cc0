from __future__ import annotations

import math
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.policy.batch_round import BatchRound
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.row_prices import RowPrices
from codesign.policy.step_time import MOST_AHEAD
from codesign.policy.traffic import Traffic
from codesign.profiler.grids import MAX_REQUESTS
from codesign.sim.timing import shared_step
from codesign.sim.work import Work

TABLE = StepTime(alpha=1e-6, rows=(1, 2, 8), seconds=(0.010, 0.011, 0.023))


def test_linear_form_is_the_papers_formula():
    step = StepTime.linear(alpha=2e-6, gamma=3e-4, delta=5e-3)
    assert step(0) == pytest.approx(5e-3)
    assert step(4, 1000) == pytest.approx(2e-6 * 1000 + 3e-4 * 4 + 5e-3)


def test_table_is_exact_at_its_knots():
    assert [TABLE(rows) for rows in TABLE.rows] == pytest.approx(TABLE.seconds)


def test_table_is_linear_between_knots():
    assert TABLE(1.5) == pytest.approx(0.0105)
    assert TABLE(5) == pytest.approx(0.017)


def test_last_slope_goes_on_beyond_the_table():
    assert TABLE(11) == pytest.approx(0.029)


def test_fewer_rows_than_the_first_knot_cost_as_much_as_the_first():
    assert TABLE(0) == TABLE(1) == pytest.approx(0.010)


def test_context_costs_the_same_whatever_the_rows():
    for rows in (1, 3, 20):
        assert TABLE(rows, 500) - TABLE(rows) == pytest.approx(5e-4)


def test_single_knot_goes_on_with_gamma():
    step = StepTime(alpha=0.0, rows=(4,), seconds=(0.02,), gamma=0.001)
    assert step(6) == pytest.approx(0.022)


def test_two_knots_on_a_line_agree_with_the_linear_form():
    line = StepTime.linear(alpha=1e-6, gamma=3e-4, delta=5e-3)
    table = StepTime(alpha=1e-6, rows=(1, 9), seconds=(line(1), line(9)))
    for rows in (1, 2, 9, 30):
        assert table(rows, 77) == pytest.approx(line(rows, 77))


def test_a_chunk_pays_for_each_row_times_what_stands_before_it():
    step = StepTime(alpha=1e-6, rows=(1, 9), seconds=(0.01, 0.02), cross=1e-8)
    assert step(5, 1000) == pytest.approx(0.015 + 1e-3 + 1e-8 * 5 * 1000)
    assert step(5) == pytest.approx(0.015)


def test_a_step_time_survives_a_trip_to_another_process_and_a_change_of_one_field():
    step = replace(TABLE, cross=1e-9)
    assert pickle.loads(pickle.dumps(step))(5, 70) == step(5, 70) != TABLE(5, 70)
    assert set(asdict(step)) == {
        "alpha",
        "rows",
        "seconds",
        "gamma",
        "cross",
        "apart",
        "each",
        "tile",
        "alone",
        "doubling",
        "ahead",
        "ahead_each",
    }


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=6),
    st.floats(0, 100),
    st.floats(0, 100),
    st.floats(0, 1e-3),
)
def test_ascending_tables_never_give_less_time_for_more_rows(steps, rows, more, alpha):
    knots, seconds = [0], [0.01]
    for width, rise in steps:
        knots.append(knots[-1] + width)
        seconds.append(seconds[-1] + rise)
    step = StepTime(alpha=alpha, rows=tuple(knots), seconds=tuple(seconds))
    assert step(rows + more) >= step(rows) - 1e-12
    assert step(rows, 10.0) >= step(rows)
    assert step(rows) >= 0.01
    if rows <= knots[-1]:
        assert step(rows) <= seconds[-1] + 1e-12


def test_calibration_is_the_identity_until_fitted():
    assert Calibration().is_identity
    assert not Calibration(slope=0.9).is_identity
    assert not Calibration(intercept=0.1).is_identity


def test_prompts_that_run_apart_cost_what_each_does_alone():
    alone = replace(TABLE, cross=1e-9)
    apart = replace(alone, apart=True)
    prompts = [(7, 0), (30, 12)]
    assert apart.of_prompts(prompts) == alone(7, 0) + alone(30, 12) > alone.of_prompts(prompts)
    assert apart.of_prompts(prompts[:1]) == alone.of_prompts(prompts[:1])
    assert pickle.loads(pickle.dumps(apart)).apart
    assert apart.scaled(2.0).apart
    assert apart.later(0.5)(7, 3) == pytest.approx(alone(7, 3) + 0.5)


def test_a_chunk_of_prompts_that_runs_apart_adds_what_it_takes_alone():
    joint = RoundCost(target=TABLE, draft=TABLE, prefill=TABLE, draft_prefill=TABLE)
    apart = replace(joint, prefill=replace(TABLE, apart=True))
    work, prompts = Work(2, 8, 600), [(6, 0), (4, 32)]
    alone = TABLE(6) + TABLE(4, 32)
    assert shared_step(apart, work, prompts) == shared_step(apart, None, prompts) == alone
    assert shared_step(joint, work, prompts) < alone


def test_a_draft_s_prompt_that_runs_apart_leaves_its_root_to_the_forward_of_all():
    draft = StepTime.linear(alpha=1e-7, gamma=1e-4, delta=0.004)
    line = StepTime.linear(alpha=3e-7, gamma=1e-3, delta=0.005)
    knots = StepTime(alpha=0.0, rows=(16, 17, 64), seconds=(0.005, 0.009, 0.012), cross=1e-9)
    for prompt in (line, knots):
        cost = RoundCost(target=TABLE, draft=draft, prefill=TABLE, draft_prefill=prompt)
        assert cost.draft_prompt is prompt
        cost = replace(cost, draft_prefill=replace(prompt, apart=True))
        for rows in (2, 9, 16, 17, 40, 64, 900):
            assert cost.draft_prompt(rows) == pytest.approx(prompt(rows) - draft(1, rows - 1))
        assert cost.draft_prompt(1) == 0.0  # nothing but its root
        assert cost.draft_prompt.of_prompts([(5, 0), (9, 0)]) == pytest.approx(
            prompt(5) + prompt(9) - draft(1, 4) - draft(1, 8)
        )
        goodput = Goodput.of_cost(cost)
        assert goodput.draft_prompt_seconds(30) == cost.draft_prompt(30)
        assert goodput.draft_prompts_once == 0.0
        # As timed, it has a choice of two candidates, too, which a round makes once for all.
        chosen = replace(cost, choice=1e-5, choice_row=2e-6, choice_alone=9e-5, choice_each=1.0)
        assert chosen.draft_prompt(40) == pytest.approx(cost.draft_prompt(40) - 1.04e-4)
        whole = replace(chosen, draft_prefill=prompt)
        assert whole.draft_prompt is prompt
    cost = replace(cost, draft=replace(draft, seconds=(1.0,)))  # more than any prompt, as timed
    assert cost.draft_prompt(40) == 0.0


def test_context_before_a_draft_s_prompt_never_makes_it_cheaper():
    draft = StepTime.linear(alpha=1e-7, gamma=0.0, delta=0.001)
    for alpha, each in ((3e-7, 2e-7), (0.0, 0.0)):
        prompt = StepTime(alpha=alpha, rows=(16, 64), seconds=(0.005, 0.012), apart=True)
        cost = RoundCost(target=TABLE, draft=draft, prefill=TABLE, draft_prefill=prompt)
        more = cost.draft_prompt(30, 50_000) - cost.draft_prompt(30)
        assert more == pytest.approx(50_000 * each)


def test_each_counts_requests_or_tiles_of_their_rows_where_these_are_more():
    step = replace(TABLE, each=1e-3, tile=4)
    assert step(8, 0, 8) == pytest.approx(TABLE(8) + 7e-3)
    assert step(32, 0, 8) == pytest.approx(TABLE(32) + 7e-3)
    assert step(32, 0, 1) == step(32, 0, 4) == pytest.approx(TABLE(32) + 7e-3)
    assert step(4) == TABLE(4)
    shapes = [(rows, 9 * n, n) for rows in (1, 4, 5, 8, 33) for n in (1, 3, 8)]
    assert step.of_arrays(*zip(*shapes, strict=True)).tolist() == [step(*s) for s in shapes]
    assert pickle.loads(pickle.dumps(step)) == step
    assert step.scaled(2.0)(32) == pytest.approx(2.0 * step(32))
    assert step.later(0.5)(32) == pytest.approx(step(32) + 0.5)


def test_requests_of_few_rows_take_more_each_time_that_they_double():
    step = replace(TABLE, doubling=1e-3)
    for rows, requests, doublings in ((8, 1, 0), (8, 2, 1), (8, 8, 3), (3, 3, math.log2(3))):
        assert step(rows, 70, requests) == pytest.approx(TABLE(rows, 70) + 1e-3 * doublings)
    assert step(9, 70, 8) == TABLE(9, 70)
    shapes = [(rows, 9, n) for rows in (1, 8, 9, 33) for n in (0, 1, 1.4, 2, 3, 7, 8)]
    assert step.of_arrays(*zip(*shapes, strict=True)).tolist() == [step(*s) for s in shapes]
    assert pickle.loads(pickle.dumps(step)) == step
    assert step.scaled(2.0)(8, 0, 8) == pytest.approx(2.0 * step(8, 0, 8))
    assert step.later(0.5)(8, 0, 8) == pytest.approx(step(8, 0, 8) + 0.5)


def test_doublings_are_the_same_where_numpy_rounds_a_logarithm_otherwise(monkeypatch):
    exact = np.log2
    monkeypatch.setattr(np, "log2", lambda values: np.nextafter(exact(values), np.inf))
    step = replace(TABLE, doubling=1.0)
    assert step.of_arrays(8, 70, 7.3) == step(8, 70, 7.3)


AHEAD = replace(TABLE, each=1e-3, doubling=1e-4, ahead=3e-4, ahead_each=5e-4)


def test_a_batch_that_decodes_plainly_takes_less_as_the_host_is_not_waited_for():
    waiting = replace(AHEAD, ahead=0.0, ahead_each=0.0)
    batches = (0, 1, 1.4, 1.6, 2.5, 3, 8, 9, 30)
    shapes = [(rows, 9 * n, n) for rows in (1, 2, 2.5, 3, 8, 9, 30) for n in batches]
    for rows, context, requests in shapes:
        is_plain = requests >= 1.5 and rows <= requests
        # Of more than eight requests no profile says more.
        less = 3e-4 + 5e-4 * (min(requests, 8.0) - 1.0) if is_plain else 0.0
        found = AHEAD(rows, context, requests)
        assert found == waiting(rows, context, requests) - less
        assert AHEAD.scaled(2.0)(rows, context, requests) == pytest.approx(2.0 * found)
        assert AHEAD.later(0.5)(rows, context, requests) == pytest.approx(found + 0.5)
    assert AHEAD.of_arrays(*zip(*shapes, strict=True)).tolist() == [AHEAD(*s) for s in shapes]
    assert pickle.loads(pickle.dumps(AHEAD)) == AHEAD


def test_a_step_ahead_of_the_host_takes_half_of_what_it_took_without_context_at_least():
    """So that each token of context costs what it did, however much is left out."""
    step, waiting = replace(AHEAD, ahead=1.0, ahead_each=0.0), replace(AHEAD, ahead=0.0)
    waiting = replace(waiting, ahead_each=0.0)
    shapes = [(rows, context, n) for rows in (1, 2, 8) for context in (0, 70) for n in (1, 2, 8)]
    for rows, context, requests in shapes:
        whole = waiting(rows, context, requests)
        half = waiting(rows, 0, requests) / 2.0 + TABLE.alpha * context
        is_plain = requests > 1 and rows <= requests
        assert step(rows, context, requests) == pytest.approx(half if is_plain else whole)
        assert step(rows, context, requests) >= whole / 2.0
    assert step.of_arrays(*zip(*shapes, strict=True)).tolist() == [step(*s) for s in shapes]


@pytest.mark.parametrize("ahead", [3e-4, 1.0])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_the_first_row_beyond_plain_decoding_costs_policies_what_waiting_for_the_host_does(
    batch, ahead
):
    step = replace(AHEAD, ahead=ahead)
    prices, more = RowPrices(step), list(range(40))
    for context in (0, 70, 9000):
        prices.begin(batch, context, batch)
        wanted = [step(batch + count, context, batch) for count in more]
        for found in (prices(39), prices.listed(39)[:40], [prices.at(count) for count in more]):
            assert list(found) == pytest.approx(wanted, rel=1e-9)
        assert prices.rise <= min(np.diff(wanted)) + 1e-12
        every = np.array([step(count, context, batch) for count in range(1, 40)])
        assert prices.fall >= max(np.maximum.accumulate(every) - every) - 1e-12
    goodput = Goodput.of_cost(RoundCost(step, TABLE, TABLE, TABLE))
    this = BatchRound(goodput)
    plain = goodput.seconds(batch=batch, context=70, steps=0, draft_tokens=0)
    this.begin(batch, 70, traffic=Traffic(TABLE, hears_late=False), sharing=(0, 0))
    assert [plain, this.plain_seconds] == pytest.approx([step(batch, 70, batch)] * 2)


ALONE = replace(TABLE, each=1e-3, alone=StepTime(-2e-7, (1, 4, 8, 9), (-4e-4, -2e-3, 1e-3, 1e-3)))


def test_one_request_alone_takes_more_or_less_than_several_would():
    many = replace(ALONE, alone=None)
    shapes = [(rows, 9 * n, n) for rows in (1, 3, 4, 8, 33) for n in (1, 1.4, 1.6, 3)]
    for rows, context, requests in shapes:
        more = ALONE.alone(rows, context) if requests < 1.5 else 0.0
        found = ALONE(rows, context, requests)
        assert found == many(rows, context, requests) + more
        assert ALONE.scaled(2.0)(rows, context, requests) == pytest.approx(2.0 * found)
        assert ALONE.later(0.5)(rows, context, requests) == pytest.approx(found + 0.5)
    assert ALONE.of_arrays(*zip(*shapes, strict=True)).tolist() == [ALONE(*s) for s in shapes]
    assert pickle.loads(pickle.dumps(ALONE)) == ALONE


def test_policies_pay_for_a_draft_of_one_request_what_it_takes_alone():
    goodput = Goodput.of_cost(RoundCost(TABLE, ALONE, TABLE, TABLE))
    this = BatchRound(goodput)
    for batch in (1, 4, 1):
        wanted = TABLE(batch, 70, batch) + ALONE(batch, 70, batch)
        found = goodput.seconds(batch=batch, context=70, steps=1, draft_tokens=0)
        assert found - goodput.overhead(batch) == pytest.approx(wanted)
        this.begin(batch, 70, traffic=Traffic(TABLE, hears_late=False), sharing=(0, 0))
        for rows in (2, 4, 9):
            assert this.draft.of(rows, 70) == pytest.approx(ALONE(rows, 70, batch))
            assert this.draft(rows)[rows] == pytest.approx(ALONE(rows, 70, batch))


@pytest.mark.parametrize("tile", [0, 4])
def test_policies_pay_for_requests_and_tiles_what_a_step_takes(tile):
    step = replace(TABLE, each=1e-3, tile=tile, doubling=3e-3)
    draft = replace(TABLE, alpha=0.0, each=2e-3, tile=tile)
    goodput = Goodput.of_cost(RoundCost(step, draft, TABLE, TABLE))
    for batch, tokens in ((1, 0), (1, 30), (4, 3), (4, 40), (8, 8)):
        wanted = step(batch + tokens, 70, batch) + 2 * draft(batch, 70, batch)
        found = goodput.seconds(batch=batch, context=70, steps=2, draft_tokens=tokens)
        assert found == pytest.approx(wanted)
        prices = RowPrices(step)
        prices.begin(batch, 70, batch, 0.25)
        prices(2)  # far fewer are worked out than are asked for next
        assert prices(tokens)[tokens] == pytest.approx(step(batch + tokens, 70, batch) + 0.25)
        assert prices.of(batch + tokens, 70) == pytest.approx(prices(tokens)[tokens])


def test_what_running_ahead_gains_is_known_up_to_the_largest_batch_that_profiles_serve():
    assert MOST_AHEAD == MAX_REQUESTS
