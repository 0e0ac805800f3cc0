"""What a server does beside decoding: chunks of prompts, prefix cache, eviction, routing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import Serving, parse_deployment
from codesign.errors import InputError
from codesign.fit.step_forms import prompt_time
from codesign.metrics import summarise, ttft
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.records import RunRecords
from codesign.sim import simulate
from codesign.sim.tape_batch import TapedBatch

PROFILE = AcceptanceProfile.independent([0.6, 0.2], num_tokens=800, seed=2)
STEP, TOKEN, FIRST = 0.02, 1e-3, 0.01  # seconds of a decoding step, a prompt token, a prefill


def make_cost(**changes: Any) -> RoundCost:
    steps = {
        "target": StepTime.linear(alpha=0.0, gamma=0.0, delta=STEP),
        "draft": StepTime.linear(alpha=0.0, gamma=0.0, delta=0.002),
        "prefill": StepTime.linear(alpha=0.0, gamma=TOKEN, delta=FIRST),
        "draft_prefill": StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.001),
    }
    return RoundCost(**{**steps, "reroot": 1e-4, "link": 2e-4, **changes})


def run(
    trace: dict[str, Any],
    *,
    deployment: str = "2",
    policy: str = "plain",
    max_batch: int = 8,
    cost: RoundCost | None = None,
    **serving: Any,
) -> RunRecords:
    fit: Any = SimpleNamespace(
        costs=dict.fromkeys(("2", "1", "1+1"), cost or make_cost()),
        calibration=Calibration(),
        acceptance=PROFILE,
        answers=PROFILE,
    )
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), max_batch)
    return simulate(
        pd.DataFrame(trace),
        candidate,
        fit,
        serving=Serving(**{"max_kv_tokens": 100_000, **serving}),
        seed=0,
    )


def busy(num: int = 40, seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "arrival": np.cumsum(rng.exponential(0.05, num)),
        "prompt_tokens": rng.integers(10, 200, num),
        "output_tokens": rng.integers(2, 60, num),
    }


def test_a_long_prompt_does_not_stall_decoding_when_it_comes_in_chunks():
    trace = {"arrival": [0.0, 0.1], "prompt_tokens": [10, 4_000], "output_tokens": [400, 2]}
    whole, chunked = run(trace), run(trace, prefill_chunk=100)
    gaps = [max(r.prefill + r.seconds for r in records.rounds) for records in (whole, chunked)]
    assert gaps[0] == pytest.approx(FIRST + 4_000 * TOKEN + STEP)
    assert gaps[1] <= FIRST + 101 * TOKEN + 1e-9
    assert sum(r.prefill_tokens for r in chunked.rounds) == 4_010


@pytest.mark.parametrize("shares", [True, False])
def test_a_chunk_shares_the_forward_with_the_rows_that_decode_or_has_its_own(shares):
    # One forward of 100 prompt rows and 1 decoding row, or one forward of each.
    trace = {"arrival": [0.0, 0.1], "prompt_tokens": [10, 1_000], "output_tokens": [400, 2]}
    cost = make_cost(shares_forwards=shares)
    rounds = [r for r in run(trace, cost=cost, prefill_chunk=100).rounds if r.prefill_tokens == 100]
    assert len(rounds) == 10
    seconds = max(STEP, FIRST + 101 * TOKEN) if shares else STEP + FIRST + 100 * TOKEN
    for r in rounds:
        assert r.prefill + r.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("serving", [{}, {"prefill_chunk": 100_000}], ids=["whole", "chunks"])
@pytest.mark.parametrize("policy", ["plain", "chain-2"])
def test_prompts_in_one_forward_do_not_attend_to_each_other(policy, serving):
    # With a cost per pair of a row and a row before it, eight prompts of 1,000 have an eighth of
    # the pairs that one of 8,000 has.
    pairs = prompt_time(alpha=0.0, gamma=0.0, delta=0.0, cross=1e-6)
    free = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.0)
    cost = make_cost(prefill=pairs, draft_prefill=pairs, target=free, draft=free, reroot=0.0)
    eight = {"arrival": [0.0] * 8, "prompt_tokens": 1_000, "output_tokens": 9}
    one = {"arrival": [0.0], "prompt_tokens": 8_000, "output_tokens": 9}
    many, single = (run(t, cost=cost, policy=policy, **serving).seconds for t in (eight, one))
    models = 1 if policy == "plain" else 2
    assert single == pytest.approx(models * 1e-6 * 8_000**2 / 2, rel=0.03)
    assert many == pytest.approx(single / 8, rel=0.03)


def test_steps_that_only_run_prompts_are_written_and_counted_apart():
    trace = {"arrival": [0.0], "prompt_tokens": [250], "output_tokens": [3]}
    records = run(trace, prefill_chunk=100)
    assert [r.batch for r in records.rounds] == [0, 0, 0, 1, 1]
    assert summarise(records).mean_batch == 1.0
    assert records.requests[0].first_token == pytest.approx(3 * FIRST + 250 * TOKEN)


def test_prompt_blocks_of_an_earlier_request_are_not_run_again():
    trace = {
        "arrival": [0.0, 5.0, 10.0, 15.0],
        "prompt_tokens": [1_200, 1_200, 1_024, 1_100],
        "output_tokens": 3,
        "hash_ids": [[1, 2, 3], [1, 2, 9], [1, 2], [8, 2, 3]],
    }
    cached = run(trace, prefix_cache=True)
    # Whole blocks of 512 only; at least one token of a prompt is always run.
    assert [r.cached_tokens for r in cached.requests] == [0, 1_024, 1_023, 0]
    assert ttft(cached.requests[1]) == pytest.approx(FIRST + 176 * TOKEN)
    assert all(r.cached_tokens == 0 for r in run(trace).requests)


def test_idle_prefix_blocks_make_room_least_recently_used_first():
    trace = {
        "arrival": [0.0, 5.0, 10.0, 15.0, 20.0],
        "prompt_tokens": 600,
        "output_tokens": 3,
        "hash_ids": [[1], [2], [1], [3], [2]],
    }
    roomy = run(trace, prefix_cache=True)
    tight = run(trace, prefix_cache=True, max_kv_tokens=1_300)
    assert [r.cached_tokens for r in roomy.requests] == [0, 0, 512, 0, 512]
    assert [r.cached_tokens for r in tight.requests] == [0, 0, 512, 0, 0]


def test_idle_prefix_blocks_make_room_for_a_request_alone_that_grows():
    """As it grows to 1,150 of 1,200 rows, the block of the first request has to go."""
    trace = {
        "arrival": [0.0, 1.0, 60.0],
        "prompt_tokens": [513, 50, 513],
        "output_tokens": [2, 1100, 2],
        "hash_ids": [[1], [], [1]],
    }
    cached = [
        run(trace, prefix_cache=True, preemption=True, max_kv_tokens=rows).requests[2].cached_tokens
        for rows in (1_700, 1_200)
    ]
    assert cached == [512, 0]


def test_requests_that_share_a_prefix_share_its_rows():
    shared = {"arrival": [0.0] * 4, "prompt_tokens": 1_100, "output_tokens": 20}
    alone = {**shared, "hash_ids": [[1, 2], [3, 4], [5, 6], [7, 8]]}
    shared = {**shared, "hash_ids": [[1, 2]] * 4}
    for trace, most in ((alone, 1), (shared, 4)):
        records = run(trace, prefix_cache=True, max_kv_tokens=1_600)
        assert max(r.batch for r in records.rounds) == most


def test_eviction_loses_no_token_and_computes_the_request_again():
    trace = busy()
    tight = run(trace, preemption=True, max_kv_tokens=500, prefill_chunk=64)
    evicted = [r for r in tight.requests if r.num_preemptions]
    assert evicted
    assert [r.output_tokens for r in tight.requests] == trace["output_tokens"].tolist()
    assert sum(r.prefill_tokens for r in tight.rounds) > trace["prompt_tokens"].sum()
    emitted = sum(r.num_emitted_tokens for r in tight.rounds)
    prefilled = len(tight.requests) + sum(r.num_preemptions for r in tight.requests)
    assert trace["output_tokens"].sum() - prefilled <= emitted < trace["output_tokens"].sum()


def test_a_token_that_comes_with_a_prompt_run_again_is_not_a_rounds():
    records = run(busy(), preemption=True, max_kv_tokens=500)
    assert sum(r.num_preemptions for r in records.requests) > 0
    assert summarise(records).acceptance_length == 1.0  # plain decoding


def test_blocks_of_a_prompt_that_was_evicted_before_they_were_run_are_not_in_the_cache():
    trace = {
        "arrival": [0.0, 5.0],
        "prompt_tokens": [1_024, 4_608],
        "output_tokens": [900, 50],
        "hash_ids": [[1, 2], list(range(10, 19))],
    }
    records = run(trace, preemption=True, prefix_cache=True, prefill_chunk=8, max_kv_tokens=6_100)
    assert records.requests[1].num_preemptions == 1
    ran = sum(r.prefill_tokens for r in records.rounds)
    rerun = records.requests[1].prompt_tokens - records.requests[1].cached_tokens
    before = ran - 1_024 - rerun  # before the eviction
    assert 0 < before < 4_608
    assert records.requests[1].cached_tokens <= before  # what was not run cannot be found


def test_kv_rows_never_exceed_the_memory_when_they_are_taken_as_requests_grow():
    records = run(busy(80), policy="chain-3", preemption=True, max_kv_tokens=700)
    assert max(r.context + r.batch * 4 for r in records.rounds) <= 700
    reserved = run(busy(80), policy="chain-3", max_kv_tokens=700)
    assert summarise(records).mean_batch > summarise(reserved).mean_batch


def test_replicas_serve_in_turn_or_by_load():
    long, short = 300, 5
    outputs = [long, short] * 6
    trace = {"arrival": np.arange(12) * 0.3, "prompt_tokens": 10, "output_tokens": outputs}
    turn = run(trace, deployment="2x2", routing="round-robin", max_batch=2)
    assert [r.replica for r in turn.requests] == [0, 1] * 6
    load = run(trace, deployment="2x2", routing="least-loaded", max_batch=2)
    assert {r.replica for r in load.requests if r.output_tokens == long} == {0, 1}
    assert summarise(load).ttft_mean < summarise(turn).ttft_mean
    assert set(load.rounds.column("replica")) == {0, 1}


def test_two_replicas_are_two_servers_with_every_second_request(monkeypatch):
    together: list[int] = []  # rounds that were run at once
    skip = TapedBatch.skip
    monkeypatch.setattr(
        TapedBatch, "skip", lambda batch, count: (together.append(count), skip(batch, count))
    )
    trace = busy(30)
    both = run(trace, deployment="2x2")
    of_both = sorted(together)
    assert of_both, "nothing was run at once"
    together.clear()
    for number in (0, 1):
        half = {name: values[number::2] for name, values in trace.items()}
        alone = run(half)
        finish = [r.finish for r in both.requests if r.replica == number]
        assert finish == pytest.approx([r.finish for r in alone.requests])
    assert of_both == sorted(together), "a replica stops for a request of the other"


def test_prefix_aware_routing_finds_the_replica_that_knows_the_prompt():
    trace = {
        "arrival": np.arange(12) * 1.0,
        "prompt_tokens": 600,
        "output_tokens": 3,
        "hash_ids": [[i % 3] for i in range(12)],
    }
    hits = {
        routing: sum(
            r.cached_tokens > 0
            for r in run(trace, deployment="2x2", routing=routing, prefix_cache=True).requests
        )
        for routing in ("round-robin", "prefix-aware")
    }
    assert hits == {"round-robin": 6, "prefix-aware": 9}


def test_a_crowded_replica_loses_its_pull():
    trace = {
        "arrival": np.arange(40) * 0.01,
        "prompt_tokens": 600,
        "output_tokens": 200,
        "hash_ids": [[1]] * 40,
    }
    records = run(trace, deployment="2x2", routing="prefix-aware", prefix_cache=True, max_batch=4)
    assert {r.replica for r in records.requests} == {0, 1}


def test_a_prompt_pool_runs_prompts_beside_decoding_and_sends_their_rows():
    cost = make_cost(kv_transfer=1e-4)
    trace = {"arrival": [0.0, 1.0], "prompt_tokens": [10, 2_000], "output_tokens": [400, 20]}
    apart = run(trace, deployment="1/p1", cost=cost)
    first, second = apart.requests
    assert max(r.prefill + r.seconds for r in apart.rounds) == pytest.approx(STEP)  # no stall
    assert second.first_token == pytest.approx(1.0 + FIRST + 2_000 * TOKEN)
    joined = second.first_token + 2_000 * 1e-4
    assert joined <= second.finish - 19 * STEP <= joined + STEP + 1e-9
    assert first.finish == pytest.approx(FIRST + 10 * TOKEN + 10 * 1e-4 + 399 * STEP)


def test_a_prompt_pool_serves_one_prompt_after_another():
    trace = {"arrival": [0.0] * 3, "prompt_tokens": 100, "output_tokens": [1, 1, 5]}
    prefill = FIRST + 100 * TOKEN
    records = run(trace, deployment="1/p1")
    assert [r.first_token for r in records.requests] == pytest.approx(
        [prefill * i for i in (1, 2, 3)]
    )
    assert [r.finish == r.first_token for r in records.requests] == [True, True, False]


def test_a_prompt_pool_keeps_rows_until_they_are_taken_and_runs_no_more_than_it_holds():
    # One request decodes at a time, for 50 steps; the pool holds two prompts.
    trace = {"arrival": [0.0] * 5, "prompt_tokens": 100, "output_tokens": 51}
    served = {"deployment": "1/p1", "max_batch": 1}
    roomy, tight = run(trace, **served), run(trace, **served, max_kv_tokens=200)
    prefill, decode = FIRST + 100 * TOKEN, 50 * STEP
    at_once = [prefill * i for i in range(1, 6)]
    assert [r.first_token for r in roomy.requests] == pytest.approx(at_once)
    # The fourth prompt begins when the second request is admitted, which is when the first ends.
    taken = [prefill + decode * i for i in range(5)]
    assert [r.first_token for r in tight.requests] == pytest.approx(
        [*at_once[:3], taken[1] + prefill, taken[2] + prefill]
    )
    assert [r.finish for r in tight.requests] == pytest.approx([t + decode for t in taken])
    with pytest.raises(InputError, match="the workers for prompts hold 80"):
        run(trace, **served, cost=make_cost(kv_tokens=200, plain_kv_tokens=80), policy="chain-1")


@pytest.mark.parametrize("deployment", ["2", "1/p1"])
def test_what_is_no_wait_in_a_queue_is_the_time_that_a_request_takes_alone(deployment):
    trace = {"arrival": np.arange(6) * 0.2, "prompt_tokens": 100, "output_tokens": 20}
    served = {"deployment": deployment, "max_batch": 1, "cost": make_cost(kv_transfer=1e-3)}
    alone = run({**trace, "arrival": [0.0]}, **served).requests[0].finish
    records = run(trace, **served)
    for request in records.requests:
        ran = request.finish - request.arrival - records.queued[request.request_id]
        assert ran == pytest.approx(alone)
    assert records.queued[5] > 0.5


def test_a_prompt_that_is_not_begun_waits_though_it_was_admitted():
    trace = {"arrival": [0.0, 0.0], "prompt_tokens": [1_000, 10], "output_tokens": 2}
    records = run(trace, prefill_chunk=100)
    assert records.requests[1].admitted == 0.0
    assert records.queued == pytest.approx({0: 0.0, 1: 10 * (FIRST + 100 * TOKEN)})
    whole = run(trace)
    assert whole.queued == {0: 0.0, 1: 0.0}


def test_who_was_evicted_waits_again():
    records = run(busy(), preemption=True, max_kv_tokens=500)
    waits = {r.request_id: r.admitted - r.arrival for r in records.requests}
    evicted = [r.request_id for r in records.requests if r.num_preemptions]
    assert all(records.queued[number] > waits[number] + 1e-9 for number in evicted)
    others = waits.keys() - set(evicted)
    assert {n: records.queued[n] for n in others} == pytest.approx({n: waits[n] for n in others})


@pytest.mark.parametrize("deployment", ["2", "1/p1"])
@pytest.mark.parametrize("policy", ["chain-3", "specserve-3"])
@pytest.mark.parametrize("output", [20, 400])
def test_what_a_draft_reads_of_prompts_is_no_row_that_it_drafts(deployment, policy, output):
    trace = {"arrival": [0.0] * 4, "prompt_tokens": 500, "output_tokens": output}
    rounds = run(trace, deployment=deployment, policy=policy, max_batch=4).rounds
    assert max(r.draft_rows for r in rounds) >= 500
    # A request has a row in each forward of a chain, in the first one up to two.
    assert 0 < rounds.most_draft_rows <= 8


def test_the_draft_pays_for_prompts_too():
    trace = {"arrival": [0.0], "prompt_tokens": [5_000], "output_tokens": [30]}
    free = make_cost(draft_prefill=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.0))
    paid = make_cost(draft_prefill=StepTime.linear(alpha=0.0, gamma=1e-3, delta=0.0))
    for serving in ({}, {"prefill_chunk": 500}):
        seconds = [run(trace, policy="chain-2", cost=c, **serving).seconds for c in (free, paid)]
        assert seconds[1] - seconds[0] == pytest.approx(5.0, rel=0.01)


def test_the_memory_of_the_deployment_is_the_limit_where_none_is_given():
    trace = busy(10)
    with pytest.raises(InputError, match="--max-kv-tokens"):
        run(trace, max_kv_tokens=None)
    small = make_cost(kv_tokens=60)
    with pytest.raises(InputError, match="the machine holds 60"):
        run(trace, max_kv_tokens=None, cost=small)
