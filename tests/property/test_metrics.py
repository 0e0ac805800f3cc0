from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from codesign.config import SLO
from codesign.metrics import meets_slo, percentile, slo_values, summarise, tpot, ttft
from codesign.records import RequestRecord, RoundLog, RunRecords

times = st.floats(0.0, 100.0, allow_nan=False)


@st.composite
def requests(draw):
    arrival, wait, work = draw(times), draw(times), draw(times)
    output = draw(st.integers(0, 50))
    state = draw(st.sampled_from(["waiting", "running", "done"])) if output else "waiting"
    first = None if state == "waiting" else arrival + wait
    return RequestRecord(
        request_id=0,
        category="",
        arrival=arrival,
        prompt_tokens=1,
        output_tokens=0 if first is None else output,
        first_token=first,
        finish=None if first is None or state == "running" else first + work,
    )


@given(st.lists(times, min_size=1), st.floats(0.1, 100.0))
def test_percentile_is_the_least_value_that_covers_the_share(values, percent):
    value = percentile(values, percent)
    need = percent / 100 * len(values) - 1e-6
    assert value in values
    assert sum(v <= value for v in values) >= need
    assert sum(v < value for v in values) < need + 1e-6 or value == min(values)


@given(st.lists(requests(), min_size=1, max_size=30), times, times, st.floats(1, 100))
def test_meeting_a_percentile_target_means_that_share_of_requests_meets_it(
    records, ttft_target, tpot_target, percent
):
    slo = SLO(ttft=ttft_target + 1e-3, tpot=tpot_target + 1e-3, percentile=percent)
    value = slo_values(records, slo)["ttft"]
    good = sum((t := ttft(r)) is not None and t <= slo.ttft for r in records)
    assert (value <= slo.ttft) == (good >= percent / 100 * len(records) - 1e-9)


@given(st.lists(requests(), max_size=30), st.floats(0.1, 1000.0))
def test_percentiles_are_ordered_and_shares_lie_between_0_and_1(records, seconds):
    metrics = summarise(RunRecords(records, RoundLog(), seconds, []), SLO(ttft=10.0, tpot=1.0))
    for name in ("ttft", "tpot"):
        values = [getattr(metrics, f"{name}_p{p}") for p in (50, 90, 99)]
        assert all(v is None for v in values) or values == sorted(values)
    assert metrics.slo_attainment is None or 0 <= metrics.slo_attainment <= 1
    assert metrics.num_finished <= metrics.num_requests == len(records)


@given(requests(), times, times)
def test_a_looser_slo_is_never_harder_to_meet(record, ttft_target, tpot_target):
    tight = SLO(ttft=ttft_target + 1e-3, tpot=tpot_target + 1e-3)
    loose = SLO(ttft=tight.ttft * 2, tpot=tight.tpot * 2)
    assert meets_slo(record, loose) or not meets_slo(record, tight)


@given(requests(), st.floats(-50.0, 50.0))
def test_latencies_do_not_depend_on_when_the_run_began(record, shift):
    moved = RequestRecord(
        request_id=0,
        category="",
        arrival=record.arrival + shift,
        prompt_tokens=1,
        output_tokens=record.output_tokens,
        first_token=None if record.first_token is None else record.first_token + shift,
        finish=None if record.finish is None else record.finish + shift,
    )
    for figure in (ttft, tpot):
        before, after = figure(record), figure(moved)
        assert (before is None) == (after is None)
        assert before is None or abs(before - after) < 1e-9
