"""The collector works where it is asked to, and as ever before and behind."""

from __future__ import annotations

import gc
import weakref

import pytest

from codesign.engine import garbage
from codesign.engine.garbage import IDLE, OFTEN, YOUNG, collect, collect_idle, collected_beside


class Node:
    """Of a cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.own = self


def cycle() -> weakref.ref[Node]:
    return weakref.ref(Node())


@pytest.fixture(autouse=True)
def enabled_collector():
    gc.enable()
    gc.collect()
    yield
    gc.enable()
    gc.unfreeze()


def test_nothing_is_collected_but_by_request():
    with collected_beside():
        dead = cycle()
        kept = [[] for _ in range(20 * YOUNG)]
        assert dead() is not None, "the collector has started by itself"
        collect()
        assert dead() is None
    assert len(kept) == 20 * YOUNG


def test_few_objects_are_not_worth_a_look():
    with collected_beside():
        collect()
        dead = cycle()
        collect()
        assert dead() is not None


def test_what_outlived_a_look_goes_with_a_later_one():
    with collected_beside():
        gc.collect(0)
        holder = [Node()]
        dead = weakref.ref(holder[0])
        gc.collect(0)  # it is no longer young
        holder.clear()
        for _ in range(OFTEN + 2):
            kept = [[] for _ in range(2 * YOUNG)]
            collect()
            del kept
        assert dead() is None


def test_idle_time_is_used_if_it_is_enough():
    with collected_beside():
        old = cycle_that_is_old()
        for _ in range(OFTEN + 1):
            gc.collect(1)
        collect_idle(IDLE / 2)
        assert old() is not None
        collect_idle(2 * IDLE)
        assert old() is None


def cycle_that_is_old() -> weakref.ref[Node]:
    node = Node()
    gc.collect(0)
    gc.collect(1)
    return weakref.ref(node)


def test_afterwards_all_is_as_before():
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_what_stays_for_long_is_looked_at_in_the_end(monkeypatch):
    monkeypatch.setattr(garbage, "SELDOM", 3)
    with collected_beside():
        old = cycle_that_is_old()
        for _ in range(6 * (OFTEN + 2)):
            kept = [[] for _ in range(2 * YOUNG)]
            collect()
            del kept
        assert old() is None


def test_who_has_frozen_the_heap_keeps_it_so():
    gc.freeze()
    with collected_beside():
        assert gc.isenabled()
    assert gc.get_freeze_count()


def interrupted() -> None:
    with collected_beside():
        assert gc.get_freeze_count()
        assert not gc.isenabled()
        raise KeyboardInterrupt


def test_whoever_has_the_collector_off_keeps_it_so():
    gc.disable()
    with collected_beside():
        assert not gc.get_freeze_count()
    assert not gc.isenabled()


def test_elsewhere_it_is_left_to_python(monkeypatch):
    monkeypatch.setattr(garbage, "YOUNG", -1)
    monkeypatch.setattr(garbage, "OFTEN", -1)
    counts = [generation["collections"] for generation in gc.get_stats()]
    collect()
    collect_idle(2 * IDLE)
    assert [generation["collections"] for generation in gc.get_stats()] == counts
