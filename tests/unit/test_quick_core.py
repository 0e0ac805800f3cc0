"""A rank leaves a slow core, and does not run from one to the next where all are slow."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from codesign.engine.gpu import quick_core
from codesign.engine.gpu.quick_core import EVERY, MOST_PATIENCE, PATIENCE, SETTLE, QuickCore

FAST, BUSY = 2e-6, 4e-6


class Host(QuickCore):
    """Cores whose pace is told, on a clock that goes by one look at a time."""

    def __init__(self, pace_of: Callable[[int, float], float], **how) -> None:
        super().__init__(how.get("num_busy", 1))
        self.core, self.now, self.left, self.looks = 0, 0.0, [], 0
        self._pace_of = pace_of

    def _pace(self) -> float:
        self.looks += 1
        return self._pace_of(self.core, self.now)

    def _leave(self) -> None:
        self.left.append(self.now)
        self.core += 1


@pytest.fixture(autouse=True)
def cores(monkeypatch) -> list[int]:
    found = list(range(8))
    monkeypatch.setattr(quick_core, "usable_cores", lambda: found)
    return found


def watch(host: Host, seconds: float, monkeypatch, step: float = EVERY / 3) -> Host:
    monkeypatch.setattr(quick_core, "perf_counter", lambda: host.now)
    end = host.now + seconds
    while host.now < end:
        host.look()
        host.now += step
    return host


def test_a_quick_core_is_kept(monkeypatch):
    host = watch(
        Host(lambda core, now: FAST * (1.2 if int(now * 1e4) % 3 else 1.0)), 1, monkeypatch
    )
    assert host.left == []
    assert host.looks == pytest.approx(1 / EVERY, rel=0.4), "looks are rare"


def test_a_core_that_becomes_slow_is_left_at_once_and_a_quick_one_kept(monkeypatch):
    host = watch(Host(lambda core, now: BUSY if core == 0 and now > 0.5 else FAST), 2, monkeypatch)
    assert len(host.left) == 1
    assert 0.5 < host.left[0] < 0.5 + 3 * PATIENCE * EVERY


def test_a_slow_moment_is_no_reason(monkeypatch):
    def pace(core: int, now: float) -> float:
        return BUSY if (now / EVERY) % 20 < PATIENCE - 2 else FAST

    assert watch(Host(pace), 2, monkeypatch).left == []


def test_where_all_are_slow_it_tries_ever_less_often(monkeypatch):
    host = watch(Host(lambda core, now: FAST if now < 0.1 else BUSY), 10, monkeypatch)
    apart = [later - sooner for sooner, later in zip(host.left, host.left[1:], strict=False)]
    assert all(later > 0.7 * sooner for sooner, later in zip(apart, apart[1:], strict=False))
    assert apart[-1] > MOST_PATIENCE * EVERY
    assert len(host.left) < 40


def test_it_is_quick_to_leave_again_after_a_quick_time(monkeypatch):
    host = Host(lambda core, now: FAST if now < 0.1 or 3.0 < now < 3.5 else BUSY)
    watch(host, 4, monkeypatch)
    again = next(moment for moment in host.left if moment > 3.5)
    assert again < 3.5 + 3 * PATIENCE * EVERY


def test_a_new_core_gets_time_to_wake_up(monkeypatch):
    woken: dict[int, float] = {}

    def pace(core: int, now: float) -> float:
        if core == 0:
            return FAST if now < 0.1 else BUSY
        return BUSY if now - woken.setdefault(core, host.left[-1]) < SETTLE else FAST

    host = Host(pace)
    assert len(watch(host, 1, monkeypatch).left) == 1


@pytest.mark.parametrize(("num_busy", "moves"), [(3, True), (4, False), (8, False)])
def test_few_cores_are_not_for_moving(monkeypatch, num_busy, moves):
    host = Host(lambda core, now: FAST if now < 0.1 else BUSY, num_busy=num_busy)
    assert bool(watch(host, 1, monkeypatch).left) == moves


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_whoever_has_left_may_run_anywhere(cores, monkeypatch):
    mine = os.sched_getaffinity(0)
    monkeypatch.setattr(quick_core, "usable_cores", lambda: sorted(mine))
    core = QuickCore(1)
    core._leave()
    assert os.sched_getaffinity(0) == mine
    assert 0.0 < core._pace() < 1.0


def test_where_the_system_does_not_say_it_stays(monkeypatch):
    monkeypatch.setattr(quick_core, "usable_cores", list)
    host = Host(lambda core, now: FAST if now < 0.1 else BUSY)
    assert watch(host, 1, monkeypatch).left == []
