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
from codesign.fit.shipped import shipped_pair
from codesign.metrics import summarise
from codesign.planner.screen import Screened, behaviours_of, screen
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.sim import simulate

STEP = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.01)  # a row more costs nothing
FREE = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.0)
COST = RoundCost(STEP, STEP, FREE, FREE, kv_tokens=1500)
PROFILE = AcceptanceProfile.independent([0.7, 0.1], num_tokens=2000, seed=0)


def screened(
    cost: RoundCost, *policies: str, gap: float = 0.01, slo: SLO | None = None
) -> Screened:
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
    return screen(candidates, requests, fit, slo=slo or SLO(), serving=Serving())


def test_load_is_the_work_over_what_a_full_batch_does():
    # 150 rows on average: 10 requests run at once; each needs a second, 100 arrive per second
    assert screened(COST, "plain").load == pytest.approx([100 / 10], rel=0.01)
    assert screened(COST, "plain", gap=1.0).load == pytest.approx([1 / 10], rel=0.01)


def test_plain_decoding_has_the_room_that_a_draft_would_take():
    more = replace(COST, plain_kv_tokens=3000)
    before, after = screened(COST, "plain", "chain-3"), screened(more, "plain", "chain-3")
    assert after.load[0] == pytest.approx(before.load[0] / 2)
    assert after.load[1] == pytest.approx(before.load[1])


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


def test_a_draft_s_prompt_delays_the_second_token_and_not_the_first():
    slow = replace(COST, draft_prefill=StepTime.linear(alpha=0.0, gamma=0.0, delta=2.0))
    slo = SLO(ttft=0.5)
    before, after = (screened(c, "chain-3", gap=1e3, slo=slo) for c in (COST, slow))
    assert after.attained == pytest.approx(before.attained, rel=0.01)
    assert after.tpot == pytest.approx(before.tpot + 2.0 / 100, rel=0.01)
    assert after.latency == pytest.approx(before.latency + 2.0, rel=0.01)


def alone(num: int, output_tokens: int | list[int], category: str = "") -> pd.DataFrame:
    """Requests of which each is over before the next one comes."""
    lengths = np.resize(output_tokens, num)
    return pd.DataFrame(
        {"arrival": np.arange(num) * 1e3, "prompt_tokens": 100, "output_tokens": lengths}
    ).assign(category=category)


def ratios(requests: pd.DataFrame, fit: Fit, *policies: str) -> list[tuple[float, float]]:
    """Mean TPOT and mean latency of each policy, screened over simulated."""
    deployment = parse_deployment(next(iter(fit.costs)))
    candidates = [Candidate(deployment, parse_policy(policy), 1) for policy in policies]
    serving = Serving(max_kv_tokens=10**6)
    found = screen(candidates, requests, fit, slo=SLO(), serving=serving)
    pairs = []
    for candidate, tpot, latency in zip(candidates, found.tpot, found.latency, strict=True):
        figures = [
            summarise(simulate(requests, candidate, fit, serving=serving, seed=seed), SLO())
            for seed in range(3)
        ]
        tpots, latencies = zip(*((f.tpot_mean, f.latency_mean) for f in figures), strict=True)
        pairs.append((float(tpot / np.mean(tpots)), float(latency / np.mean(latencies))))
    return pairs


def test_what_a_last_round_emits_beyond_the_answer_is_not_counted():
    free = replace(COST, draft=FREE)
    fit = Fit("", "", 0.0, {"1": free}, Calibration(), PROFILE, {})
    for found in ratios(alone(200, 13), fit, "plain", "chain-2", "chain-5", "tree-4x2x3"):
        assert found == pytest.approx((1.0, 1.0), abs=0.05)


def test_forwards_that_the_last_rounds_leave_out_are_not_counted():
    slow = replace(COST, target=FREE)
    fit = Fit("", "", 0.0, {"1": slow}, Calibration(), PROFILE, {})
    for found in ratios(alone(200, 25), fit, "chain-2", "chain-5", "tree-4x2x3"):
        assert found == pytest.approx((1.0, 1.0), abs=0.05)


@pytest.mark.parametrize("category", ["", "chat"])
def test_trees_and_chains_of_a_pair_are_rated_alike(category):
    """Trees were rated 6 to 9 % faster than chains on requests of no kind, or 3 % slower."""
    path = shipped_pair("h100", "llama-3-70b:int4", "llama-3.2-3b:int4")
    assert path is not None
    fit = Fit.load(path)
    requests = alone(100, [40, 120, 350], category)
    found = ratios(requests, fit, "plain", "chain-3", "tree-4x2x2", "tree-8x4x3", "tree-16x8x5")
    for figures in zip(*found, strict=True):
        assert max(figures) / min(figures) < 1.05
