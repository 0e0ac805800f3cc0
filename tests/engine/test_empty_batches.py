"""Policies that price their rounds by a measured fit, where a batch runs empty."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codesign.config import Serving
from codesign.engine.run import PolicySetup
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.speculation import parse_policy

TARGET = replace(StepTime.linear(alpha=1e-7, gamma=1e-4, delta=1e-2), cross=1e-9)
DRAFT = replace(StepTime.linear(alpha=1e-8, gamma=1e-5, delta=1e-3), cross=1e-10)
COST = RoundCost(TARGET, DRAFT, TARGET, DRAFT)


@pytest.mark.parametrize(
    "policy",
    ["batch-tree-8x2x4", "specserve-4", "turbospec-4", "adaserve-4x2x32", "async-batch-tree-8x4x4"],
)
@pytest.mark.parametrize(("answer", "chunk"), [(1, None), (6, 8)])
def test_a_policy_prices_a_round_in_which_nobody_decodes(
    serve, make_requests, policy, answer, chunk
):
    requests = [replace(make_requests(2, max_new_tokens=answer)[1], request_id=0)]
    setup = PolicySetup(parse_policy(policy), cost=COST, slo_tpot=0.05)
    run = serve(policy, requests, setup=setup, max_batch=2, serving=Serving(prefill_chunk=chunk))
    assert run.records.notes == []
