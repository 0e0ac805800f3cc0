"""The simulator against formulas: queueing, acceptance, and what a round takes.

Step times here do not depend on rows or context unless a test says so, which makes the formulas
exact; random agreement is tested inside a stated number of standard errors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import SLO, Deployment, Serving
from codesign.errors import InputError
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.records import RunRecords
from codesign.sim import simulate

TARGET, DRAFT, PREFILL = 0.02, 0.002, 0.05
ROOMY = 10**9  # KV rows


def constant(seconds: float) -> StepTime:
    return StepTime.linear(alpha=0.0, gamma=0.0, delta=seconds)


def make_cost(**changes: Any) -> RoundCost:
    steps = {
        "target": constant(TARGET),
        "draft": constant(DRAFT),
        "prefill": constant(PREFILL),
        "draft_prefill": constant(0.0),
    }
    return RoundCost(**{**steps, **changes})


def make_fit(profile: AcceptanceProfile, **changes: Any) -> Any:
    cost = make_cost(**changes)
    return SimpleNamespace(
        costs={"2": cost, "1+1": cost},
        origin="fitted",
        calibration=Calibration(),
        acceptance=profile,
        answers=profile,
    )


def iid(*chances: float, num_tokens: int = 50_000) -> AcceptanceProfile:
    return AcceptanceProfile.independent(chances, num_tokens=num_tokens, seed=11)


def make_trace(num: int, *, output: int, prompt: int = 20, gap: float = 0.0) -> pd.DataFrame:
    return pd.DataFrame(
        {"arrival": np.arange(num) * gap, "prompt_tokens": prompt, "output_tokens": output}
    )


def run(
    trace: pd.DataFrame, policy: str, fit: Any, *, max_batch: int = 1, seed: int = 1
) -> RunRecords:
    spec = parse_policy(policy)
    deployment = Deployment(1, 1) if spec.is_async else Deployment(2)
    candidate = Candidate(deployment, spec, max_batch)
    return simulate(trace, candidate, fit, serving=Serving(max_kv_tokens=ROOMY), seed=seed)


def test_waiting_time_without_speculation_is_that_of_an_m_d_1_queue():
    output, load, num = 3, 0.6, 30_000
    service = PREFILL + (output - 1) * TARGET
    rng = np.random.default_rng(7)
    trace = make_trace(num, output=output)
    trace["arrival"] = np.cumsum(rng.exponential(service / load, num))
    records = run(trace, "plain", make_fit(iid(0.5)))
    waits = np.array([r.first_token - r.arrival - PREFILL for r in records.requests])[1_000:]
    batches = waits[: len(waits) // 29 * 29].reshape(29, -1).mean(axis=1)  # nearly independent
    error = batches.std(ddof=1) / np.sqrt(len(batches))
    expected = load * service / (2 * (1 - load))
    assert abs(waits.mean() - expected) < 3 * error
    assert error < 0.06 * expected  # else the line above would prove nothing


def test_requests_in_service_over_time_are_littles_law_of_the_two_tables():
    rng = np.random.default_rng(3)
    trace = make_trace(200, output=9, gap=0.05)
    trace["output_tokens"] = rng.integers(2, 40, 200)
    records = run(trace, "chain-3", make_fit(iid(0.7)), max_batch=6)
    in_rounds = sum(r.batch * (r.prefill + r.seconds) for r in records.rounds)
    in_service = sum(r.finish - r.admitted for r in records.requests)
    assert in_rounds == pytest.approx(in_service, rel=1e-9)
    assert max(r.batch for r in records.rounds) == 6


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_chains_acceptance_length_is_the_geometric_sum(length):
    profile = iid(0.7)
    chance = profile.hit_rate(1)
    trace = make_trace(20, output=2_000)
    records = run(trace, f"chain-{length}", make_fit(profile), max_batch=20)
    emitted = np.array([r.output_tokens - 1 for r in records.requests], float)
    rounds = np.array([r.num_rounds for r in records.requests], float)
    ratios = emitted / rounds
    error = ratios.std(ddof=1) / np.sqrt(len(ratios))
    expected = (1 - chance ** (length + 1)) / (1 - chance)
    # The last round of each request is cut short: at most `length` tokens of 2,000.
    assert abs(emitted.sum() / rounds.sum() - expected) < 4 * error + expected * length / 2_000
    assert error < 0.02 * expected


def test_a_serial_chains_round_takes_its_forwards_one_after_another():
    reroot = 0.001
    records = run(make_trace(2, output=400), "chain-3", make_fit(iid(0.6), reroot=reroot))
    full = [r for r in records.rounds if r.num_expansions == 3 and r.prefill == 0.0]
    assert len(full) > 0.98 * len(records.rounds)
    for r in full:
        assert r.seconds == pytest.approx(3 * DRAFT + TARGET + reroot, rel=1e-12)
        assert (r.draft, r.target, r.reroot) == pytest.approx((3 * DRAFT, TARGET, reroot))
        assert r.link_there == r.link_back == 0.0


def test_an_asynchronous_trees_exposed_drafting_is_miss_rate_times_a_forward():
    # One child per node and two overlapped forwards: the next round is ready if both the drafted
    # token and the bonus token were guessed, which has chance a * a.
    profile = iid(0.7)
    chance = profile.hit_rate(1)
    records = run(make_trace(8, output=1_500), "async-tree-2x1x2", make_fit(profile))
    exposed = np.array([r.draft for r in records.rounds if r.prefill == 0.0])
    assert set(np.round(exposed / DRAFT, 9)) == {0.0, 1.0}
    misses = 1 - chance**2
    error = np.sqrt(misses * (1 - misses) / len(exposed))
    assert abs(exposed.mean() / DRAFT - misses) < 4 * error
    emitted = np.array([r.num_emitted_tokens for r in records.rounds], float)
    assert abs(emitted.mean() - (1 + chance)) < 4 * emitted.std() / np.sqrt(len(emitted))


def test_a_late_overlapped_forward_exposes_its_remainder():
    slow = 0.015  # two of them take longer than the target's 0.02
    fit = make_fit(iid(0.9999, num_tokens=20_000), draft=constant(slow))
    rounds = run(make_trace(1, output=300), "async-tree-2x1x2", fit).rounds
    hits = [r for r in rounds[2:-2] if r.num_expansions == 2]
    assert len(hits) > 100
    for r in hits:
        assert r.draft == pytest.approx(2 * slow - TARGET, rel=1e-9)


def test_messages_cost_two_links_a_round_and_hide_as_much_of_the_overlap():
    link, late = 0.003, 0.011
    fit = make_fit(iid(0.9999, num_tokens=20_000), link=link, draft=constant(late))
    rounds = run(make_trace(1, output=300), "async-tree-2x1x2", fit).rounds
    hits = [r for r in rounds[2:-2] if r.num_expansions == 2]
    assert len(hits) > 100
    for r in hits:
        assert (r.link_there, r.link_back) == pytest.approx((link, link))
        # The overlapped forwards began when the candidates left, one link before verification.
        assert r.draft == pytest.approx(max(2 * late - link - TARGET, 0.0), abs=1e-12)


@pytest.mark.parametrize("slowdown", [0.0, 0.25])
def test_the_target_loses_the_slowdown_for_every_second_of_overlapped_drafting(slowdown):
    fit = make_fit(iid(0.6), slowdown=slowdown)
    rounds = run(make_trace(2, output=300), "async-tree-2x1x2", fit).rounds
    whole = [r for r in rounds[1:] if r.num_draft_tokens and r.prefill == 0.0][:-4]
    seconds = {round(r.target, 12) for r in whole[:100]}
    assert seconds == {round(TARGET + slowdown * 2 * DRAFT, 12)}


def test_the_draft_model_prefills_beside_the_target_when_apart_and_after_it_when_together():
    steps = {"draft_prefill": constant(0.03)}
    trace = make_trace(1, output=30, prompt=100)
    apart = run(trace, "async-tree-2x1x2", make_fit(iid(0.6), **steps)).rounds[0]
    assert (apart.prefill, apart.draft) == (PREFILL, 0.0)
    together = run(trace, "chain-3", make_fit(iid(0.6), **steps)).rounds[0]
    assert (together.prefill, together.draft) == pytest.approx((PREFILL, 0.03 + 2 * DRAFT))
    late = make_fit(iid(0.6), draft_prefill=constant(0.09))
    assert run(trace, "async-tree-2x1x2", late).rounds[0].draft == pytest.approx(0.09 - PREFILL)


def test_step_times_see_rows_and_context_as_the_cost_model_defines_them():
    alpha, gamma = 1e-5, 1e-3
    steps = {
        "target": StepTime.linear(alpha=alpha, gamma=gamma, delta=TARGET),
        "draft": StepTime.linear(alpha=alpha, gamma=gamma, delta=DRAFT),
        "prefill": StepTime.linear(alpha=0.0, gamma=gamma, delta=0.0),
    }
    trace = make_trace(2, output=4, prompt=20)
    fit = make_fit(AcceptanceProfile.independent([0.99999], num_tokens=50, seed=1), **steps)
    first = run(trace, "chain-1", fit, max_batch=2).rounds[0]
    assert first.prefill == pytest.approx(40 * gamma)
    assert (first.rows, first.context, first.draft_rows) == (4, 40, 42)
    assert first.target == pytest.approx(TARGET + 4 * gamma + 40 * alpha)
    plain = run(trace, "plain", fit, max_batch=2)
    assert [(r.rows, r.context) for r in plain.rounds] == [(2, 40), (2, 42), (2, 44)]


def test_time_stands_still_for_nobody_while_the_machine_waits_for_an_arrival():
    records = run(make_trace(2, output=2, gap=100.0), "plain", make_fit(iid(0.5)))
    assert [r.start for r in records.rounds] == pytest.approx([0.0, 100.0])
    assert records.seconds == pytest.approx(100.0 + PREFILL + TARGET)


def test_a_request_of_one_token_ends_with_its_prefill_under_every_policy():
    for policy in ("plain", "chain-3", "tree-4x2x1", "async-tree-4x2x1", "specserve-3"):
        records = run(make_trace(5, output=1), policy, make_fit(iid(0.6)), max_batch=2)
        assert [r.output_tokens for r in records.requests] == [1] * 5
        assert all(r.finish == r.first_token for r in records.requests)
        assert len(records.rounds) == 0


def test_specserve_drafts_less_where_rounds_would_cost_a_request_its_target():
    drafted = []
    for policy in ("specserve-5", "specserve-5-no-slo"):
        records = simulate(
            make_trace(2, output=60),
            Candidate(Deployment(2), parse_policy(policy), 1),
            make_fit(iid(0.9)),
            slo=SLO(tpot=1.02 * TARGET),
            serving=Serving(max_kv_tokens=ROOMY),
            seed=1,
        )
        drafted.append(sum(r.num_draft_tokens for r in records.rounds))
    assert 0 < drafted[0] < drafted[1]


def test_progress_tells_of_every_finished_request():
    calls = []
    candidate = Candidate(Deployment(2), parse_policy("plain"), 2)
    trace = make_trace(5, output=3)
    simulate(
        trace,
        candidate,
        make_fit(iid(0.5)),
        serving=Serving(max_kv_tokens=ROOMY),
        seed=1,
        progress=lambda *call: calls.append(call),
    )
    assert calls == [("simulate", done, 5) for done in range(1, 6)]


def test_a_deployment_that_was_not_measured_is_refused(machine_fit):
    candidate = Candidate(Deployment(4), parse_policy("plain"), 1)
    with pytest.raises(InputError, match=r"no step times for deployment 4.*codesign profile"):
        simulate(
            make_trace(1, output=2),
            candidate,
            machine_fit,
            serving=Serving(max_kv_tokens=9),
            seed=1,
        )


def test_a_request_that_can_never_run_is_refused():
    candidate = Candidate(Deployment(2), parse_policy("chain-3"), 1)
    trace = make_trace(1, output=10, prompt=20)
    fit = make_fit(iid(0.5))
    assert (
        simulate(trace, candidate, fit, serving=Serving(max_kv_tokens=34), seed=1)
        .requests[0]
        .finish
    )
    with pytest.raises(InputError, match="needs 34 KV rows"):
        simulate(trace, candidate, fit, serving=Serving(max_kv_tokens=33), seed=1)


def test_an_empty_prompt_is_refused():
    with pytest.raises(InputError, match="at least 1 prompt token"):
        run(make_trace(1, output=2, prompt=0), "plain", make_fit(iid(0.5)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda trace: trace.iloc[:0], "there is no request"),
        (lambda trace: trace.drop(columns="arrival"), "lack the column arrival"),
        (lambda trace: trace.assign(arrival=float("nan")), "needs a time of arrival"),
        (lambda trace: trace.assign(arrival=float("inf")), "needs a time of arrival"),
    ],
)
def test_what_is_no_trace_is_refused_before_the_simulation(change, reason):
    """From Python: errors of NumPy, pandas and SimPy came of it."""
    trace = make_trace(2, output=2)
    with pytest.raises(InputError, match=reason):
        run(change(trace), "plain", make_fit(iid(0.5)))
