from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Deployment, Serving
from codesign.fit import Fit
from codesign.planner import Question
from codesign.planner.behaviour import chain_behaviour
from codesign.planner.economics import (
    Decoding,
    _crossover,
    chance_for,
    oracle_seconds,
    weigh_speculation,
)
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy

CHANCE = 0.7


def tokens(depth, chance=CHANCE):
    return sum(chance**i for i in range(depth + 1))


TOKENS_OF_3 = tokens(3)


def made_fit(gamma=0.001) -> Fit:
    """A row costs ``gamma`` beside 10 ms a forward, a draft forward 1 ms."""
    cost = RoundCost(
        target=StepTime.linear(alpha=0.0, gamma=gamma, delta=0.01),
        draft=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.001),
        prefill=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.01),
        draft_prefill=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.001),
    )
    profile = AcceptanceProfile.independent([CHANCE], num_tokens=20_000, seed=1)
    return Fit("t", "d", 0.0, {"2": cost}, Calibration(), profile, {})


def scored(policy, batch, emitted, seconds, **more) -> ScoredCandidate:
    candidate = Candidate(Deployment(2), parse_policy(policy), 64)
    means = {"mean_batch": batch, "acceptance_length": emitted, **more}
    figures = {name: Interval(mean, mean, mean) for name, mean in means.items()}
    spans = {"target": seconds - 0.003, "draft": 0.003}
    return ScoredCandidate(candidate, figures, spans, "fitted", is_feasible=True)


def weighed(
    *policies, gamma=0.001, batch=2.0, max_batch=64, emitted=TOKENS_OF_3, seconds=0.021, **more
):
    """By default what a simulation of chain-3 with two requests at once would find."""
    requests = pd.DataFrame({"arrival": [0.0], "prompt_tokens": [10], "output_tokens": [10]})
    question = Question(
        requests, made_fit(gamma), SLO(), Serving(max_kv_tokens=10**6),
        workers=2, max_batch=max_batch,
    )  # fmt: skip
    ranked = [scored(policy, batch, emitted, seconds, **more) for policy in policies]
    return weigh_speculation(ranked, question)


def test_the_crossover_is_where_a_chain_decodes_as_fast_as_plain():
    # (10 + 4 B + 3) / 2.533 = 10 + B  =>  B = 8.4 without noise
    found = weighed("chain-3", "plain")
    by_hand = (10 * tokens(3) - 13) / (4 - tokens(3))
    assert found.crossover == pytest.approx(by_hand, abs=1)
    assert found.largest_batch == 64


@pytest.mark.parametrize(
    ("pays", "batch", "crossover"),
    [
        ("11110000", 2.5, 4),
        ("11110011", 2.5, 4),  # steps in the cost of rows: what pays again later is not promised
        ("11110011", 5.0, 4),
        ("00110011", 2.0, 0),
        ("00111111", 3.0, None),
        ("11111111", 99.0, None),
    ],
)
def test_drafting_pays_from_the_simulated_load_up_to_the_first_gap(pays, batch, crossover):
    found = _crossover(np.array([mark == "1" for mark in pays]), batch)
    assert found == crossover


def test_free_rows_pay_at_every_load_and_dear_ones_at_none():
    assert weighed("chain-3", "plain", gamma=0.0, seconds=0.013).crossover is None
    assert weighed("chain-3", "plain", gamma=1.0, seconds=8.013).crossover == 0


