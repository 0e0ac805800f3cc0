"""A request that is played again shows the trees of its simulation, and nothing made up."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.errors import InputError
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import FAMILIES, parse_policy
from codesign.sim import simulate
from codesign.sim.replay import ReplayedRound, replay

PROFILE = AcceptanceProfile.independent([0.5, 0.2, 0.1, 0.05], num_tokens=3_000, seed=5)
SERVING = Serving(max_kv_tokens=2000)
COST = RoundCost(
    target=StepTime.linear(alpha=1e-6, gamma=1e-3, delta=0.02),
    draft=StepTime.linear(alpha=1e-6, gamma=1e-4, delta=0.002),
    prefill=StepTime.linear(alpha=1e-6, gamma=1e-3, delta=0.01),
    draft_prefill=StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.001),
    reroot=1e-4,
    link=2e-4,
)
FIT: Any = SimpleNamespace(
    costs={"2": COST, "1+1": COST},
    calibration=Calibration(),
    acceptance=PROFILE,
    answers=PROFILE,
    errors={},
)
TRACE = pd.DataFrame(
    {
        "arrival": np.arange(6) * 0.1,
        "prompt_tokens": [30, 50, 20, 70, 40, 10],
        "output_tokens": [40, 25, 60, 33, 48, 1],
        "category": "",
    }
)


def candidate(policy: str) -> Candidate:
    spec = parse_policy(policy)
    return Candidate(Deployment(1, 1) if spec.is_async else Deployment(2), spec, 4)


def played(policy: str, request_id: int, seed: int = 0) -> list[ReplayedRound]:
    return replay(TRACE, request_id, candidate(policy), FIT, serving=SERVING, seed=seed)


def test_a_chain_that_is_played_again_does_round_by_round_what_was_simulated():
    records = simulate(TRACE, candidate("chain-3"), FIT, serving=SERVING, seed=4)
    for request in records.requests[:5]:
        rounds = played("chain-3", request.request_id, seed=4)
        assert len(rounds) == request.num_rounds
        assert sum(len(r.accepted) for r in rounds) == request.num_accepted_tokens
        assert sum(len(r.verified) - 1 for r in rounds) == request.num_draft_tokens


@pytest.mark.parametrize(
    "policy", [family.spec.label for family in FAMILIES if family.spec.has_draft]
)
def test_every_token_of_the_request_is_emitted_in_some_round(policy: str):
    rounds = played(policy, 2)
    assert sum(r.num_emitted for r in rounds) == 59  # the first of 60 came with the prompt


@pytest.mark.parametrize("policy", ["tree-8x4x2", "async-tree-8x4x2"])
def test_accepted_nodes_were_verified_and_hang_together(policy: str):
    for r in played(policy, 2):
        assert set(r.accepted) <= r.verified
        for parent, node in zip((0, *r.accepted), r.accepted, strict=False):
            assert r.parents[node] == parent
        assert all(r.parents[node] in r.verified for node in r.verified - {0})
        if r.verified:
            assert len(r.accepted) == r.num_emitted - 1


def test_what_is_kept_is_the_tree_below_the_last_emitted_token():
    rounds = played("async-tree-8x4x2", 2)
    assert any(r.is_hit for r in rounds)
    assert not all(r.is_hit for r in rounds)
    for before, after in pairwise(rounds):
        assert bool(before.kept) == before.is_hit
        if before.is_hit:
            root = min(before.kept)
            shape = sorted(before.depths[n] - before.depths[root] for n in before.kept)
            assert shape == sorted(after.depths[: len(before.kept)])


def test_an_asynchronous_tree_grows_while_the_target_verifies_and_a_serial_one_does_not():
    assert any(len(r.parents) > r.num_sent_from for r in played("async-tree-8x4x2", 2))
    assert all(len(r.parents) == r.num_sent_from for r in played("tree-8x4x2", 2))


def test_a_draft_that_answered_before_the_first_token_was_known_has_nothing_verified():
    first = played("async-tree-8x4x2", 2)[0]
    assert not first.verified
    assert not first.accepted
    assert first.num_emitted == 1


def test_chances_fall_from_the_root_to_the_leaves():
    for r in played("tree-8x4x2", 0):
        assert r.chances[0] == 1.0
        assert all(r.chances[n] <= r.chances[r.parents[n]] for n in range(1, len(r.parents)))


def test_a_request_of_one_token_has_no_round():
    assert played("tree-8x4x2", 5) == []


def test_later_requests_change_nothing_of_earlier_ones():
    alone = replay(TRACE.head(3), 1, candidate("tree-8x4x2"), FIT, serving=SERVING, seed=3)
    assert alone == played("tree-8x4x2", 1, seed=3)


def test_plain_decoding_has_no_tree_to_show():
    with pytest.raises(InputError, match="drafts nothing"):
        played("plain", 0)


def test_a_request_that_is_never_drafted_for_has_no_tree_to_show():
    trace = TRACE.assign(speculates=[True, False, True, True, True, True])
    with pytest.raises(InputError, match="request 1 is never drafted for"):
        replay(trace, 1, candidate("chain-3"), FIT, serving=SERVING, seed=0)


def test_a_request_that_is_not_there_is_one_clear_line():
    with pytest.raises(InputError, match="requests 0 to 5, got 6"):
        played("chain-3", 6)
