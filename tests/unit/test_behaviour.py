"""What policies do in a round, as the screen sees it, against hand counts and the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.candidate import Candidate
from codesign.config import Serving, parse_deployment
from codesign.fit import Fit
from codesign.planner.behaviour import (
    Behaviour,
    _mean,
    chain_behaviour,
    observe_all,
    request_shares,
    token_shares,
    unused_tokens,
)
from codesign.planner.round_times import BehaviourTable, round_seconds
from codesign.planner.sample import agreement_runs
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.sim import simulate

STEP = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.01)
CHANCES = [0.6, 0.15, 0.1, 0.05]


def made_profile() -> AcceptanceProfile:
    easy = AcceptanceProfile.independent([0.9, 0.05], num_tokens=4000, seed=1).recordings[""]
    hard = AcceptanceProfile.independent([0.3, 0.10], num_tokens=4000, seed=2).recordings[""]
    return AcceptanceProfile({"easy": easy, "hard": hard})


def fit_of(profile: AcceptanceProfile, calibration: Calibration | None = None) -> Fit:
    cost = RoundCost(STEP, STEP, STEP, STEP, kv_tokens=10**6)
    return Fit("", "", 0.0, {"1": cost, "1+1": cost}, calibration or Calibration(), profile, {})


def recorded(*ranks: int) -> AcceptanceProfile:
    log_probs = np.log(np.tile([0.6, 0.2], (len(ranks), 1)))
    return AcceptanceProfile({"": (Recording(0, np.array(ranks), log_probs),)})


def test_shares_are_those_of_output_tokens_and_unknown_kinds_stand_together():
    requests = pd.DataFrame(
        {"output_tokens": [10, 30, 40, 20], "category": ["easy", "hard", "poem", ""]}
    )
    assert token_shares(requests, made_profile()) == {"": 0.6, "easy": 0.1, "hard": 0.3}
    assert token_shares(requests.drop(columns="category"), made_profile()) == {"": 1.0}


def test_where_requests_count_alike_a_long_one_has_no_more_weight():
    requests = pd.DataFrame({"output_tokens": [10, 30], "category": ["easy", "hard"]})
    assert token_shares(requests, made_profile()) == {"easy": 0.25, "hard": 0.75}
    assert request_shares(requests, made_profile()) == {"easy": 0.5, "hard": 0.5}
    shares, each = (f(requests, made_profile()) for f in (token_shares, request_shares))
    easy, hard = (chain_behaviour(3, made_profile(), {k: 1.0}).emitted for k in ("easy", "hard"))
    found = chain_behaviour(3, made_profile(), shares, each)
    rounds_a_token = (0.5 / easy + 0.5 / hard) / (0.25 / easy + 0.75 / hard)
    assert found.by_request == pytest.approx(rounds_a_token)
    assert chain_behaviour(3, made_profile(), shares).by_request == 1.0


def test_runs_of_agreement_by_hand():
    profile = recorded(0, 0, -1, 1, 0, 1)
    assert [r.tolist() for r in agreement_runs(profile, "")] == [[2, 1, 0, 0, 1, 0]]
    assert [r.tolist() for r in agreement_runs(profile, "", fanout=2)] == [[2, 1, 0, 3, 2, 1]]


def test_a_chain_replayed_by_hand():
    # Two hits and a miss: with chains of 2 each round takes all three tokens, with 1 it takes 2, 1.
    profile = recorded(*[0, 0, -1] * 4)
    assert chain_behaviour(2, profile, {"": 1.0}).emitted == pytest.approx(3.0)
    assert chain_behaviour(1, profile, {"": 1.0}).emitted == pytest.approx(1.5)
    found = chain_behaviour(2, profile, {"": 1.0})
    assert (found.rows, found.awaited, found.awaited_rows) == (3.0, (1.0, 1.0), (1.0, 1.0))


def test_a_chain_goes_on_in_the_next_recording_as_simulations_do():
    ranks, log_probs = np.zeros(6, np.int64), np.log(np.tile([0.6, 0.2], (6, 1)))
    profile = AcceptanceProfile({"": (Recording(0, ranks, log_probs),) * 2})
    assert chain_behaviour(3, profile, {"": 1.0}).emitted == 4.0


def test_tokens_beyond_the_end_of_an_answer():
    assert unused_tokens([1] * 5) == 0.0
    assert unused_tokens([3] * 5) == 1.0  # of an answer that ends anywhere: none, one or two
    # Every round of 1 is followed by one of 3: of four ends, that is 0 or 0, 1, 2.
    assert unused_tokens([1, 3] * 5) == 0.75


def test_plain_decoding_emits_one_token_from_one_row_and_drafts_nothing():
    plain = parse_policy("plain")
    found = observe_all([plain], fit_of(made_profile()), {"easy": 1.0})[plain]
    assert (found.emitted, found.rows, found.awaited, found.overlapped) == (1.0, 1.0, (), 0.0)


def test_kinds_of_prompts_are_averaged_by_rounds_and_not_by_tokens():
    profile = made_profile()
    easy, hard, both = (
        chain_behaviour(3, profile, shares).emitted
        for shares in ({"easy": 1.0}, {"hard": 1.0}, {"easy": 0.5, "hard": 0.5})
    )
    assert both == pytest.approx(2 / (1 / easy + 1 / hard))
    assert hard < both < easy


POLICIES = (
    "chain-1", "chain-3", "threshold-4@0.5", "static-tree-2x2", "tree-4x2x2", "tree-8x2x3",
    "async-tree-4x2x2", "pearl-3",
)  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_is_what_the_simulator_makes_of_it(policy):
    spec = parse_policy(policy)
    profile = AcceptanceProfile.independent(CHANCES, num_tokens=8000, seed=5)
    fit = fit_of(profile)
    found = observe_all([spec], fit, {"": 1.0})[spec]
    requests = pd.DataFrame(
        {"arrival": np.arange(40) * 1e4, "prompt_tokens": 8, "output_tokens": 300, "category": ""}
    )
    candidate = Candidate(parse_deployment("1+1" if spec.is_async else "1"), spec, 1)
    rounds = simulate(requests, candidate, fit, serving=Serving(), seed=0).rounds
    mean = {name: rounds.column(name).mean() for name in ("num_emitted_tokens", "rows")}
    assert found.emitted == pytest.approx(mean["num_emitted_tokens"], rel=0.12)
    assert found.rows == pytest.approx(mean["rows"], rel=0.08)
    forwards = sum(found.awaited) + found.overlapped
    assert forwards == pytest.approx(rounds.column("num_expansions").mean(), rel=0.08)


@pytest.mark.parametrize("policy", ["tree-4x2x2", "threshold-3@0.5", "async-tree-4x2x2"])
def test_the_end_of_the_recordings_is_observed_as_the_beginning_is(policy):
    """Seen from its first stretches alone, a draft that always fails there never found anything."""
    ranks = np.repeat([-1, 0], 3200)
    log_probs = np.log(np.tile([0.6, 0.2], (len(ranks), 1)))
    profile = AcceptanceProfile({"": (Recording(0, ranks, log_probs),)})
    spec = parse_policy(policy)
    found = observe_all([spec], fit_of(profile), {"": 1.0})[spec]
    depth = max(spec.max_depth, spec.expansions)
    # Half of the tokens come one a round; the async tree finds other depths, but some.
    assert found.emitted == pytest.approx(2 / (1 + 1 / (depth + 1)), rel=0.15)


@pytest.mark.parametrize("policy", ["tree-4x2x2", "async-tree-4x2x2"])
def test_the_same_recordings_give_the_same_behaviour(policy):
    spec, fit = parse_policy(policy), fit_of(made_profile())
    shares = {"easy": 0.4, "hard": 0.6}
    assert observe_all([spec], fit, shares) == observe_all([spec], fit, shares)


def test_a_better_draft_is_seen_as_better_by_every_policy():
    profile = made_profile()
    specs = [parse_policy(p) for p in POLICIES]
    easy, hard = (observe_all(specs, fit_of(profile), {kind: 1.0}) for kind in ("easy", "hard"))
    assert all(easy[spec].emitted > 1.2 * hard[spec].emitted for spec in specs)


def test_calibrated_confidences_decide_where_a_threshold_stops():
    spec = parse_policy("threshold-4@0.5")
    profile = AcceptanceProfile.independent(CHANCES, num_tokens=4000, seed=5)
    fit = fit_of(profile)
    sure = replace(fit, calibration=Calibration(1.0, 4.0))
    unsure = replace(fit, calibration=Calibration(1.0, -4.0))
    rows = [observe_all([spec], f, {"": 1.0})[spec].rows for f in (unsure, sure)]
    assert rows[0] == pytest.approx(2.0)  # one unsure token is still sent
    assert rows[1] > 4.0


def test_a_forward_that_all_kinds_need_has_a_price_at_a_batch_of_no_whole_number():
    """Rounded, its chance was 1.0000000000000002: the round took NaN seconds, so no draft paid."""
    each = Behaviour(emitted=2.0, rows=4.0, awaited=(1.0,), awaited_rows=(1.0,))
    cost = RoundCost(STEP, STEP, STEP, STEP)
    rng = np.random.default_rng(0)
    for _ in range(200):
        found = _mean([each] * 6, rng.random(6).tolist())
        assert found.awaited == (1.0,)
        table = BehaviourTable.of([found])
        assert np.isfinite(round_seconds(table, cost, batch=11.1, context=10.0, is_apart=False))
