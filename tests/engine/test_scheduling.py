"""Requests that join so that targets are kept: simulator and engine alike, and no token differs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.engine.partner import NoDraft
from codesign.engine.refusals import served_requests
from codesign.engine.run import PolicySetup
from codesign.engine.serve import Server
from codesign.engine.serving_log import ServingLog
from codesign.engine.target import Target, nothing
from codesign.errors import InputError, UsageError
from codesign.metrics import summarise
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.protocol import TargetSide
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest
from codesign.sim import simulate
from codesign.sim.acceptance import PROMPT_TOKEN, TRUE_TOKEN

STEP, TOKEN = 0.01, 1e-3  # seconds of a round, and of a prompt's token
COST = RoundCost(
    target=StepTime.linear(alpha=0.0, gamma=0.0, delta=STEP),
    draft=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.001),
    prefill=StepTime.linear(alpha=0.0, gamma=TOKEN, delta=0.0),
    draft_prefill=StepTime.linear(alpha=0.0, gamma=1e-5, delta=0.0),
)
PROFILE = AcceptanceProfile.independent([0.6, 0.2], num_tokens=800, seed=2)
TARGETS = SLO(ttft=0.5, tpot=0.03)
BY_TARGETS = Serving(max_kv_tokens=100_000, scheduling="slo", answer_tokens=20.0)


def burst(num: int = 60) -> pd.DataFrame:
    """Requests that take 0.1 s each, five times as many as can be served for a while."""
    rng = np.random.default_rng(3)
    arrival = np.sort(np.concatenate([rng.uniform(0, 2, num), rng.uniform(2, 12, num // 4)]))
    return pd.DataFrame({"arrival": arrival, "prompt_tokens": 80, "output_tokens": 20})


def simulated(policy: str, serving: Serving, deployment: str = "2", slo: SLO | None = TARGETS):
    fit: Any = SimpleNamespace(
        costs=dict.fromkeys(("2", "1+1"), COST), calibration=Calibration(),
        acceptance=PROFILE, answers=PROFILE,
    )  # fmt: skip
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), 16)
    return simulate(burst(), candidate, fit, serving=serving, slo=slo, seed=0)


@pytest.mark.parametrize("more", [{}, {"preemption": True}, {"prefill_chunk": 64}])
@pytest.mark.parametrize(
    ("policy", "deployment"),
    [("plain", "2"), ("chain-3", "2"), ("batch-tree-8x2x4", "2"), ("async-tree-8x4x2", "1+1")],
)
def test_more_requests_keep_their_targets_in_a_burst(policy, deployment, more):
    shares = []
    for scheduling in ("fcfs", "slo"):
        serving = replace(BY_TARGETS, scheduling=scheduling, **more)
        records = simulated(policy, serving, deployment)
        assert all(r.output_tokens == 20 for r in records.requests)
        shares.append(summarise(records, TARGETS).slo_attainment)
    assert shares[1] > shares[0] + (0.05 if "prefill_chunk" in more else 0.2)


@pytest.mark.parametrize("share", [0.8, 0.92, 0.94, 0.97, 0.99])
def test_as_many_keep_their_targets_as_first_come_first_served_however_close_a_step_is(share):
    rng = np.random.default_rng(1)
    arrival = np.cumsum(rng.exponential(0.25, 300))
    trace = pd.DataFrame({"arrival": arrival, "prompt_tokens": 6, "output_tokens": 40})
    step = replace(COST, target=StepTime.linear(alpha=0.0, gamma=0.0, delta=share * 0.03))
    fit: Any = SimpleNamespace(
        costs={"2": step}, calibration=Calibration(), acceptance=PROFILE, answers=PROFILE
    )
    candidate = Candidate(parse_deployment("2"), parse_policy("plain"), 32)
    slo = SLO(ttft=1.0, tpot=0.03)
    shares = []
    for scheduling in ("fcfs", "slo"):
        serving = Serving(max_kv_tokens=100_000, scheduling=scheduling)
        records = simulate(trace, candidate, fit, serving=serving, slo=slo, seed=0)
        shares.append(summarise(records, slo).slo_attainment)
    assert shares[1] >= shares[0]


def test_a_target_is_needed_and_pools_for_prompts_have_their_own_order():
    with pytest.raises(UsageError, match=r"needs a target. Fix: --slo-ttft-ms"):
        simulated("plain", BY_TARGETS, slo=SLO())
    fit: Any = SimpleNamespace(
        costs={"1": COST}, calibration=Calibration(), acceptance=PROFILE, answers=PROFILE
    )
    candidate = Candidate(parse_deployment("1/p1"), parse_policy("plain"), 16)
    with pytest.raises(InputError, match="has a pool for prompts, which serves who comes first"):
        simulate(burst(), candidate, fit, serving=BY_TARGETS, slo=TARGETS, seed=0)


class Clock:
    """Simulated seconds: rounds and prompts take what the fit says, and nothing else does."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class TimedTarget(Target):
    """A target without a model, whose token is always the true one."""

    def __init__(self, clock: Clock) -> None:
        self.side = TargetSide()
        self._clock = clock

    def open_prompt(self, admission, blocks) -> int:
        return 0

    def run_pieces(self, pieces):
        for piece in pieces:
            self._clock.now += TOKEN * piece.count
            self.side.admit(piece.admission)
        return [self.side.commit_first(piece.request_id, TRUE_TOKEN) for piece in pieces]

    def verify(self, candidates, meanwhile=nothing, goes_on=None):
        self._clock.now += STEP
        meanwhile()
        rows = self.side.verify_rows(candidates)
        return rows, [self.side.judge(r, lambda row: TRUE_TOKEN)[0] for r in rows]

    def free(self, request_id) -> None: ...


