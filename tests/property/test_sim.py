"""Invariants of the simulator over random traces, policies, limits and step times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import ROUTINGS, SLO, Deployment, Serving
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.records import SPANS, RunRecords
from codesign.sim import simulate

POLICIES = (
    "plain", "chain-1", "chain-4", "threshold-4@0.5", "tree-5x2x2", "async-tree-5x2x1",
    "async-tree-3x1x4", "specserve-3",
)  # fmt: skip
EPSILON = 1e-9
PROFILE = AcceptanceProfile.independent([0.5, 0.2, 0.1], num_tokens=300, seed=2)

seconds = st.floats(0.0, 0.1, allow_subnormal=False)
requests = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 40), st.integers(1, 15)), min_size=1, max_size=8
)


@st.composite
def step_times(draw: st.DrawFn) -> StepTime:
    return StepTime.linear(
        alpha=draw(st.sampled_from([0.0, 1e-5])),
        gamma=draw(st.sampled_from([0.0, 1e-3])),
        delta=draw(st.floats(1e-4, 0.1)),
    )


@st.composite
def costs(draw: st.DrawFn) -> RoundCost:
    return RoundCost(
        *(draw(step_times()) for _ in range(4)),
        reroot=draw(seconds),
        link=draw(seconds),
        slowdown=draw(st.floats(0.0, 2.0)),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[pd.DataFrame, Candidate, int, RunRecords]:
    trace = pd.DataFrame(draw(requests), columns=["arrival", "prompt_tokens", "output_tokens"])
    spec = parse_policy(draw(st.sampled_from(POLICIES)))
    deployment = Deployment(1, 1) if spec.is_async else Deployment(2)
    candidate = Candidate(deployment, spec, draw(st.integers(1, 4)))
    fit: Any = SimpleNamespace(
        costs={deployment.label: draw(costs())},
        calibration=Calibration(),
        acceptance=PROFILE,
        answers=PROFILE,
    )
    longest = int((trace["prompt_tokens"] + trace["output_tokens"]).max()) + spec.kv_rows
    max_kv_tokens = longest + draw(st.integers(0, 100))
    slo = SLO(tpot=draw(st.sampled_from([None, 0.05])))
    records = simulate(
        trace,
        candidate,
        fit,
        slo=slo,
        serving=Serving(max_kv_tokens=max_kv_tokens),
        seed=draw(st.integers(0, 9)),
    )
    return trace, candidate, max_kv_tokens, records


@given(runs())
def test_every_request_is_served_once_and_emits_what_it_should(run):
    trace, _, _, records = run
    assert [r.request_id for r in records.requests] == list(range(len(trace)))
    assert [r.output_tokens for r in records.requests] == trace["output_tokens"].tolist()
    emitted = sum(r.num_emitted_tokens for r in records.rounds)
    assert emitted + len(trace) == trace["output_tokens"].sum()  # one token each by prefill
    assert sum(r.prefill_tokens for r in records.rounds) <= trace["prompt_tokens"].sum()


@given(runs())
def test_requests_and_rounds_tell_the_same_tokens(run):
    _, _, _, records = run
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        in_requests = sum(getattr(r, name) for r in records.requests)
        assert in_requests == sum(getattr(r, name) for r in records.rounds)
    assert sum(r.num_rounds for r in records.requests) == sum(r.batch for r in records.rounds)
    for r in records.rounds:
        assert r.rows == r.batch + r.num_draft_tokens
        assert r.num_emitted_tokens == r.batch + r.num_accepted_tokens
        assert r.num_accepted_tokens <= r.num_draft_tokens


@given(runs())
def test_time_never_goes_backwards(run):
    _, _, _, records = run
    for r in records.requests:
        assert r.arrival <= r.admitted + EPSILON
        assert r.admitted < r.first_token <= r.finish <= records.seconds + EPSILON
    assert records.seconds <= max(r.finish for r in records.requests) + EPSILON
    for r in records.rounds:
        assert r.prefill >= 0.0
        assert all(getattr(r, span) >= 0.0 for span in SPANS)


@given(runs())
def test_spans_add_up_to_the_time_between_rounds(run):
    _, _, _, records = run
    ends = [r.start + r.prefill + r.seconds for r in records.rounds]
    starts = [r.start for r in records.rounds[1:]]
    for end, start in zip(ends, starts, strict=False):
        assert end <= start + EPSILON
        if end < start - EPSILON:  # nobody was being served, or only prefilled
            across = [r for r in records.requests if r.admitted < end - EPSILON]
            assert all(r.finish <= end + EPSILON for r in across)
    emitted = [r for r in records.requests if r.output_tokens > 1]
    assert all(any(abs(r.finish - end) < EPSILON for end in ends) for r in emitted)


@given(runs())
def test_limits_of_batch_and_kv_memory_are_kept(run):
    _, candidate, max_kv_tokens, records = run
    max_rows, kv_rows = candidate.speculation.max_rows, candidate.speculation.kv_rows
    for r in records.rounds:
        assert 1 <= r.batch <= candidate.max_batch
        assert r.rows <= r.batch * max_rows
    for joining in records.requests:
        inside = [
            r for r in records.requests if r.admitted <= joining.admitted < r.finish - EPSILON
        ]
        assert len(inside) <= candidate.max_batch
        needs = [r.prompt_tokens + r.output_tokens + kv_rows for r in inside]
        assert sum(needs) <= max_kv_tokens


@given(runs())
def test_requests_join_in_order_of_arrival(run):
    _, _, _, records = run
    ordered = sorted(records.requests, key=lambda r: (r.arrival, r.request_id))
    admitted = [r.admitted for r in ordered]
    assert admitted == sorted(admitted)


@st.composite
def served(draw: st.DrawFn) -> tuple[pd.DataFrame, Candidate, int, RunRecords]:
    """Runs with everything that a server can do: chunks, a cache, eviction, replicas, a pool."""
    trace = pd.DataFrame(draw(requests), columns=["arrival", "prompt_tokens", "output_tokens"])
    trace["prompt_tokens"] *= draw(st.sampled_from([1, 30]))
    blocks = st.lists(st.integers(0, 3), min_size=8, max_size=8)
    trace["hash_ids"] = [draw(blocks)[: n // 512 + 1] for n in trace["prompt_tokens"]]
    spec = parse_policy(draw(st.sampled_from(POLICIES)))
    deployment = Deployment(
        1,
        1 if spec.is_async else 0,
        replicas=draw(st.integers(1, 3)),
        prefill_workers=draw(st.integers(0, 1)),
    )
    candidate = Candidate(deployment, spec, draw(st.integers(1, 4)))
    fit: Any = SimpleNamespace(
        costs={label: draw(costs()) for label in ("1", "1+1")},
        calibration=Calibration(),
        acceptance=PROFILE,
        answers=PROFILE,
    )
    longest = int((trace["prompt_tokens"] + trace["output_tokens"]).max()) + spec.kv_rows
    max_kv_tokens = longest + draw(st.integers(0, 200))
    serving = Serving(
        max_kv_tokens=max_kv_tokens,
        prefill_chunk=draw(st.sampled_from([None, 1, 64])),
        prefix_cache=draw(st.booleans()),
        preemption=draw(st.booleans()),
        routing=draw(st.sampled_from(ROUTINGS)),
    )
    records = simulate(trace, candidate, fit, serving=serving, seed=draw(st.integers(0, 9)))
    return trace, candidate, max_kv_tokens, records


@given(served())
def test_whatever_the_server_does_no_request_is_lost_and_no_token_is_emitted_twice(run):
    trace, _, _, records = run
    assert [r.output_tokens for r in records.requests] == trace["output_tokens"].tolist()
    assert all(r.finish is not None for r in records.requests)
    by_prompts = len(trace) + sum(r.num_preemptions for r in records.requests)
    emitted = int(records.rounds.column("num_emitted_tokens").sum())
    # An evicted request's prompt may have been incomplete; then it emitted nothing.
    assert trace["output_tokens"].sum() - by_prompts <= emitted
    assert emitted <= trace["output_tokens"].sum() - len(trace)
    in_requests = sum(r.num_accepted_tokens for r in records.requests)
    assert in_requests == records.rounds.column("num_accepted_tokens").sum()


@given(served())
def test_whatever_the_server_does_each_replica_does_one_step_at_a_time(run):
    _, candidate, _, records = run
    for r in records.requests:
        assert r.arrival - EPSILON <= r.admitted < r.first_token <= r.finish <= records.seconds
        assert r.cached_tokens < r.prompt_tokens
    ends = dict.fromkeys(range(candidate.deployment.replicas), -EPSILON)
    for r in records.rounds:
        assert r.start >= ends[r.replica] - EPSILON
        assert min(r.prefill, r.target, r.draft, r.reroot, r.link_there, r.link_back) >= 0.0
        ends[r.replica] = r.start + r.prefill + r.seconds


@given(served())
def test_whatever_the_server_does_memory_and_batch_limits_are_kept(run):
    _, candidate, max_kv_tokens, records = run
    for r in records.rounds:
        assert 0 <= r.batch <= candidate.max_batch
        assert r.rows <= r.batch * candidate.speculation.max_rows
        if all(request.cached_tokens == 0 for request in records.requests):
            assert r.context + r.rows <= max_kv_tokens or r.batch == 1
