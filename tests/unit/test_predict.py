from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial

import pandas as pd
import pytest

from codesign.candidate import Candidate
from codesign.config import SLO, Deployment
from codesign.fit import ROOFLINE
from codesign.fit.steps import HeldOut, StepFit
from codesign.planner.predict import (
    Outcome,
    extrapolation_note,
    misses,
    outcome_of,
    prompt_note,
    score,
    spread_over_seeds,
)
from codesign.planner.uncertainty import (
    interval_over_seeds,
    step_error,
    time_error,
    tokens_error,
)
from codesign.policy.speculation import parse_policy
from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords

PLAIN = Candidate(Deployment(2), parse_policy("plain"), 1)
CHAIN = Candidate(Deployment(2), parse_policy("chain-3"), 1)
SHORT, LONG = [40, 64], [64, 192]
score_of = partial(score, output_tokens=SHORT)


def outcome(seed=0, *, max_rows=1, max_draft_rows=1, **figures) -> Outcome:
    spans = {"target": 0.03, "draft": 0.01}
    return Outcome(PLAIN.label, seed, figures, spans, max_rows, max_draft_rows)


def finished(request_id, first, finish, output=11) -> RequestRecord:
    return RequestRecord(
        request_id, "", 0.0, 5, output, admitted=0.0, first_token=first, finish=finish
    )


def test_an_interval_of_one_simulation_is_the_error_of_the_fit():
    interval = interval_over_seeds([2.0], 0.1)
    assert (interval.low, interval.value, interval.high) == pytest.approx((1.8, 2.0, 2.2))


def test_the_spread_of_few_seeds_is_widened_as_students_t_demands():
    interval = interval_over_seeds([1.0, 2.0, 3.0], 0.0)
    # 0.95 quantile of t with 2 degrees of freedom: 2.91999; standard deviation 1.
    assert interval.high - interval.value == pytest.approx(2.91999 * math.sqrt(4 / 3), rel=1e-5)


def test_spread_and_error_add_in_quadrature():
    spread = interval_over_seeds([1.0, 2.0, 3.0], 0.0).high - 2.0
    both = interval_over_seeds([1.0, 2.0, 3.0], 0.5).high - 2.0
    assert both == pytest.approx(math.hypot(spread, 1.0))


def test_no_interval_reaches_below_nothing():
    interval = interval_over_seeds([0.1, 3.0], 0.0)
    assert (interval.low, interval.value) == (0.0, 1.55)
    assert interval.high > 3.0


def test_the_error_of_a_round_weighs_target_and_draft_by_their_time(machine_fit):
    sheets = replace(machine_fit, origin=ROOFLINE)  # of no machine that drifts
    spans = {"target": 0.03, "draft": 0.01}
    of_fit = (0.03 * 0.02 + 0.01 * 0.04) / 0.04
    assert step_error(sheets, CHAIN, spans) == pytest.approx(of_fit)
    drifted = machine_fit.drift("2", 0.04, requests=CHAIN.max_batch)
    standard = math.hypot(0.03 * 0.02, 0.01 * 0.04) / 0.6745 / 0.04  # half of errors are larger
    assert step_error(machine_fit, CHAIN, spans) == pytest.approx(
        1.645 * math.hypot(standard, drifted)
    )
    assert step_error(machine_fit, CHAIN, {}) == 0.0


def test_the_error_of_acceptance_counts_for_speculation_and_not_for_plain(machine_fit):
    fit = replace(machine_fit, errors={**machine_fit.errors, "acceptance": 0.03})
    steps = [step_error(fit, candidate, {"target": 1.0}) for candidate in (PLAIN, CHAIN)]
    assert time_error(fit, PLAIN, {"target": 1.0}, LONG) == steps[0] > 0.02
    found = time_error(fit, CHAIN, {"target": 1.0}, LONG)
    assert found == pytest.approx(math.hypot(steps[1], 1.645 * 0.03))


