"""Runs whose heads are read as int8 codes, by the reference on a CPU, have the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.kernels import head_codes
from codesign.policy.options import RequestOptions
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling


def serve(pair, policy, requests, sampling):
    candidate = Candidate(Deployment(1, 0), parse_policy(policy), 3)
    setup = rank_setup(
        candidate, requests, target=pair.target_dir, draft=pair.draft_dir, device="cpu",
        dtype="float32", sampling=sampling,
    )  # fmt: skip
    return run_on_ranks(setup, candidate, requests)


@pytest.fixture
def coded(monkeypatch):
    """From the call on, forwards take codes; how many rows were sampled by them, and ranked."""
    counts = {"sampled": 0, "ranked": 0}

    whole_sample, whole_rank = head_codes.sample_rows, head_codes.coarse_logits

    def sample(codes, x_TD, *args, **options):
        counts["sampled"] += len(x_TD)
        return whole_sample(codes, x_TD, *args, **options)

    def rank(codes, x_TD):
        counts["ranked"] += len(x_TD)
        return whole_rank(codes, x_TD)

    def start():
        monkeypatch.setattr(head_codes, "takes", lambda head: True)
        monkeypatch.setattr(head_codes, "sample_rows", sample)
        monkeypatch.setattr(head_codes, "coarse_logits", rank)
        return counts

    return start


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=3)], ids=str)
@pytest.mark.parametrize("policy", ["plain", "tree-4x2x3"])
def test_tokens_are_those_of_whole_heads(pair, make_requests, coded, policy, sampling):
    requests = make_requests(4)
    wanted = serve(pair, "plain", requests, sampling).outputs
    counts = coded()
    found = serve(pair, policy, requests, sampling)
    assert found.outputs == wanted
    assert counts["sampled"] > sum(map(len, wanted.values())) / 4
    assert (counts["ranked"] > 0) == (policy != "plain")


@pytest.mark.parametrize("policy", ["plain", "tree-4x2x3"])
def test_requests_of_different_temperatures_share_the_codes(pair, make_requests, coded, policy):
    ways = [Sampling(), Sampling(0.8, seed=3), Sampling(1.5, seed=4)]
    requests = [
        replace(request, options=RequestOptions(sampling=ways[i % 3]))
        for i, request in enumerate(make_requests(4))
    ]
    wanted = serve(pair, "plain", requests, Sampling()).outputs
    counts = coded()
    assert serve(pair, policy, requests, Sampling()).outputs == wanted
    assert counts["sampled"] > sum(map(len, wanted.values())) / 4


def test_cuts_of_the_vocabulary_read_whole_heads(pair, make_requests, coded):
    requests, sampling = make_requests(2), Sampling(0.8, top_k=5, seed=3)
    wanted = serve(pair, "plain", requests, sampling).outputs
    counts = coded()
    assert serve(pair, "plain", requests, sampling).outputs == wanted
    assert counts["sampled"] == 0
