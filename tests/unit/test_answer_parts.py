"""Answers are replayed in parts: what was recorded late in answers comes late in answers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.answer_parts import PART_TOKENS, in_parts, part_names, part_of_all, tokens_of_parts
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.fit import Fit
from codesign.planner.behaviour import chain_behaviour, observe_all, token_shares
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.sim import simulate
from codesign.sim.acceptance import load_recordings
from codesign.sim.stretches import Luck

LONG, SHORT = 3 * PART_TOKENS, 48
SECOND, LAST = f"chat from token {PART_TOKENS}", f"chat from token {2 * PART_TOKENS}"


def recording(number: int, length: int) -> Recording:
    """No token is drafted in the first part of an answer, each one behind it."""
    ranks = np.where(np.arange(length) < PART_TOKENS, -1, 0)
    return Recording(number, ranks, np.log(np.tile([0.6, 0.2], (length, 1))))


def profile(*lengths: int, kinds: tuple[str, ...] = ("chat",)) -> AcceptanceProfile:
    return AcceptanceProfile(
        {kind: tuple(recording(i, length) for i, length in enumerate(lengths)) for kind in kinds}
    )


WHOLE = profile(LONG, LONG, LONG, LONG, SHORT)
PARTS = in_parts(WHOLE)


def test_every_token_is_in_the_part_of_its_position():
    sizes = {kind: [len(r.ranks) for r in group] for kind, group in PARTS.recordings.items()}
    assert sizes == {"chat": [64] * 4 + [48], SECOND: [64] * 4, LAST: [64] * 4}
    assert PARTS.num_tokens == WHOLE.num_tokens
    for part, kind in enumerate(("chat", SECOND, LAST)):
        assert (PARTS.recordings[kind][2].ranks == (0 if part else -1)).all()


@pytest.mark.parametrize("lengths", [(SHORT,) * 9, (LONG,) * 3, (2 * PART_TOKENS - 1,) * 9])
def test_a_kind_of_which_too_little_is_known_stays_whole(lengths):
    made = profile(*lengths)
    assert in_parts(made) is made


def test_the_last_part_has_no_end_and_there_are_four_at_most():
    found = in_parts(profile(*(9 * PART_TOKENS,) * 4))
    assert [len(group[0].ranks) for group in found.recordings.values()] == [64, 64, 64, 6 * 64]


def test_parts_have_names_in_their_order_also_of_all_kinds_together():
    mixed = in_parts(profile(*(LONG,) * 4, kinds=("chat", "code")))
    assert part_names("chat", mixed) == ["chat", SECOND, LAST]
    assert part_names("", mixed) == ["", part_of_all(SECOND), part_of_all(LAST)]
    assert part_names("chat", WHOLE) == ["chat"]
    spans = load_recordings(mixed).spans
    assert set(spans[part_of_all(LAST)]) == {*spans[LAST], *spans[LAST.replace("chat", "code")]}
    assert set(spans[""]) == {*spans["chat"], *spans["code"]}


def test_tokens_of_answers_by_part():
    assert tokens_of_parts(np.array([30, 64, 500]), 3).tolist() == [
        [30, 0, 0], [64, 0, 0], [64, 64, 372],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["chat", "not recorded"])
def test_an_answer_plays_the_first_part_first_and_the_last_to_its_end(kind):
    luck = Luck.of(PARTS, [kind] * 20, [600] * 20, seed=3)
    hits = np.concatenate(
        [
            np.array([r.ranks[i] for r in g for i in range(len(r.ranks))])
            for g in PARTS.recordings.values()
        ]
    )
    for request in range(20):
        agreed = hits[luck.path(request, 600)] == 0
        assert not agreed[:PART_TOKENS].any()
        assert agreed[PART_TOKENS:].all()
        assert luck.path(request, 100, PART_TOKENS) == luck.path(request, 164)[PART_TOKENS:]


def fit_of(recorded: AcceptanceProfile) -> Fit:
    step, quick = (StepTime.linear(alpha=0.0, gamma=0.0, delta=d) for d in (0.01, 0.0005))
    cost = RoundCost(step, quick, step, quick, kv_tokens=10**6)
    return Fit("", "", 0.0, {"1": cost}, Calibration(), recorded, {})


def trace(output_tokens: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "arrival": np.arange(20.0) * 100,
            "prompt_tokens": 10,
            "output_tokens": output_tokens,
            "category": "chat",
        }
    )


@pytest.mark.parametrize("policy", ["chain-3", "tree-4x2x3", "batch-tree-8x2x3"])
def test_long_answers_are_predicted_to_accept_more(policy):
    candidate = Candidate(Deployment(1, 0), parse_policy(policy), 1)
    records = {
        n: simulate(trace(n), candidate, fit_of(WHOLE), serving=Serving(), seed=1)
        for n in (60, 400)
    }
    rounds = {
        n: found.rounds.to_table().query("num_emitted_tokens > 0") for n, found in records.items()
    }
    short, long = (rounds[n]["num_emitted_tokens"].mean() for n in (60, 400))
    assert short < 1.1
    assert long > 2.0


def test_the_screen_weighs_parts_by_the_tokens_of_the_trace():
    fit = fit_of(WHOLE)
    shares = token_shares(trace(128), fit.answers)
    assert shares == {"chat": 0.5, SECOND: 0.5}
    assert token_shares(trace(32), fit.answers) == {"chat": 1.0}
    # Half of the tokens come one a round, half four a round.
    assert chain_behaviour(3, fit.answers, shares).emitted == pytest.approx(1.6, rel=0.03)
    tree = parse_policy("tree-4x1x3")
    few, many = (
        observe_all([tree], fit, token_shares(trace(n), fit.answers))[tree].emitted
        for n in (32, 1000)
    )
    assert few == 1.0
    assert many > 3.0


def test_all_parts_of_all_kinds_are_seen_by_the_screen_and_weighed_by_their_tokens():
    kinds = ("chat", "code", "long", "mathematics", "retrieval", "summary")
    fit = fit_of(profile(*(LONG,) * 4, kinds=kinds))
    requests = pd.concat([trace(96).assign(category=kind) for kind in kinds], ignore_index=True)
    shares = token_shares(requests, fit.answers)
    assert len(shares) == 12
    # Of 96 tokens 64 come one a round, 32 four a round or (a tree of three levels) nearly.
    for policy in ("chain-3", "tree-4x1x3"):
        spec = parse_policy(policy)
        found = observe_all([spec], fit, shares)[spec]
        assert found.emitted == pytest.approx(96 / (64 + 32 / 4), rel=0.02)
