"""Rounds played back from tapes are the rounds that the policy's own objects would play."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.metrics import summarise
from codesign.policy.chains import FixedChain
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.policy.trees import BestTree
from codesign.records import RunRecords
from codesign.sim import quiet_rounds, simulate, tape_batch
from codesign.sim.stretches import STRETCH_TOKENS, Luck, Stretches
from codesign.sim.tape_batch import TapedBatch
from codesign.sim.tapes import Tapes, make_tapes

PROFILE = AcceptanceProfile.independent([0.5, 0.2, 0.1, 0.05], num_tokens=3_000, seed=5)
NUM_STRETCHES = len(Stretches(PROFILE, ("",)))
PLAIN_SERVING = Serving(max_kv_tokens=700)
FULL_SERVING = Serving(max_kv_tokens=300, prefill_chunk=24, preemption=True)


def make_fit() -> Any:
    cost = RoundCost(
        target=StepTime.linear(alpha=1e-6, gamma=1e-3, delta=0.02),
        draft=StepTime.linear(alpha=1e-6, gamma=1e-4, delta=0.002),
        prefill=StepTime.linear(alpha=1e-6, gamma=1e-3, delta=0.01),
        draft_prefill=StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.001),
        reroot=1e-4,
        link=2e-4,
        slowdown=0.1,
        reroot_row=1.1e-6,
        choice=1.7e-5,
        choice_each=5.3e-6,
        choice_alone=8.1e-5,
        choice_row=4.7e-7,
        reroot_node=1.3e-7,
        reroot_any=1.7e-5,
        reroot_tree=2.9e-5,
        reroot_kept=9.1e-7,
        first_alone=6.7e-5,
        link_each=3.1e-5,
    )
    costs = {"2": cost, "1+1": cost}
    return SimpleNamespace(
        costs=costs, calibration=Calibration(), acceptance=PROFILE, answers=PROFILE
    )


def make_trace(num: int, *, longest: int, seed: int = 3) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "arrival": np.cumsum(rng.exponential(0.2, num)),
            "prompt_tokens": rng.integers(20, 120, num),
            "output_tokens": rng.integers(1, longest, num),
            "category": "",
        }
    )


def run(policy: str, trace: pd.DataFrame, serving: Serving) -> RunRecords:
    spec = parse_policy(policy)
    deployment = Deployment(1, 1) if spec.is_async else Deployment(2)
    return simulate(trace, Candidate(deployment, spec, 5), make_fit(), serving=serving, seed=7)


@pytest.mark.parametrize("serving", [PLAIN_SERVING, FULL_SERVING])
@pytest.mark.parametrize("policy", ["chain-1", "chain-4", "threshold-4@0.3"])
def test_a_taped_chain_is_the_played_one_request_for_request(policy, serving, monkeypatch):
    # Within one stretch the two read the same recorded tokens, so nothing may differ at all.
    trace = make_trace(60, longest=STRETCH_TOKENS - 4)
    taped_run = run(policy, trace, serving)
    monkeypatch.setattr(FixedChain, "is_batch_coupled", True)
    played = run(policy, trace, serving)
    assert [asdict(r) for r in taped_run.requests] == [asdict(r) for r in played.requests]
    np.testing.assert_allclose(taped_run.round_table(), played.round_table(), rtol=1e-9, atol=1e-12)
    if serving.preemption:
        assert sum(r.num_preemptions for r in taped_run.requests) > 0


@pytest.mark.parametrize("policy", ["tree-6x2x3", "async-tree-6x2x3"])
@pytest.mark.parametrize("serving", [PLAIN_SERVING, Serving(max_kv_tokens=700, prefill_chunk=64)])
def test_taped_trees_behave_like_played_ones(policy, serving, monkeypatch):
    # Off the true path each draws for itself: equal on average, not draw for draw.
    trace = make_trace(250, longest=90)
    taped = summarise(run(policy, trace, serving))
    monkeypatch.setattr(BestTree, "is_batch_coupled", True)
    played = summarise(run(policy, trace, serving))
    for name, tolerance in (
        ("acceptance_length", 0.02),
        ("acceptance_rate", 0.03),
        ("tpot_mean", 0.03),
        ("mean_batch", 0.03),
    ):
        assert getattr(taped, name) == pytest.approx(getattr(played, name), rel=tolerance), name
    for span in ("target", "draft"):
        assert taped.spans[span] == pytest.approx(played.spans[span], rel=0.04), span


@pytest.mark.parametrize("policy", ["tree-4x2x8", "tree-8x4x3", "tree-4x2x1"])
def test_a_tree_is_drafted_no_deeper_than_the_tokens_that_its_request_has_left(policy, monkeypatch):
    trace = make_trace(150, longest=24).assign(arrival=range(150))  # one after another
    taped = run(policy, trace, PLAIN_SERVING).round_table()
    monkeypatch.setattr(BestTree, "is_batch_coupled", True)
    played = run(policy, trace, PLAIN_SERVING).round_table()
    forwards = taped["num_expansions"].mean(), played["num_expansions"].mean()
    assert forwards[0] == pytest.approx(forwards[1], rel=0.05)


@pytest.fixture(scope="module")
def tapes() -> dict[str, Tapes]:
    stretches = Stretches(PROFILE, ("",))
    return {
        label: make_tapes(
            build_speculation(parse_policy(label)),
            PROFILE,
            stretches,
            hears_early=parse_policy(label).is_async,
        )
        for label in ("chain-3", "tree-6x2x3", "async-tree-6x2x3")
    }


@given(
    label=st.sampled_from(["chain-3", "tree-6x2x3", "async-tree-6x2x3"]),
    chosen=st.lists(st.integers(0, NUM_STRETCHES - 1), min_size=1, max_size=4),
    num_tokens=st.integers(1, 400),
)
def test_a_request_plays_exactly_its_tokens_and_never_proposes_more(
    tapes, label, chosen, num_tokens
):
    rounds = tapes[label].play(chosen, num_tokens)
    rows, emitted = rounds[:, 0], rounds[:, 1]
    assert emitted.sum() == num_tokens
    assert (emitted >= 1).all()
    assert (rows >= emitted).all()
    if label == "chain-3":
        left = num_tokens - np.cumsum(emitted) + emitted
        assert (rows == np.minimum(left, 4)).all()


def test_playing_does_not_change_the_tape(tapes):
    before = tapes["tree-6x2x3"].rounds.copy()
    tapes["tree-6x2x3"].play([0], 1)[:] = -1
    assert (tapes["tree-6x2x3"].rounds == before).all()


def test_only_the_start_of_a_request_is_cold(tapes):
    # An asynchronous draft answers for the prompt first, so that a request's first round carries
    # its root alone; when a stretch goes on another, no such round comes again.
    rounds = tapes["async-tree-6x2x3"].play([3, 4, 5], 3 * STRETCH_TOKENS)
    assert rounds[0, 0] == 1
    assert (rounds[1:-1, 0] > 1).all()


def test_stretches_do_not_depend_on_how_far_they_are_read_or_which_kinds_are_asked_for():
    profile = AcceptanceProfile(
        {**PROFILE.recordings, "code": PROFILE.recordings[""], "chat": PROFILE.recordings[""]}
    )
    all_kinds, one = Stretches(profile, ("", "chat", "code")), Stretches(profile, ("code",))
    number = all_kinds.first("code") + 5
    assert all_kinds.category(number) == "code"
    assert all_kinds.path(number, 300)[:64] == one.path(one.first("code") + 5, 64)


def test_a_request_that_comes_back_goes_on_where_it_was():
    luck = Luck(Stretches(PROFILE, ("",)), ["", ""], [500, 80], seed=1)
    assert luck.stretches(0, 2 * STRETCH_TOKENS + 5) == luck.stretches(0)[2:]
    assert luck.path(0, 100, STRETCH_TOKENS) == luck.path(0, 164)[STRETCH_TOKENS:]


@pytest.mark.parametrize("policy", ["plain", "chain-3", "tree-6x2x3"])
@pytest.mark.parametrize(
    "serving", [PLAIN_SERVING, FULL_SERVING, replace(FULL_SERVING, prefix_cache=True)]
)
def test_rounds_run_ahead_are_those_of_one_after_another(policy, serving, monkeypatch):
    trace = make_trace(60, longest=90)
    monkeypatch.setattr(tape_batch, "_FEWEST_AHEAD", 10**9)
    one_by_one = run(policy, trace, serving)
    monkeypatch.setattr(tape_batch, "_FEWEST_AHEAD", 2)
    for fewest_arrays in (2, 10**9):  # all on arrays, then all in the loop
        monkeypatch.setattr(quiet_rounds, "_FEWEST_ARRAYS", fewest_arrays)
        together = run(policy, trace, serving)
        assert together.requests == one_by_one.requests
        assert together.rounds.to_table().equals(one_by_one.rounds.to_table())


def test_many_rounds_are_run_ahead(monkeypatch):
    stretches = []
    skip = TapedBatch.skip
    monkeypatch.setattr(
        TapedBatch, "skip", lambda self, count: (stretches.append(count), skip(self, count))
    )
    records = run("plain", make_trace(60, longest=90), PLAIN_SERVING)
    assert sum(stretches) > 0.3 * len(records.rounds)
