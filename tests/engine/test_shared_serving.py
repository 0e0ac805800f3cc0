"""The CPU engine shares memory and steps as a plan says; no token differs from plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine.run import run_candidate
from codesign.policy.speculation import parse_policy


@pytest.fixture
def on_cpu(pair, new_text):
    def run(policy, requests, serving, max_kv_tokens, *, draft_workers=0):
        candidate = Candidate(Deployment(1, draft_workers), parse_policy(policy), 3)
        return run_candidate(
            candidate, requests, target=pair.target, draft=pair.draft, serving=serving,
            max_kv_tokens=max_kv_tokens, check=True, new_text=new_text,
        )  # fmt: skip

    return run


def test_no_way_of_sharing_changes_a_token(on_cpu, plain_outputs, own_requests, serving):
    how, max_kv_tokens = serving
    ours = on_cpu("plain", own_requests, how, max_kv_tokens)
    assert ours.outputs == plain_outputs(own_requests)
    stopped = [r.request_id for r in own_requests if r.options.stop_strings]
    assert any(1 < len(ours.outputs[number]) < 20 for number in stopped)
    told = ours.records.requests
    assert any(r.num_preemptions for r in told) == (max_kv_tokens < 2000)
    assert any(r.cached_tokens for r in told) == how.prefix_cache
    if how.prefill_chunk:
        assert ours.records.rounds.column("prefill_tokens").max() <= how.prefill_chunk


@pytest.mark.parametrize(
    ("policy", "draft_workers"), [("tree-4x2x2", 0), ("chain-3", 0), ("async-tree-4x2x2", 1)]
)
def test_a_draft_changes_no_token_while_all_is_shared(
    on_cpu, plain_outputs, own_requests, all_at_once, policy, draft_workers
):
    ours = on_cpu(policy, own_requests, *all_at_once, draft_workers=draft_workers)
    assert ours.outputs == plain_outputs(own_requests)
    assert sum(r.num_accepted_tokens for r in ours.records.requests) > 0


@pytest.mark.usefixtures("at_rest")
def test_rounds_at_rest_change_no_token(on_cpu, plain_outputs, own_requests, serving):
    ours = on_cpu("tree-4x2x2", own_requests, *serving)
    assert ours.outputs == plain_outputs(own_requests)
    assert sum(r.num_accepted_tokens for r in ours.records.requests) > 0


def test_decoding_goes_on_beside_a_long_prompt(on_cpu, plain_outputs, mixed_requests):
    """Between two tokens of a request no more prompt tokens run than a chunk has."""
    long, short, *_ = mixed_requests
    requests = [replace(short, request_id=0, max_new_tokens=40), replace(long, request_id=1)]
    ours = on_cpu("plain", requests, Serving(prefill_chunk=100), 1 << 16)
    assert ours.outputs == plain_outputs(requests)
    rounds = ours.records.rounds
    both = (rounds.column("prefill_tokens") > 0) & (rounds.column("batch") > 0)
    assert rounds.column("prefill_tokens")[both].max() <= 100
    assert both.sum() >= 10, "rounds of one request and chunks of the other share steps"