@pytest.mark.parametrize(
    ("origin", "acceptance_origin", "half"),
    [
        ("fitted", "recorded", 1.645 * 0.03),
        ("fitted", "recorded for inflated-a with inflated-b", 1.645 * 0.03),
        ("roofline", "recorded for a with b, not for this pair", 0.03),
        ("fitted", "recorded for inflated-a with inflated-b, not for this pair", 0.03),
        ("fitted", "made up: 0.7 of first draft tokens", 0.03),
        ("fitted", "imported from vLLM counters (file)", 0.03),
    ],
)
def test_only_of_recordings_of_the_pair_the_error_is_a_standard_error(
    machine_fit, origin, acceptance_origin, half
):
    """Of others it is the most that tokens per round should be off: a half width already."""
    errors = {**machine_fit.errors, "acceptance": 0.03}
    fit = replace(machine_fit, errors=errors, origin=origin, acceptance_origin=acceptance_origin)
    predicted = score_of(CHAIN, [outcome(acceptance_length=2.0)], fit, SLO()).predicted
    assert predicted["acceptance_length"].high == pytest.approx(2.0 * (1 + half))


def test_what_is_known_less_well_of_long_answers_is_in_their_intervals(machine_fit):
    parts = ((1e-4, 2e-4), (2e-4, 9e-4))
    fit = replace(
        machine_fit, errors={**machine_fit.errors, "acceptance": 0.5}, parts_covariance=parts
    )
    assert tokens_error(fit, SHORT) == pytest.approx(0.01)
    # Of 256 tokens 128 lie in either part: the last one has no end.
    assert tokens_error(fit, LONG) == pytest.approx(math.sqrt(0.25e-4 + 2.25e-4 + 1e-4))
    made = [outcome(acceptance_length=2.0, tpot_mean=1.0)]
    for lengths in (SHORT, LONG):
        error = 1.645 * tokens_error(fit, lengths)
        predicted = score(CHAIN, made, fit, SLO(), output_tokens=lengths).predicted
        assert predicted["acceptance_length"].high == pytest.approx(2.0 * (1 + error))
        whole = math.hypot(error, step_error(fit, CHAIN, made[0].spans))
        assert predicted["tpot_mean"].high == pytest.approx(1 + whole)
        assert time_error(fit, CHAIN, made[0].spans, lengths) == pytest.approx(whole)


def test_attainment_may_be_off_by_more_where_answers_are_long(machine_fit):
    fit = replace(machine_fit, parts_covariance=((0.0, 0.0), (0.0, 0.25)))
    values = {f.name: 0 for f in fields(RoundRecord)} | {"target": 1.0, "batch": 1}
    log = RoundLog([RoundRecord(**values)])
    for tokens, worse in ((60, 1.0), (6000, 0.0)):  # the target is a tenth above what it takes
        records = RunRecords([finished(0, 1.0, 1.0 + tokens * 0.1, tokens + 1)], log, 3.0, [])
        made = outcome_of(records, CHAIN, fit, slo=SLO(tpot=0.11), seed=0)
        assert made.figures["slo_attainment_worse"] == worse


def test_a_prediction_is_feasible_when_the_mean_over_the_seeds_meets_the_target(machine_fit):
    outcomes = [outcome(0, tpot_slo=0.04), outcome(1, tpot_slo=0.06)]
    assert score_of(PLAIN, outcomes, machine_fit, SLO(tpot=0.05)).is_feasible
    assert not score_of(PLAIN, outcomes, machine_fit, SLO(tpot=0.049)).is_feasible


def test_what_never_came_makes_a_prediction_infeasible_and_is_left_out_of_it(machine_fit):
    late = [outcome(ttft_slo=math.inf)]
    scored = score_of(PLAIN, late, machine_fit, SLO(ttft=100.0))
    assert not scored.is_feasible
    assert "ttft_slo" not in scored.predicted
    assert misses(late, SLO(ttft=100.0)) == {"ttft": math.inf, "tpot": 0.0}


