"""How far a prediction of the validation campaign may be off."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.campaign import intervals, replays, units
from benchmarks.campaign.coverage_luck import usual_coverage
from benchmarks.campaign.prompt_luck import PromptLuck
from codesign.candidate import Interval
from codesign.config import Deployment
from codesign.fit import ROOFLINE
from codesign.validate import Comparison


def comparison(name: str, value: float) -> Comparison:
    return Comparison(name, Interval(value, value, value), value)


def test_an_interval_holds_the_error_of_prompts_by_their_share_of_the_time(machine_fit):
    def sigmas(prefill: float, error: float) -> tuple[float, ...]:
        fit = replace(machine_fit, errors={"2/target": 0.01, "2/prefill": error})
        spans = [("target", 1.0), ("draft", 0.0), ("prefill", prefill)]
        run = SimpleNamespace(
            spans=[comparison(*each) for each in spans[:2]],
            rounds=[comparison(*spans[2])],
            candidate=units.unit(Deployment(2), "plain", units.BATCH).candidate,
        )
        sigma = intervals.times_sigma
        return tuple(sigma(run, fit, waits_for_prompts=waits) for waits in (True, False))

    def with_drift(error: float, seconds: float) -> object:
        drift = machine_fit.drift("2", seconds, requests=units.BATCH.batch)
        return pytest.approx(np.hypot(error / 0.6745, drift))

    steps = with_drift(0.01, 1.0)
    assert sigmas(0.0, 0.5) == (steps, steps)
    assert sigmas(1.0, 0.5) == (with_drift(float(np.hypot(0.005, 0.25)), 2.0), steps)


def test_an_interval_widens_with_the_spread_of_seeds_and_with_the_fits_error():
    likely = intervals.likely
    low, high = likely([1.0, 1.0, 1.0], 0.0).bounds
    assert low == high == 1.0
    narrow, wide = (likely([1.0, 1.1, 0.9], error).bounds for error in (0.0, 0.05))
    assert wide[0] < narrow[0] < 1.0 < narrow[1] < wide[1]
    normal = np.random.default_rng(0).normal(1.0, 0.1, (2000, 9))
    inside = [a <= row[8] <= b for row in normal for a, b in [likely(row[:8].tolist(), 0.0).bounds]]
    assert np.mean(inside) == pytest.approx(0.8, abs=0.03)


def test_an_interval_says_what_each_part_adds_and_known_questions_narrow_it():
    likely, values = intervals.likely, [2.0, 2.2, 1.8]
    whole = likely(values, 0.02, PromptLuck(0.03, 0.1), [4.0, 4.4, 3.6])
    known = likely(values, 0.02, PromptLuck(0.01, 0.05), [4.0, 4.4, 3.6])
    simulations, *others = whole.parts
    assert simulations == pytest.approx(1.8856 * 0.1 / np.sqrt(3), rel=1e-3)
    assert others == pytest.approx([1.2816 * 0.1, 1.2816 * 0.03, 1.2816 * 0.02])
    low, high = whole.bounds
    assert (high - low) / 4.0 == pytest.approx(np.linalg.norm(whole.parts))
    assert known.parts[1:3] == pytest.approx([others[0] / 2, others[1] / 3])
    assert high > known.bounds[1]


def test_a_figure_has_as_much_of_the_prompts_luck_as_it_goes_with_the_tokens_of_a_round():
    likely, luck = intervals.likely, PromptLuck(0.03, 0.1)
    lengths = [2.0, 2.1, 1.9, 2.0]
    [same, half, none] = (
        likely(values, 0.0, luck, lengths).parts
        for values in ([5.0, 5.25, 4.75, 5.0], [5.0, 4.875, 5.125, 5.0], [5.0] * 4)
    )
    assert same[1:3] == pytest.approx([1.2816 * 0.1, 1.2816 * 0.03])
    assert half[1:3] == pytest.approx([1.2816 * 0.05, 1.2816 * 0.015])
    assert none == [0.0] * 4
    chance = likely([5.0, 5.1, 5.1, 5.0], 0.0, luck, [2.0, 2.1, 1.9, 2.0]).parts
    assert chance[1] > 0.01 > 1e-9 > chance[2]  # which no tokens explain


def test_what_unsure_steps_do_to_a_replay_is_in_its_interval():
    likely_replay, luck = intervals.likely_replay, PromptLuck(0.03, 0.05)
    draws, values, lengths = [2.0, 2.4, 1.6, 2.2, 1.8], [2.0, 2.1, 1.9], [1.0, 1.05, 0.95]
    _, served, recorded, steps = likely_replay(draws, values, luck, lengths).parts
    assert (served, recorded) == pytest.approx((1.2816 * 0.05, 1.2816 * 0.03))
    one, alone = (intervals.likely(v, 0.0).parts[1] for v in (draws, values))
    assert steps**2 + alone**2 == pytest.approx(one**2)
    sure = likely_replay([2.0, 2.0], values, luck, lengths)
    assert (sure.parts[0], sure.parts[3]) == (0.0, 0.0)


def test_draws_of_a_replay_are_as_unsure_as_the_fit(machine_fit):
    unsure_cost = replays.unsure_cost
    fit = replace(machine_fit, errors={"2/target": 0.02, "2/prefill": 0.0}, steps={})
    generator, cost = np.random.default_rng(0), machine_fit.costs["2"]
    sheets = replace(fit, origin=ROOFLINE)  # of no machine that drifts
    drawn = [unsure_cost(sheets, "2", generator, seconds=0.002, drift=1.0) for _ in range(400)]
    factors = np.array(
        [[each.target(4, 0, n) / cost.target(4, 0, n) for n in (1, 2, 8, 9)] for each in drawn]
    )
    assert np.median(np.abs(np.log(factors)), axis=0) == pytest.approx([0.02] * 4, rel=0.15)
    together = np.corrcoef(factors.T)
    assert together[2, 3] == pytest.approx(1.0)
    assert np.abs(together[np.triu_indices(3, 1)]).max() < 0.2
    sure = replace(fit, errors={})
    for drift in (-1.0, 2.0):  # of one machine
        each = unsure_cost(sure, "2", generator, seconds=0.002, drift=drift)
        logs = np.log([each.target(4, 0, n) / cost.target(4, 0, n) for n in (1, 8)])
        assert logs == pytest.approx([drift * fit.drift("2", 0.002, requests=n) for n in (1, 8)])
    arrays = drawn[0].target.of_arrays([4, 4], 0, [1, 8])
    assert arrays.tolist() == [drawn[0].target(4, 0, 1), drawn[0].target(4, 0, 8)]
    assert {each.prefill(9) for each in drawn} == {cost.prefill(9)}
    cost = replace(cost, draft_prefill=replace(cost.draft_prefill, apart=True))
    fit = replace(sheets, costs={"2": cost}, errors={"2/draft_prefill": 0.02})
    for each in (unsure_cost(fit, "2", generator, seconds=0.002, drift=0.0) for _ in range(9)):
        factor = each.draft_prefill(100) / cost.draft_prefill(100)
        once = replace(cost, draft_prefill=cost.draft_prefill.scaled(factor))
        assert each.draft_prompt(100) == pytest.approx(once.draft_prompt(100))


def test_the_coverage_of_plans_that_share_their_prompts_is_mostly_chance():
    """As of one figure it is all or nothing; of many that share nothing it is near 80 %."""

    def runs(names: tuple[str, ...], parts: list[float], deployments: list[str]) -> list[dict]:
        return [
            {"workload": "stream", "label": f"chain-1 on {label}, batch 1",
             "parts": dict.fromkeys(names, parts)}
            for label in deployments
        ]  # fmt: skip

    each, both = [str(number) for number in range(200)], ("acceptance_length", "tpot_mean")
    assert usual_coverage(runs(both, [0.0, 0.02, 0.01, 0.0], each)) == (0.0, 1.0)
    low, high = usual_coverage(runs(both, [0.02, 0.0, 0.0, 0.0], each))
    assert 0.76 < low < 0.8 < high < 0.84
    steps = ("tpot_mean",), [0.0, 0.0, 0.0, 0.02]
    low, high = usual_coverage(runs(*steps, each))
    assert 0.74 < low < 0.8 < high < 0.86
    assert usual_coverage(runs(*steps, ["2"] * 200)) == (0.0, 1.0)
    assert usual_coverage([{"workload": "stream", "label": "chain-1 on 2"}]) is None
