"""Rounds of each recorded request."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.campaign.alone import rounds_per_token
from codesign.acceptance import AcceptanceProfile, Recording
from codesign.policy.speculation import build_speculation, parse_policy


def recorded(*agreements: str) -> AcceptanceProfile:
    """One request each, in which the draft's first choice is right where there is a 1."""
    log_probs = np.log([0.6, 0.2])
    group = [
        Recording(i, np.array([int(c) - 1 for c in text]), np.tile(log_probs, (len(text), 1)))
        for i, text in enumerate(agreements)
    ]
    return AcceptanceProfile({"chat": tuple(group[:1]), "code": tuple(group[1:])})


def rounds(policy: str, *agreements: str) -> list[float]:
    spec = build_speculation(parse_policy(policy))
    found = rounds_per_token(spec, recorded(*agreements), hears_early=policy.startswith("async"))
    return [found[number] for number in range(len(agreements))]


@pytest.mark.parametrize("policy", ["chain-1", "chain-3", "tree-4x2x2", "async-tree-4x2x2"])
def test_a_request_of_which_nothing_is_accepted_takes_a_round_for_each_token(policy):
    assert rounds(policy, "0" * 48) == [1.0]


def test_a_chain_emits_what_is_accepted_and_one_more_of_each_request_by_itself():
    assert rounds("chain-1", "1" * 49, "0" * 49) == pytest.approx([0.5, 1.0])
    assert rounds("chain-3", "0" * 49, "1" * 49, "10" * 24 + "1") == pytest.approx([1.0, 0.25, 0.5])


def test_the_first_token_comes_with_the_prompt():
    assert rounds("chain-1", "0" + "1" * 48) == rounds("chain-1", "1" * 49)


def test_a_deep_chain_makes_more_of_luck_than_a_shallow_one():
    draws = np.random.default_rng(0).random((40, 48)) < 0.7
    texts = ["".join("01"[int(hit)] for hit in row) for row in draws]
    deep, shallow = (np.array(rounds(policy, *texts)) for policy in ("chain-5", "chain-1"))
    assert deep.std() / deep.mean() > 1.5 * shallow.std() / shallow.mean()
