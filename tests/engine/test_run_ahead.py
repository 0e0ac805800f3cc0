"""A draft's ranks run ahead of their host: the same drafts, and nearly every guess confirmed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine.gpu import growth, step_rows
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.run import PolicySetup
from codesign.policy.cost import Calibration
from codesign.policy.speculation import parse_policy
from codesign.policy.trees import BestTree
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest


@dataclass
class Drafted:
    """A run, all that was sent to be verified in it, and what ranks guessed."""

    outputs: dict[int, list[int]]
    candidates: list
    num_guesses: int
    num_confirmed: int


@pytest.fixture
def serve(pair, watched_drafts):
    """Serve requests on CPU ranks; ``ahead=False``: the host asks for every step."""

    def run(policy, requests, *, ahead=True, ranks=1, max_batch=1, serving=None, limit=4096,
            calibration=None, **options) -> Drafted:  # fmt: skip
        spec = parse_policy(policy)
        candidate = Candidate(Deployment(ranks, int(spec.is_async)), spec, max_batch)
        with watched_drafts(is_async=spec.is_async, ahead=ahead) as watched:
            faults = []
            shares = {"serving": serving, "max_kv_tokens": limit}
            setup = rank_setup(
                candidate, requests, target=pair.target_dir, draft=pair.draft_dir, device="cpu",
                dtype="float32", check=True, policy=PolicySetup(spec, calibration=calibration),
                **shares, **options,
            )  # fmt: skip
            setup = replace(setup, draft_ranks=0)
            result = run_on_ranks(
                setup, candidate, requests, **shares,
                inspect=lambda rank: faults.extend(m.num_faults() for m in rank.models.values()),
            )  # fmt: skip
        assert not any(faults)
        assert not result.records.notes
        return Drafted(
            result.outputs, watched.candidates, watched.num_guesses, watched.num_confirmed
        )

    return run


POLICIES = ("tree-8x4x4", "chain-5", "async-tree-8x4x6", "tree-12x10x3")


@pytest.mark.parametrize(
    ("policy", "ranks"), [*((policy, 1) for policy in POLICIES), ("async-tree-8x4x6", 2)]
)
def test_drafts_are_those_that_the_host_alone_would_send(serve, make_requests, policy, ranks):
    requests = make_requests(2, max_new_tokens=40)
    calibration = Calibration(0.85, 0.25) if ranks == 1 else None
    options = {"sampling": Sampling(0.7, seed=3), "ranks": ranks, "calibration": calibration}
    alone = serve(policy, requests, ahead=False, **options)
    ours = serve(policy, requests, **options)
    assert ours.outputs == alone.outputs
    assert ours.candidates == alone.candidates
    assert alone.num_guesses == 0
    assert ours.num_guesses > len(ours.candidates)
    assert ours.num_confirmed > 0.99 * ours.num_guesses


def test_a_batch_runs_ahead_once_a_single_request_is_left(serve, make_requests):
    requests = [
        BoundRequest(r.request_id, 0.0, "", r.prompt_ids, 12 * (1 + r.request_id))
        for r in make_requests(3)
    ]
    alone = serve("tree-8x4x3", requests, ahead=False, max_batch=3)
    ours = serve("tree-8x4x3", requests, max_batch=3)
    assert ours.outputs == alone.outputs
    assert ours.candidates == alone.candidates
    assert 0 < ours.num_confirmed == ours.num_guesses < 2 * len(ours.candidates)


@pytest.mark.parametrize("policy", ["tree-8x4x4", "async-tree-8x4x12"])
def test_pages_for_the_rows_of_guesses_are_there(serve, make_requests, policy):
    serving = Serving(preemption=True, prefill_chunk=100)
    requests = make_requests(3, max_new_tokens=30)
    alone = serve(policy, requests, ahead=False, serving=serving)
    ours = serve(policy, requests, serving=serving, page_rows=16)
    assert ours.outputs == alone.outputs
    assert ours.candidates == alone.candidates
    assert ours.num_confirmed > 0.99 * ours.num_guesses > 0


def test_a_wrong_guess_costs_time_alone(serve, make_requests, monkeypatch):
    """Ranks that choose by other weights than the host's."""
    requests = make_requests(2, max_new_tokens=40)
    alone = serve("async-tree-8x4x6", requests, ahead=False)
    monkeypatch.setattr(BestTree, "weighing", Calibration(0.1, 3.0))
    ours = serve("async-tree-8x4x6", requests)
    assert ours.outputs == alone.outputs
    assert ours.candidates == alone.candidates
    assert 0 < ours.num_confirmed < 0.9 * ours.num_guesses


def test_steps_ahead_are_attended_in_pairs_where_their_contexts_ask_for_it(
    serve, make_requests, monkeypatch
):
    requests = make_requests(2, max_new_tokens=60)
    alone = serve("tree-8x4x4", requests, ahead=False)
    long, span, ran = 32, 4, []
    hidden = RankForward.hidden

    def noted(forward, rows, slabs, scratch, *, in_pairs=False):
        new = rows.kv_rows_T[rows.slots_T != slabs.scratch_slot].tolist()
        ran.extend((place, in_pairs) for place in new[:1])
        return hidden(forward, rows, slabs, scratch, in_pairs=in_pairs)

    monkeypatch.setattr(step_rows, "SPAN", span)
    monkeypatch.setattr(growth, "SPAN", span)
    monkeypatch.setattr(RankForward, "hidden", noted)
    monkeypatch.setattr(RankForward, "pairs_may_do_more", lambda *_: True)
    monkeypatch.setattr(
        RankForward, "pairs_do_more", lambda _, crowd: crowd.spans > crowd.requests * long // span
    )
    ours = serve("tree-8x4x4", requests)
    assert ours.outputs == alone.outputs
    assert ours.candidates == alone.candidates
    assert ours.num_confirmed > 0.99 * ours.num_guesses > 0
    assert not any(in_pairs for context, in_pairs in ran if context < long)
    # A chain of three steps stays as it began, in front of the context's end.
    found = [in_pairs for context, in_pairs in ran if context >= long + 3 * 8]
    assert found, "no context was long"
    assert all(found)


@pytest.mark.parametrize(("policy", "draft_ranks"), [("async-tree-8x4x4", 1), ("tree-8x4x4", 0)])
def test_followers_and_a_draft_apart_change_no_token(serve, pair, make_requests, policy,
                                                     draft_ranks):  # fmt: skip
    requests = make_requests(2)
    spec = parse_policy(policy)
    candidate = Candidate(Deployment(2, 2 * draft_ranks), spec, 1)
    setup = rank_setup(
        candidate, requests, target=pair.target_dir, draft=pair.draft_dir, device="cpu",
        dtype="float32", check=True,
    )  # fmt: skip
    ours = run_on_ranks(setup, candidate, requests)
    assert not ours.records.notes
    plain = Candidate(Deployment(2, 0), parse_policy("plain"), 1)
    setup = rank_setup(
        plain, requests, target=pair.target_dir, draft=None, device="cpu", dtype="float32"
    )
    assert ours.outputs == run_on_ranks(setup, plain, requests).outputs
