from __future__ import annotations

import pytest

from codesign.planner.saturation import saturation, worst
from codesign.records import RequestRecord


def served(waits, *, gap=1.0, pace=0.1, output=11, begin=0.0) -> list[RequestRecord]:
    """One request each ``gap`` seconds; each runs for ten tokens at ``pace`` and waits before."""
    records = []
    for number, wait in enumerate(waits):
        arrival = begin + number * gap
        first = arrival + wait + 0.1
        records.append(
            RequestRecord(
                number, "", arrival, 5, output,
                admitted=arrival + wait,
                first_token=first,
                finish=first + (output - 1) * pace,
            )
        )  # fmt: skip
    return records


def test_requests_that_hardly_wait_are_stable():
    assert saturation(served([0.01 * (i % 7) for i in range(100)])) == "stable"


def test_a_queue_that_grows_to_the_end_is_overloaded():
    assert saturation(served([0.5 * i for i in range(100)])) == "overloaded"


def test_it_does_not_matter_when_the_run_began():
    waits = [0.5 * i for i in range(100)]
    assert saturation(served(waits, begin=1e4)) == "overloaded"


def test_a_queue_that_went_away_was_a_backlog():
    waits = [5.0 if 30 <= i < 50 else 0.0 for i in range(100)]
    assert saturation(served(waits)) == "backlogged"


def test_what_piles_up_behind_a_prompt_pool_is_overloaded_though_all_had_their_first_token():
    records = served([0.0] * 100)
    queued = {record.request_id: 0.5 * record.request_id for record in records}
    for record in records:
        record.finish += queued[record.request_id]
    assert saturation(records, queued) == "overloaded"


def test_who_decodes_slowly_in_a_large_batch_does_not_wait():
    records = served([0.0] * 100)
    for record in records:
        record.finish += 0.5 * record.request_id
    assert saturation(records, dict.fromkeys(range(100), 0.0)) == "stable"


def test_all_at_once_is_no_rate_that_could_be_too_high():
    assert saturation(served([1.1 * i for i in range(20)], gap=0.0)) == "backlogged"


def test_a_run_with_unfinished_requests_is_overloaded():
    records = served([0.0] * 10)
    records[3].finish = None
    assert saturation(records) == "overloaded"


def test_the_order_of_the_records_does_not_matter():
    records = served([0.5 * i for i in range(100)])
    assert saturation(records[::-1]) == "overloaded"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [(["stable", "overloaded", "backlogged"], "overloaded"), (["stable"], "stable")],
)
def test_the_worst_of_several_seeds_counts(verdicts, expected):
    assert worst(verdicts) == expected


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_few_requests_that_wait_for_longer_and_longer_are_overloaded_too(num):
    assert saturation(served([0.0] * num)) == "stable"
    waits = [5.0 * i for i in range(num)]
    assert saturation(served(waits)) == ("stable" if num == 1 else "overloaded")