def test_the_policy_that_pays_at_most_load_is_named_if_it_is_not_the_best():
    """(10 + 2 B + 1) / 1.7 = 10 + B has chain-1 pay up to 20 requests, chain-3 up to 8."""

    def ranked(*policies):
        rounds = {"plain": 1.0, "chain-3": TOKENS_OF_3, "chain-1": tokens(1)}
        seconds = {"plain": 0.012, "chain-3": 0.021, "chain-1": 0.015}
        question = Question(
            pd.DataFrame({"arrival": [0.0], "prompt_tokens": [10], "output_tokens": [10]}),
            made_fit(), SLO(), Serving(max_kv_tokens=10**6), workers=2, max_batch=64,
        )  # fmt: skip
        plans = [scored(policy, 2.0, rounds[policy], seconds[policy]) for policy in policies]
        return weigh_speculation(plans, question)

    found = ranked("chain-3", "chain-1", "plain")
    assert found.crossover == pytest.approx(8, abs=1)
    assert found.lasting == "chain-1 on 2, batch 64"
    assert found.lasting_crossover == pytest.approx((10 * tokens(1) - 11) / (2 - tokens(1)), abs=1)
    assert ranked("chain-1", "chain-3", "plain").lasting == ""


def test_gain_and_break_even_by_hand():
    found = weighed("plain", "chain-3", batch=2.0)
    assert found.speculative.startswith("chain-3")
    assert found.null_plan.startswith("plain")
    assert found.break_even_length == pytest.approx(21 / 12)
    assert found.acceptance_length == pytest.approx(tokens(3), rel=0.02)
    assert found.gain == pytest.approx(tokens(3) * 12 / 21, rel=0.02)
    assert tokens(3, found.break_even_rate) == pytest.approx(21 / 12)


def test_requests_that_sit_rounds_out_run_and_wait_longer_for_their_round():
    found = weighed("specserve-5", "plain", batch=2.0, mean_running=3.0, emitted=1.5, seconds=0.01)
    assert found.batch == 3.0
    # Two of three have a round of 10 ms; in plain decoding all three have one of 10 + 3 ms.
    assert found.break_even_length == pytest.approx(15 / 13)
    assert found.gain == pytest.approx(1.5 * 13 / 15)


def test_a_policy_that_decides_each_round_is_weighed_by_what_was_simulated():
    """SpecServe may draft one token a round, or five: what it did here is what pays or not."""
    found = weighed("specserve-5", "plain", emitted=1.5, seconds=0.015)
    assert found.acceptance_length == 1.5
    assert found.break_even_length == pytest.approx(15 / 12)
    assert found.gain == pytest.approx(1.5 * 12 / 15)
    slow = weighed("specserve-5", "plain", emitted=1.2, seconds=0.015)  # below plain decoding
    assert slow.gain < 1
    assert slow.crossover in (0, 1)  # and so not above one request, whatever arithmetic says


def test_nothing_is_weighed_without_a_plain_and_a_speculative_plan():
    assert weighed("plain") is None
    assert weighed("chain-3") is None


def test_no_chance_gives_more_tokens_than_a_chain_has():
    assert chance_for(4.5, 3) is None
    assert chance_for(0.5, 3) is None
    assert chance_for(4.0, 3) == pytest.approx(1.0)
    assert chance_for(1.0, 3) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_foresight_is_never_slower_than_a_fixed_length(depth):
    fit = made_fit()
    candidate = Candidate(Deployment(2), parse_policy(f"chain-{depth}"), 64)
    behaviour = chain_behaviour(depth, fit.acceptance, {"": 1.0})
    drafting = Decoding(candidate, fit, [behaviour], 15.0)
    for batch in (1.0, 8.0, 32.0):
        oracle = oracle_seconds(drafting, batch, fit.acceptance, {"": 1.0})
        assert oracle < float(drafting.seconds_per_token(np.array([batch]))[0])


def test_foresight_with_free_rows_drafts_exactly_the_runs():
    """With 16 tokens at most: mean seconds of a run's round over its tokens."""
    fit = made_fit(gamma=0.0)
    candidate = Candidate(Deployment(2), parse_policy("chain-3"), 64)
    behaviour = chain_behaviour(3, fit.acceptance, {"": 1.0})
    drafting = Decoding(candidate, fit, [behaviour], 15.0)
    mean_run = CHANCE / (1 - CHANCE)
    expected = (0.010 + 0.001 * mean_run) / (mean_run + 1)
    found = oracle_seconds(drafting, 1.0, fit.acceptance, {"": 1.0})
    assert found == pytest.approx(expected, rel=0.02)
