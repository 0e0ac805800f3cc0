"""A round's records: what is noted at its end, and written down later."""

from __future__ import annotations

import pytest

from codesign.engine.partner import Answer
from codesign.engine.serving_log import Round, ServingLog
from codesign.policy.protocol import RequestVerdict, VerifyRows
from codesign.prompts import BoundRequest

ROWS = [VerifyRows(0, (7, 8, 9), (-1, 0, 0), (4, 5, 5), 4, (1.0, 0.6, 0.2))]
VERDICTS = [RequestVerdict(0, 5, (8, 3), is_finished=True)]


@pytest.fixture
def log() -> ServingLog:
    """Of a run whose only request has just ended."""
    log = ServingLog()
    log.expect(BoundRequest(0, 0.0, "chat", (1, 2, 3, 4, 7), 2))
    this = Round(start=log.now, emitted=1.5)
    log.end_round(this, ROWS, VERDICTS, ready=0.0, answer=Answer(None, 0.0, None, 0.0))
    return log


def test_a_round_counts_before_it_is_written_down(log):
    assert (log.num_rounds, len(log.rounds), log.num_over) == (1, 0, 0)


def test_catching_up_writes_a_round_once_and_as_of_its_end(log):
    end = log.now
    log.catch_up()
    log.catch_up()
    assert (log.num_rounds, len(log.rounds), log.num_over) == (1, 1, 1)
    assert log.requests[0].first_token == log.requests[0].finish == 1.5
    assert log.requests[0].num_accepted_tokens == 1
    assert log.rounds[0].start + log.rounds[0].seconds <= end


def test_records_hold_the_last_round(log):
    records = log.records(cut_by="interrupted")
    assert len(records.rounds) == 1
    assert records.notes == ["interrupted: 0 of 1 requests unfinished"]
