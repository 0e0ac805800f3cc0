"""Speculative output equals plain decoding token for token, whatever the policy and the timing."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import pytest

from codesign.engine import DraftSource, PolicySetup
from codesign.errors import InputError
from codesign.models import NGRAM
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.options import RequestOptions
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling

SAMPLINGS = {
    "greedy": Sampling(),
    "0.7": Sampling(temperature=0.7, seed=3),
    "1.0": Sampling(temperature=1.0, seed=4),
    "1.0, top-p": Sampling(temperature=1.0, top_p=0.9, seed=4),
}
SERIAL = [
    "chain-1",
    "chain-3",
    "chain-5",
    "threshold-5@0.4",
    "tree-8x4x2",
    "tree-4x1x3",
    "static-tree-3x2x1",
]


def step_time(seconds: float) -> StepTime:
    return StepTime.linear(alpha=1e-7, gamma=seconds / 100, delta=seconds)


COST = RoundCost(
    target=step_time(0.01),
    draft=step_time(0.001),
    prefill=step_time(0.01),
    draft_prefill=step_time(0.001),
)


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("policy", SERIAL)
def test_serial_speculation_changes_no_token(
    serve, serve_plain, make_requests, policy, sampling, max_batch
):
    requests = make_requests(5 if max_batch > 1 else 3, max_new_tokens=16)
    plain = serve_plain(requests, max_batch=max_batch, sampling=sampling)
    ours = serve(policy, requests, max_batch=max_batch, sampling=sampling)
    assert ours.outputs == plain.outputs
    assert len(ours.records.rounds) < len(plain.records.rounds)


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    "policy",
    [
        "specserve-5",
        "specserve-5-no-drafter",
        "specserve-4-no-prior",
        "specserve-5-no-slo",
        "turbospec-4",
        "adaserve-4x2x24",
        "batch-tree-8x2x4",
    ],
)
def test_adaptive_speculation_changes_no_token(
    serve, serve_plain, make_requests, policy, sampling, max_batch
):
    requests = make_requests(6 if max_batch > 1 else 3, max_new_tokens=16)
    setup = PolicySetup(parse_policy(policy), cost=COST, slo_tpot=0.05)
    plain = serve_plain(requests, sampling=sampling, max_batch=max_batch)
    ours = serve(policy, requests, sampling=sampling, setup=setup, max_batch=max_batch)
    assert ours.outputs == plain.outputs
    assert ours.records.rounds[2].num_draft_tokens > 0


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_disaggregated_speculation_changes_no_token(
    serve, serve_plain, make_requests, sampling, max_batch
):
    requests = make_requests(5)
    plain = serve_plain(requests, max_batch=max_batch, sampling=sampling)
    chance = random.Random(0)
    delays = [chance.choice([0.0, 0.0, 0.003, 0.01]) for _ in range(400)]
    ours = serve(
        "async-tree-8x4x2",
        requests,
        max_batch=max_batch,
        sampling=sampling,
        draft_delay=delays.__getitem__,
    )
    assert ours.outputs == plain.outputs
    assert not ours.records.notes
    assert len(ours.records.rounds) < len(plain.records.rounds)


@pytest.mark.parametrize(
    "policy",
    [
        "inflight-tree-8x4x2",
        "async-batch-tree-8x2x4",
        "pearl-4",
        "amusd-6",
        "pipeinfer-4x2x3",
        "ssd-3x2",
    ],
)
def test_every_way_to_draft_beside_the_verification_changes_no_token(
    serve, serve_plain, make_requests, policy
):
    requests = make_requests(5)
    sampling = SAMPLINGS["0.7"]
    setup = PolicySetup(parse_policy(policy), cost=COST)
    plain = serve_plain(requests, sampling=sampling)
    ours = serve(policy, requests, sampling=sampling, setup=setup)
    assert ours.outputs == plain.outputs
    assert not ours.records.notes
    assert len(ours.records.rounds) < len(plain.records.rounds)


def test_a_request_s_own_target_decides_who_gets_rows_first(serve, make_requests):
    requests = make_requests(4, max_new_tokens=40)
    hurried = [replace(r, slo_tpot=1e-6 if r.request_id == 2 else 1e6) for r in requests]
    setup = PolicySetup(parse_policy("adaserve-4x2x8"), cost=COST)
    run = serve("adaserve-4x2x8", hurried, setup=setup)
    drafted = [record.num_draft_tokens / record.num_rounds for record in run.records.requests]
    assert drafted[2] == max(drafted)
    assert drafted[2] > 2 * min(drafted)
    assert run.outputs == serve("plain", requests).outputs


def test_a_policy_of_the_simulator_alone_is_refused(serve, make_requests):
    with pytest.raises(InputError, match=r"eagle-8x4x2@0\.96 runs in the simulator only"):
        serve("eagle-8x4x2", make_requests(1))


@pytest.mark.parametrize("policy", ["chain-5", "tree-8x4x2", "async-tree-6x3x2"])
def test_stop_tokens_inside_accepted_runs_end_requests_at_the_same_token(
    serve, serve_plain, make_requests, policy
):
    requests = make_requests(6, max_new_tokens=40)
    free = serve_plain(requests)
    # Tokens from the middle of outputs, so that they come up inside accepted runs.
    stops = frozenset(tokens[len(tokens) // 2] for tokens in free.outputs.values())
    plain = serve_plain(requests, stop_tokens=stops)
    ours = serve(policy, requests, stop_tokens=stops)
    assert ours.outputs == plain.outputs
    assert all(len(tokens) < 40 and tokens[-1] in stops for tokens in ours.outputs.values())
    assert all(record.finish is not None for record in ours.records.requests)


@pytest.mark.parametrize("policy", ["chain-3", "tree-8x4x2", "async-tree-8x4x2"])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_limits_hold_for_very_short_outputs(
    serve, serve_plain, make_requests, policy, max_new_tokens
):
    requests = make_requests(5, max_new_tokens=max_new_tokens)
    plain = serve_plain(requests)
    ours = serve(policy, requests)
    assert ours.outputs == plain.outputs
    assert {len(tokens) for tokens in ours.outputs.values()} == {max_new_tokens}


@pytest.mark.parametrize("policy", ["chain-3", "tree-6x2x2", "specserve-4", "ssd-3x2"])
def test_prompt_look_up_changes_no_token_and_accepts_some(serve, make_requests, pair, policy):
    requests = make_requests(4, max_new_tokens=60)
    plain = serve("plain", requests)
    setup = PolicySetup(parse_policy(policy), cost=COST)
    ours = serve(policy, requests, setup=setup, draft=DraftSource(NGRAM, pair.target_dir))
    assert ours.outputs == plain.outputs
    assert not ours.records.notes
    assert sum(r.num_accepted_tokens for r in ours.records.rounds) > 0


def test_records_agree_with_the_outputs(serve, make_requests):
    run = serve("tree-8x4x2", make_requests(6))
    for record in run.records.requests:
        assert record.output_tokens == len(run.outputs[record.request_id])
        # the first token comes from the prefill, every round adds a bonus token
        assert record.output_tokens == 1 + record.num_rounds + record.num_accepted_tokens
        assert record.arrival <= record.admitted <= record.first_token <= record.finish
    rounds = run.records.rounds
    assert all(r.num_emitted_tokens == r.batch + r.num_accepted_tokens for r in rounds)
    gaps = [
        after.start - before.start - before.prefill - before.seconds
        for before, after in itertools.pairwise(rounds)
    ]
    assert min(gaps) > -1e-6
    assert statistics.median(gaps) < 2e-3  # a busy machine stops between two rounds now and then


def test_stop_strings_without_a_tokenizer_are_refused(serve, make_requests):
    requests = [replace(make_requests(1)[0], options=RequestOptions(stop_strings=("end",)))]
    with pytest.raises(InputError, match=r"request 0 has stop strings and no tokenizer"):
        serve("plain", requests)