def test_attainment_is_also_computed_with_longer_and_shorter_latencies(machine_fit):
    # For a target of 0.1 s: with 5 % more time the first one misses it, with 5 % less the third
    # one meets it.
    tpots = (0.1, 0.09, 0.101, 0.2)
    requests = [finished(i, 1.0, 1.0 + 10 * tpot) for i, tpot in enumerate(tpots)]
    values = {f.name: 0 for f in fields(RoundRecord)} | {"target": 1.0, "batch": 1}
    records = RunRecords(requests, RoundLog([RoundRecord(**values)]), 3.0, [])
    made = outcome_of(records, PLAIN, machine_fit, slo=SLO(tpot=0.1), seed=0)
    interval = score_of(PLAIN, [made], machine_fit, SLO(tpot=0.1)).predicted["slo_attainment"]
    assert (interval.low, interval.value, interval.high) == (0.25, 0.5, 0.75)


def test_no_rate_is_above_what_the_trace_offers_and_no_run_shorter(machine_fit):
    requests = [replace(finished(i, i + 1.0, i + 2.0), arrival=float(i)) for i in range(11)]
    values = {f.name: 0 for f in fields(RoundRecord)} | {"target": 1.0, "batch": 1}
    records = RunRecords(requests, RoundLog([RoundRecord(**values)]), 12.0, [])
    fit = replace(machine_fit, errors={"2/target": 0.5}, origin=ROOFLINE)
    made = [outcome_of(records, PLAIN, fit, slo=SLO(), seed=seed) for seed in (0, 1)]
    predicted = score_of(PLAIN, made, fit, SLO(), spread={"goodput": 3.0}).predicted
    assert predicted["throughput"].value == pytest.approx(121 / 12)
    assert predicted["throughput"].high == pytest.approx(121 / 10)  # arrivals end at 10 s
    assert predicted["seconds"].low == pytest.approx(10.0)
    one = score_of(PLAIN, made[:1], fit, SLO(), spread={"goodput": 3.0}).predicted
    assert one["goodput"].high == pytest.approx(11 / 10)


def test_a_time_error_however_large_leaves_a_throughput(machine_fit):
    fit = replace(machine_fit, errors={"2/target": 1.5, "2/draft": 1.5}, origin=ROOFLINE)
    predicted = score_of(PLAIN, [outcome(throughput=20.0)], fit, SLO()).predicted
    assert predicted["throughput"].low == pytest.approx(20.0 / 2.5)
    assert predicted["throughput"].high == pytest.approx(50.0)  # all came at once


def test_shares_stay_between_0_and_1(machine_fit):
    outcomes = [outcome(s, slo_attainment=v) for s, v in enumerate((0.2, 1.0, 1.0))]
    interval = score_of(PLAIN, outcomes, machine_fit, SLO()).predicted["slo_attainment"]
    assert interval.low >= 0
    assert interval.high == 1.0


def test_a_round_is_never_said_to_emit_less_than_a_token(machine_fit):
    fit = replace(machine_fit, errors={**machine_fit.errors, "acceptance": 0.8})
    made = outcome(acceptance_length=1.2, acceptance_rate=0.7, mean_batch=1.1)
    predicted = score_of(CHAIN, [made], fit, SLO()).predicted
    assert predicted["acceptance_length"].low == predicted["mean_batch"].low == 1.0
    assert predicted["acceptance_rate"].high == 1.0
    assert predicted["acceptance_length"].high == pytest.approx(1.2 * (1 + 1.645 * 0.8))


def test_a_batch_is_as_unsure_as_the_time_that_its_requests_take(machine_fit):
    """Of plain decoding, whose seeds do not differ, the interval was a point."""
    plain = replace(PLAIN, max_batch=4)
    error = time_error(machine_fit, plain, {"target": 0.03, "draft": 0.01}, SHORT)
    predicted = score_of(plain, [outcome(mean_batch=2.0)], machine_fit, SLO()).predicted
    assert predicted["mean_batch"].high == pytest.approx(2.0 * (1 + error))
    assert error > 0
    full = score_of(plain, [outcome(mean_batch=3.999)], machine_fit, SLO()).predicted
    assert full["mean_batch"].high == 4


def test_rows_beyond_the_measured_ones_are_called_extrapolated(machine_fit):
    assert extrapolation_note(PLAIN, [outcome(max_rows=32)], machine_fit) == ""
    note = extrapolation_note(PLAIN, [outcome(max_rows=33)], machine_fit)
    assert "33 rows" in note
    assert "extrapolated" in note


