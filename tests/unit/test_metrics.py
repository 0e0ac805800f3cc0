from __future__ import annotations

import math
from dataclasses import fields

import pytest

from codesign.config import SLO
from codesign.metrics import Metrics, meets_slo, percentile, slo_values, summarise, tpot, ttft
from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords


def request(arrival=0.0, first=1.0, finish=3.0, output=5, **rest) -> RequestRecord:
    return RequestRecord(
        request_id=0,
        category="",
        arrival=arrival,
        prompt_tokens=10,
        output_tokens=output,
        first_token=first,
        finish=finish,
        **rest,
    )


def round_record(**changed) -> RoundRecord:
    values = {field.name: 0 for field in fields(RoundRecord)}
    return RoundRecord(**(values | changed))


def test_ttft_counts_from_arrival_and_tpot_from_the_first_token():
    record = request(arrival=0.5, first=1.5, finish=3.5, output=5)
    assert ttft(record) == 1.0
    assert tpot(record) == 0.5


def test_a_request_with_one_token_has_no_tpot_and_cannot_miss_its_target():
    record = request(first=1.0, finish=1.0, output=1)
    assert tpot(record) is None
    assert meets_slo(record, SLO(tpot=1e-9))


def test_a_target_that_is_met_exactly_is_met():
    record = request(arrival=0.5, first=1.5, finish=3.5, output=5)
    assert meets_slo(record, SLO(ttft=1.0, tpot=0.5))
    assert not meets_slo(record, SLO(ttft=0.999))
    assert not meets_slo(record, SLO(tpot=0.499))


def test_each_percentile_of_a_summary_is_its_own():
    requests = [request(first=1.0 + i, finish=1.0 + 3 * i, output=2) for i in range(1, 101)]
    metrics = summarise(RunRecords(requests, RoundLog(), 301.0, []))
    assert (metrics.ttft_p50, metrics.ttft_p90, metrics.ttft_p99) == (51.0, 91.0, 100.0)
    assert (metrics.tpot_p50, metrics.tpot_p90, metrics.tpot_p99) == (100.0, 180.0, 198.0)


def test_an_unfinished_request_has_no_tpot_and_misses_the_slo():
    record = request(finish=None)
    assert tpot(record) is None
    assert not meets_slo(record, SLO())


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (51, 3), (90, 4), (25, 1), (100, 4)])
def test_percentile_is_the_smallest_value_that_covers_the_share(percent, value):
    assert percentile([4, 2, 1, 3], percent) == value


def test_percentile_is_not_moved_by_rounding_of_the_share():
    assert percentile(range(1, 11), 90) == 9
    assert percentile(range(1, 101), 99) == 99


def test_unfinished_requests_are_infinitely_slow_at_the_slo_percentile():
    requests = [request(), request(finish=None), request(first=None, finish=None, output=0)]
    values = slo_values(requests, SLO(percentile=100))
    assert values == {"ttft": math.inf, "tpot": math.inf}
    assert slo_values(requests, SLO(percentile=60))["ttft"] == 1.0


def test_summary_of_two_requests_by_hand():
    requests = [
        request(output=5, num_rounds=2, num_draft_tokens=6, num_accepted_tokens=2),
        request(first=2.0, finish=8.0, output=7, num_rounds=3, num_draft_tokens=9,
                num_accepted_tokens=3),
    ]  # fmt: skip
    rounds = [
        round_record(batch=2, target=0.2, draft=0.1),
        round_record(batch=1, running=2, target=0.4),
    ]
    metrics = summarise(RunRecords(requests, RoundLog(rounds), 8.0, []), SLO(ttft=1.5, tpot=1.0))
    assert metrics.ttft_mean == 1.5
    assert metrics.tpot_mean == 0.75
    assert metrics.latency_mean == 5.5
    assert metrics.throughput == 12 / 8
    assert metrics.acceptance_length == 10 / 5
    assert metrics.acceptance_rate == 5 / 15
    assert metrics.slo_attainment == 0.5
    assert metrics.goodput == 1 / 8
    assert metrics.mean_batch == 1.5
    assert metrics.mean_running == 2.0
    assert metrics.spans["target"] == pytest.approx(0.3)
    assert metrics.spans["draft"] == 0.05


def test_a_request_that_never_started_takes_nothing_from_the_acceptance_length():
    waiting = request(first=None, finish=None, output=0)
    metrics = summarise(RunRecords([request(num_rounds=4), waiting], RoundLog(), 8.0, []))
    assert metrics.acceptance_length == 1.0
    assert metrics.slo_attainment == 0.5


def test_figures_of_an_empty_run_are_none_and_not_nan():
    metrics = summarise(RunRecords([], RoundLog(), 0.0, []))
    counts = ("num_requests", "num_finished", "seconds", "spans")
    for field in fields(Metrics):
        if field.name not in counts:
            assert getattr(metrics, field.name) is None, field.name
    assert set(metrics.spans.values()) == {None}