def in_the_engine(monkeypatch) -> list[tuple[float | None, float | None, float | None]]:
    clock = Clock()
    monkeypatch.setattr(ServingLog, "now", property(lambda log: clock.now))
    for module in ("serve", "partner"):
        monkeypatch.setattr(f"codesign.engine.{module}.perf_counter", lambda: clock.now)
    monkeypatch.setattr("codesign.engine.serve.sleep", clock.sleep)
    requests = [
        BoundRequest(i, at, "", (PROMPT_TOKEN,) * prompt, output)
        for i, (at, prompt, output) in enumerate(burst().itertuples(index=False))
    ]
    spec: Any = parse_policy("plain")
    shape: Any = SimpleNamespace(max_positions=4096, vocab=1 << 20)
    setup = PolicySetup(spec, COST, slo_tpot=TARGETS.tpot, slo_ttft=TARGETS.ttft)
    schedule = served_requests(requests, spec, shape, 100_000).schedule(
        Candidate(parse_deployment("2"), spec, 16), BY_TARGETS, max_kv_tokens=100_000,
        on_time=setup.on_time(BY_TARGETS),
    )  # fmt: skip
    records = Server(TimedTarget(clock), NoDraft(), schedule, requests).run()
    return [(r.admitted, r.first_token, r.finish) for r in records.requests]


def test_engine_and_simulator_let_the_same_requests_join_at_the_same_times(monkeypatch):
    measured = in_the_engine(monkeypatch)
    predicted = [
        (r.admitted, r.first_token, r.finish) for r in simulated("plain", BY_TARGETS).requests
    ]
    order = np.argsort([admitted for admitted, _, _ in predicted])
    assert list(order) != sorted(order), "somebody must have been overtaken"
    for ours, theirs in zip(measured, predicted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


def test_order_is_arrival_where_nobody_is_late(monkeypatch):
    policy = PolicySetup(parse_policy("plain"), COST, slo_ttft=60.0).on_time(BY_TARGETS)
    assert policy is not None
    spread = [BoundRequest(i, 1.0 * i, "", (7,) * 50, 4) for i in range(6)]
    shape: Any = SimpleNamespace(max_positions=4096, vocab=1 << 20)
    spec: Any = parse_policy("plain")
    schedule = served_requests(spread, spec, shape, 10_000).schedule(
        Candidate(parse_deployment("2"), spec, 2), BY_TARGETS, max_kv_tokens=10_000, on_time=policy
    )
    assert schedule.admit(2.0) == [0, 1]  # the batch is full
    assert list(itertools.islice(schedule.batcher.running, 3)) == [0, 1]
