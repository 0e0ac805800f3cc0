"""Free drafts are impossible: every part of speculation takes time in the simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.fit import Fit
from codesign.metrics import Metrics, summarise
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import FAMILIES, parse_policy
from codesign.sim import simulate

FREE = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.0)
TARGET = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.006)
PREFILL = StepTime.linear(alpha=0.0, gamma=1e-5, delta=0.006)
NOTHING = RoundCost(TARGET, FREE, PREFILL, FREE, kv_tokens=4000)
# First draft tokens are taken in 0.8 of rounds whatever came before: 2.95 tokens a round of three.
PROFILE = AcceptanceProfile.independent([0.8, 0.1], num_tokens=20_000, seed=0)
SERVING = Serving()
PARTS = {
    "draft forwards": {"draft": replace(FREE, seconds=(0.0005,))},
    "verified rows": {"target": replace(TARGET, gamma=0.0002)},
    "host work": {"reroot": 0.0005},
}


def served(
    policy: str,
    cost: RoundCost,
    deployment: str = "1",
    *,
    batch: int = 1,
    num: int = 40,
    serving: Serving = SERVING,
    slo: SLO | None = None,
) -> Metrics:
    requests = pd.DataFrame(
        {
            "arrival": np.zeros(num) if batch > 1 else np.arange(num) * 100.0,
            "prompt_tokens": 200,
            "output_tokens": 200,
            "category": "",
        }
    )
    fit = Fit("", "", 0.0, {deployment: cost}, Calibration(), PROFILE, {})
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), batch)
    return summarise(simulate(requests, candidate, fit, serving=serving, slo=slo, seed=2))


def tpot(policy: str, cost: RoundCost, deployment: str = "1") -> float:
    found = served(policy, cost, deployment).tpot_mean
    assert found is not None
    return found


def test_only_drafts_that_cost_nothing_gain_as_much_as_they_emit():
    metrics = served("chain-3", NOTHING)
    gain = tpot("plain", NOTHING) / metrics.tpot_mean
    assert gain == pytest.approx(metrics.acceptance_length, rel=0.02)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_round_takes_time(part):
    dear = replace(NOTHING, **PARTS[part])
    assert tpot("chain-3", dear) > 1.03 * tpot("chain-3", NOTHING)
    gain = tpot("plain", dear) / tpot("chain-3", dear)
    assert gain < 0.97 * served("chain-3", dear).acceptance_length


def test_messages_take_time_where_the_draft_has_workers_of_its_own():
    near, far = (replace(NOTHING, link=seconds) for seconds in (0.0, 0.0005))
    policy = "async-tree-4x2x3"
    assert tpot(policy, far, "1+1") == pytest.approx(
        tpot(policy, near, "1+1") + 0.001 / served(policy, near, "1+1").acceptance_length, rel=0.02
    )


SPECULATIVE = [family.spec.label for family in FAMILIES if family.spec.has_draft]


@pytest.mark.parametrize("serving", [Serving(), Serving(prefill_chunk=64)], ids=["whole", "chunks"])
@pytest.mark.parametrize("policy", SPECULATIVE)
def test_a_drafts_prompt_takes_time_under_every_policy(policy, serving):
    deployment = "1+1" if parse_policy(policy).is_async else "1"
    dear = replace(NOTHING, draft_prefill=replace(FREE, gamma=0.001))  # 0.2 s for a prompt
    free, paid = (
        served(policy, cost, deployment, num=5, serving=serving, slo=SLO(tpot=0.02)).latency_mean
        for cost in (NOTHING, dear)
    )
    # On workers of its own the draft runs the prompt beside the target's prompt and first round.
    assert paid - free > (0.2 - 0.03 if deployment == "1+1" else 0.2 - 1e-9)


def test_a_drafts_kv_rows_leave_room_for_fewer_requests():
    roomy, tight = NOTHING, replace(NOTHING, kv_tokens=2000)
    batches = [served("chain-3", cost, batch=32).mean_batch for cost in (roomy, tight)]
    assert batches[1] < 0.7 * batches[0]
    assert served("chain-3", tight, batch=32).seconds > served("chain-3", roomy, batch=32).seconds


def test_plain_decoding_has_the_room_that_a_draft_would_take():
    cost = replace(NOTHING, kv_tokens=2000, plain_kv_tokens=4000)
    shared = served("plain", replace(cost, plain_kv_tokens=None), batch=32)
    alone = served("plain", cost, batch=32)
    assert alone.mean_batch > 1.4 * shared.mean_batch
    assert alone.seconds < shared.seconds
    tight = replace(cost, plain_kv_tokens=None)
    assert served("chain-3", cost, batch=32) == served("chain-3", tight, batch=32)


def test_the_kv_rows_of_outcomes_that_may_not_come_true_leave_room_for_fewer_requests():
    cost = replace(NOTHING, kv_tokens=900)  # two requests of 400 and 25 rows, one of 400 and 65
    few, many = (served(f"ssd-4x{n}", cost, "1+1", batch=32) for n in (1, 3))
    assert few.mean_batch == pytest.approx(2.0, abs=0.1)
    assert many.mean_batch == 1.0