def test_draft_rows_beyond_the_measured_ones_are_called_extrapolated(machine_fit):
    forms = {"line": HeldOut(0.01, 0.01, 0.01)}
    step = StepFit(machine_fit.costs["2"].draft, "line", forms, num_shapes=4, most_rows=64)
    label = CHAIN.deployment.label
    fit = replace(machine_fit, steps={f"{label}/draft": step})
    assert extrapolation_note(CHAIN, [outcome(max_draft_rows=64)], fit) == ""
    note = extrapolation_note(CHAIN, [outcome(), outcome(max_draft_rows=65)], fit)
    assert "drafts up to 65 rows at once, but steps were measured up to 64" in note
    assert extrapolation_note(CHAIN, [outcome(max_draft_rows=65)], replace(fit, steps={})) == ""


def test_the_rows_of_draft_forwards_are_told_by_the_simulation(machine_fit):
    values = {f.name: 0 for f in fields(RoundRecord)}
    log = RoundLog([RoundRecord(**values | {"batch": 1, "target": 1.0, "draft_rows": 900})])
    log.most_draft_rows = 13
    records = RunRecords([finished(0, 1.0, 2.0)], log, 3.0, [])
    assert outcome_of(records, CHAIN, machine_fit, slo=SLO(), seed=0).max_draft_rows == 13


def test_what_waits_between_its_tokens_counts_for_the_verdict_on_the_load(machine_fit):
    requests = [replace(finished(i, i + 0.5, 2.0 * i + 1), arrival=float(i)) for i in range(50)]
    records = RunRecords(requests, RoundLog(), 100.0, [])
    assert outcome_of(records, PLAIN, machine_fit, slo=SLO(), seed=0).saturation == "stable"
    records.queued = {i: float(i) for i in range(50)}
    assert outcome_of(records, PLAIN, machine_fit, slo=SLO(), seed=0).saturation == "overloaded"


def test_prompts_beyond_the_measured_ones_are_called_extrapolated(machine_fit):
    forms = {"line": HeldOut(0.01, 0.01, 0.01)}
    step = StepFit(machine_fit.costs["2"].prefill, "line", forms, num_shapes=4, most_rows=256)
    fit = replace(machine_fit, steps={"2/prefill": step})
    short, long = (pd.DataFrame({"prompt_tokens": [16, most]}) for most in (256, 4096))
    assert prompt_note(fit, short) == ""
    assert "4,096 tokens, but were measured up to 256" in prompt_note(fit, long)
    assert prompt_note(replace(fit, steps={}), long) == ""


def test_what_was_simulated_once_has_the_spread_of_what_was_repeated(machine_fit):
    repeated = [[outcome(0, tpot_mean=0.9), outcome(1, tpot_mean=1.1)]]
    spread = spread_over_seeds([*repeated, [outcome(0, tpot_mean=7.0)]])
    assert spread["tpot_mean"] == pytest.approx(math.sqrt(0.02))
    once = score_of(PLAIN, [outcome(tpot_mean=2.0)], machine_fit, SLO(), spread=spread)
    # 0.95 quantile of the normal distribution, once for this run and once for the other.
    of_fit = math.hypot(0.03 * 0.02, 0.01 * 0.04) / 0.04 / 0.6745
    error = 1.645 * math.hypot(of_fit, machine_fit.drift("2", 0.04))
    half = math.hypot(1.6464 * 2.0 * math.sqrt(0.02) * math.sqrt(2), 2.0 * error)
    interval = once.predicted["tpot_mean"]
    assert interval.high - interval.value == pytest.approx(half, rel=1e-3)
    alone = score_of(PLAIN, [outcome(tpot_mean=2.0)], machine_fit, SLO()).predicted["tpot_mean"]
    assert alone.high - alone.value == pytest.approx(2.0 * error, rel=0.01)


def test_a_log_of_several_replicas_knows_the_largest_draft_forward_of_all():
    small, large = RoundLog(), RoundLog()
    small.most_draft_rows, large.most_draft_rows = 3, 13
    assert RoundLog.merged(iter((large, small))).most_draft_rows == 13
    assert RoundLog.merged([]).most_draft_rows == 0
