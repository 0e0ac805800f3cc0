"""The CPU engine shares memory and steps as a plan says; no token differs from plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codesign.config import Deployment
from codesign.engine.run import run_candidate
from codesign.plan import Candidate
from codesign.policy.options import RequestOptions
from codesign.policy.speculation import parse_policy
from tests.engine.test_paged_serving import (
    SERVINGS,
    long_pair,
    mixed_requests,
    own_ways,
    plain,
)

__all__ = ["long_pair", "plain"]


@pytest.fixture
def on_cpu(long_pair):
    def run(policy, requests, how, *, draft_workers=0):
        serving, max_kv_tokens = SERVINGS[how]
        candidate = Candidate(Deployment(1, draft_workers), parse_policy(policy), 3)
        return run_candidate(
            candidate, requests, target=long_pair.target, draft=long_pair.draft, serving=serving,
            max_kv_tokens=max_kv_tokens, check=True,
        )  # fmt: skip

    return run


@pytest.mark.parametrize(("policy", "how"), [("plain", how) for how in SERVINGS] + [
    ("tree-4x2x2", "preemption"), ("chain-3", "all")
])  # fmt: skip
def test_no_way_of_sharing_changes_a_token(on_cpu, plain, policy, how):
    serving, max_kv_tokens = SERVINGS[how]
    ours = on_cpu(policy, own_ways(mixed_requests()), how)
    assert ours.outputs == plain(own_ways(mixed_requests()))
    told = ours.records.requests
    assert any(r.num_preemptions for r in told) == (max_kv_tokens < 2000)
    assert any(r.cached_tokens for r in told) == serving.prefix_cache
    if serving.prefill_chunk:
        assert ours.records.rounds.column("prefill_tokens").max() <= serving.prefill_chunk


def test_a_draft_in_a_process_of_its_own_runs_prompts_in_chunks_beside_rounds(on_cpu, plain):
    requests = own_ways(mixed_requests())
    ours = on_cpu("async-tree-4x2x2", requests, "all", draft_workers=1)
    assert ours.outputs == plain(requests)
    assert sum(r.num_accepted_tokens for r in ours.records.requests) > 0


def test_decoding_goes_on_beside_a_long_prompt(on_cpu, plain):
    """Between two tokens of a request no more prompt tokens run than a chunk has."""
    first, second, *_ = mixed_requests()
    requests = [replace(second, request_id=0, max_new_tokens=40), replace(first, request_id=1)]
    requests[1] = replace(requests[1], options=RequestOptions(speculates=False))
    ours = on_cpu("plain", requests, "chunks")
    assert ours.outputs == plain(requests)
    rounds = ours.records.rounds
    both = (rounds.column("prefill_tokens") > 0) & (rounds.column("batch") > 0)
    assert rounds.column("prefill_tokens")[both].max() <= 100
    assert both.sum() >= 10, "rounds of one request and chunks of the other share steps"
