"""Rounds of plain decoding that ranks begin by themselves, and those that wait for their host."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import Serving, parse_deployment
from codesign.policy.ahead import LEAD
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.sim import quiet_rounds, simulate, tape_batch

STEP, AHEAD, PROMPT = 0.02, 0.003, 0.05
QUICK = STEP - AHEAD
PROFILE = AcceptanceProfile.independent([0.5], num_tokens=500, seed=3)


def constant(seconds: float) -> StepTime:
    return StepTime.linear(alpha=0.0, gamma=0.0, delta=seconds)


TARGET = replace(constant(STEP), ahead=AHEAD)
ROOMY = Serving(max_kv_tokens=10**6)


def rounds_of(
    arrivals: list[float],
    outputs: list[int],
    *,
    policy: str = "plain",
    deployment: str = "2",
    target: StepTime = TARGET,
    max_batch: int = 8,
    serving: Serving = ROOMY,
    speculates: bool = True,
) -> pd.DataFrame:
    dear = constant(0.5)
    prompts = constant(PROMPT), constant(0.0)
    cost = RoundCost(target, dear, *prompts, shares_forwards=False, deciding=1e-3)
    fit = SimpleNamespace(
        costs={"2": cost, "1+1": cost}, origin="fitted", calibration=Calibration(),
        acceptance=PROFILE, answers=PROFILE,
    )  # fmt: skip
    requests = pd.DataFrame({"arrival": arrivals, "prompt_tokens": 20, "output_tokens": outputs})
    if not speculates:
        requests["speculates"] = False
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), max_batch)
    return simulate(requests, candidate, fit, serving=serving, seed=0).round_table()


def waited(rounds: pd.DataFrame) -> list[int]:
    """Rounds of several requests whose step takes as long as one that the host asks for."""
    several = rounds.loc[rounds["batch"] > 1]
    assert set(several["target"].round(9)) <= {STEP, QUICK}
    return several.index[several["target"] > QUICK + 1e-9].tolist()


def test_a_round_behind_another_one_of_the_same_requests_does_not_wait():
    assert waited(rounds_of([0.0, 0.0], [9, 9])) == [0]


@pytest.mark.parametrize("policy", ["specserve-4", "batch-tree-8x2x4"])  # drafts take too long
def test_rounds_in_which_a_policy_looks_wait_and_most_of_its_rest_does_not(policy):
    rounds = rounds_of([0.0, 0.0], [99, 99], policy=policy)
    assert (rounds["rows"] == 2).all()
    looks = rounds.index[rounds["draft"] > 0.0].tolist()
    assert 0 in looks
    assert set(looks) <= set(waited(rounds))
    assert len(waited(rounds)) < 0.5 * len(rounds)


def test_who_comes_late_joins_a_round_later():
    start = PROMPT  # of both
    for early, joins in ((LEAD + 1e-6, 4), (LEAD - 1e-6, 5)):
        late = start + STEP + 3 * QUICK - early  # of the fourth round's end
        rounds = rounds_of([0.0, 0.0, late], [12, 12, 4])
        assert rounds.index[rounds["batch"] == 3][0] == joins
        assert waited(rounds)[:2] == [0, joins]  # its own round waits


def test_who_comes_late_but_finds_no_place_changes_nothing():
    late = PROMPT + STEP + 3 * QUICK - 0.01
    rounds = rounds_of([0.0, 0.0, late], [12, 12, 4], max_batch=2)
    assert waited(rounds) == [0]


@pytest.mark.parametrize(("outputs", "waits"), [([9, 4, 9], True), ([9, 9, 4], False)])
def test_an_end_costs_nothing_if_it_was_the_last_row(outputs, waits):
    rounds = rounds_of([0.0] * 3, outputs)
    assert waited(rounds) == [0, 3] if waits else [0]


def test_a_smaller_bucket_and_a_place_that_someone_waits_for_need_the_host():
    nine = rounds_of([0.0] * 9, [9] * 8 + [4], max_batch=9)
    assert waited(nine) == [0, 3]  # eight fit the bucket of eight
    full = rounds_of([0.0] * 4, [9, 9, 4, 9], max_batch=3)
    assert waited(full) == [0, 3]


@pytest.mark.parametrize(("count", "waits"), [(128, [0]), (129, [0, 1])])
def test_rounds_of_several_forwards_wait(count, waits):
    assert waited(rounds_of([0.0] * count, [3] * count, max_batch=count)) == waits


@pytest.mark.parametrize("case", ["split", "older fit", "tree"])
def test_others_are_as_before(case):
    """Splits ask for every step, and older fits do not know; trees have no such rounds."""
    changes = {
        "split": {"policy": "async-tree-2x1x1", "deployment": "1+1"},
        "older fit": {"target": constant(STEP)},
        "tree": {"policy": "tree-2x1x1"},
    }[case]
    target = changes.pop("target", TARGET)
    plain = {**changes, "target": constant(STEP)}
    for speculates in (True, False):
        asked, found = (
            rounds_of([0.0, 0.3], [20, 20], speculates=speculates, **each)
            for each in (plain, {**changes, "target": target})
        )
        assert found.equals(asked)


@pytest.mark.parametrize("preemption", [False, True])
def test_rounds_run_together_are_those_of_one_after_another(monkeypatch, preemption):
    rng = np.random.default_rng(4)
    arrivals = np.cumsum(rng.exponential(0.2, 40)).tolist()
    outputs = rng.integers(2, 60, 40).tolist()
    serving = Serving(max_kv_tokens=250, preemption=True) if preemption else ROOMY

    def run(fewest: int, arrays: int) -> pd.DataFrame:
        monkeypatch.setattr(tape_batch, "_FEWEST_AHEAD", fewest)
        monkeypatch.setattr(quiet_rounds, "_FEWEST_ARRAYS", arrays)
        return rounds_of(arrivals, outputs, serving=serving)

    one_by_one = run(10**9, 2)
    assert 0.1 < len(waited(one_by_one)) / len(one_by_one) < 0.6
    for arrays in (2, 10**9):
        assert run(2, arrays).equals(one_by_one)


def test_steps_behind_a_chunk_of_a_prompt_are_asked_for():
    rounds = rounds_of(
        [0.0, 0.0, 0.2], [40, 40, 9], serving=Serving(max_kv_tokens=10**6, prefill_chunk=8)
    )
    behind = rounds.index[rounds["prefill_tokens"].gt(0).shift(1, fill_value=False)].tolist()
    several = set(rounds.index[rounds["batch"] > 1])
    assert set(behind) & several <= set(waited(rounds))
    assert len(waited(rounds)) < 0.5 * len(several)


@pytest.mark.parametrize("policy", ["plain", "specserve-4", "batch-tree-8x2x4"])
def test_where_requests_take_turns_nobody_waits_for_a_step_that_has_not_begun(policy):
    """Nine rows are twice as dear as eight; the eleventh request comes late in a round of turns."""
    stairs = StepTime(0.0, (1, 8, 9, 16), (STEP, STEP, 2.0 * STEP, 2.0 * STEP), ahead=AHEAD)
    many = {"policy": policy, "target": stairs, "max_batch": 16}
    rounds = rounds_of([0.0] * 10, [30] * 10, **many)
    turn = rounds.loc[(rounds["running"] > rounds["batch"]) & (rounds.index > 3)].iloc[0]
    late = turn["start"] + turn["target"] + turn["draft"] - LEAD / 2.0
    found = rounds_of([0.0] * 10 + [late], [30] * 10 + [9], **many)
    joined = found.index[found["prefill_tokens"] > 0][-1]
    assert found["start"][joined] == pytest.approx(late + LEAD / 2.0)
