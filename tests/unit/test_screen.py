"""The screen's arithmetic, where the answer is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.fit import Fit
from codesign.planner.screen import Screened, behaviours_of, screen
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.speculation import build_speculation, parse_policy

STEP = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.01)  # a row more costs nothing
FREE = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.0)
COST = RoundCost(STEP, STEP, FREE, FREE, kv_tokens=1500)
PROFILE = AcceptanceProfile.independent([0.7, 0.1], num_tokens=2000, seed=0)


def screened(cost: RoundCost, *policies: str, gap: float = 0.01) -> Screened:
    requests = pd.DataFrame(
        {
            "arrival": np.arange(500) * gap,
            "prompt_tokens": 100,
            "output_tokens": 101,
            "category": "",
        }
    )
    fit = Fit("", "", 0.0, {"1": cost}, Calibration(), PROFILE, {})
    candidates = [Candidate(parse_deployment("1"), parse_policy(p), 64) for p in policies]
    return screen(candidates, requests, fit, slo=SLO(), serving=Serving())


def test_load_is_the_work_over_what_a_full_batch_does():
    # 150 rows on average: 10 requests run at once; each needs a second, 100 arrive per second
    assert screened(COST, "plain").load == pytest.approx([100 / 10], rel=0.01)
    assert screened(COST, "plain", gap=1.0).load == pytest.approx([1 / 10], rel=0.01)


def test_plain_decoding_has_the_room_that_a_draft_would_take():
    more = replace(COST, plain_kv_tokens=3000)
    before, after = screened(COST, "plain", "chain-3"), screened(more, "plain", "chain-3")
    assert after.load[0] == pytest.approx(before.load[0] / 2)
    assert after.load[1] == before.load[1]


def test_memory_that_nobody_knows_is_no_limit():
    found = screened(replace(COST, kv_tokens=None), "plain")
    assert found.load == pytest.approx([100 / 64], rel=0.01)


def test_a_draft_s_prompt_is_charged_without_its_root_which_runs_with_all_others():
    root_only = replace(COST, draft_prefill=replace(STEP, apart=True))  # as timed
    assert screened(root_only, "chain-3").load == screened(COST, "chain-3").load
    assert screened(replace(COST, draft_prefill=STEP), "chain-3").load > 1.5


@pytest.mark.parametrize("policy", ["batch-tree-16x4x6", "adaserve-8x2x4", "specserve-8"])
def test_a_policy_s_rows_have_its_own_children_whatever_stands_for_it(policy):
    spec = parse_policy(policy)
    fit = Fit("", "", 0.0, {"1": COST}, Calibration(), PROFILE, {})
    own = build_speculation(spec, goodput=Goodput.of_cost(COST)).fanout
    assert {b.fanout for b in behaviours_of([spec], fit, {"": 1.0})[spec]} == {own}
