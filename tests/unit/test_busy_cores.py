"""A busy machine is named, by readings of its cores' times."""

from __future__ import annotations

from codesign.busy_cores import CoreTimes, busy_ticks, core_times

STAT = """\
cpu  600 60 60 6000 600 6 6 6 0 0
cpu0 100 10 20 4000 500 1 2 3 50 0
cpu1 200 20 10 1000 100 0 0 0 0 0
cpu12 300 30 30 1000 0 5 4 3 0 0
intr 12345 0 9
"""


def test_ticks_are_those_of_the_given_cores_without_idle_time_and_guests() -> None:
    assert busy_ticks(STAT, {0}) == 100 + 10 + 20 + 1 + 2 + 3
    assert busy_ticks(STAT, {1, 12}) == 230 + 372


def test_what_this_process_uses_is_no_warning() -> None:
    start = CoreTimes(busy=100.0, own=10.0, wall=50.0)
    assert start.note(CoreTimes(busy=120.0, own=30.0, wall=60.0)) == ""


def test_others_are_counted_in_cores() -> None:
    start = CoreTimes(busy=100.0, own=10.0, wall=50.0)
    assert "other processes used 1.2 of" in start.note(CoreTimes(busy=127.0, own=25.0, wall=60.0))


def test_readings_of_this_machine_grow() -> None:
    before, after = core_times(), core_times()
    if before is not None:
        assert after is not None
        assert 0.0 < before.busy <= after.busy
        assert before.wall <= after.wall
