"""A rank leaves a slow core, and does not run from one to the next where all are slow."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from codesign.engine.gpu import quick_core
from codesign.engine.gpu.quick_core import (
    EVERY,
    HOPS,
    LOST,
    NEW_PATIENCE,
    PATIENCE,
    REST,
    QuickCore,
    core_beside,
    cores_beside,
    pci_address,
)

FAST, BUSY = 2e-6, 4e-6


class Host(QuickCore):
    """Cores whose pace is told."""

    def __init__(self, pace_of: Callable[[int, float], float], *, num_ranks: int = 1) -> None:
        super().__init__(0, num_ranks)
        self.core, self.now, self.left, self.looks = 0, 0.0, [], 0
        self._pace_of = pace_of

    def watched(self, seconds: float) -> Host:
        """Wait so long, looking more often than is needed."""
        end = self.now + seconds
        while self.now < end:
            self.look(self.now)
            self.now += EVERY / 3
        return self

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


def later_slow(core: int, now: float) -> float:
    return FAST if now < 0.1 else BUSY


def test_a_quick_core_is_kept():
    host = Host(lambda core, now: FAST * (1.2 if int(now * 1e4) % 3 else 1.0)).watched(1)
    assert host.left == []
    assert host.looks == pytest.approx(1 / EVERY, rel=0.4), "looks are rare"


def test_a_core_that_becomes_slow_is_left_and_a_quick_one_kept():
    host = Host(lambda core, now: BUSY if core == 0 and now > 0.5 else FAST).watched(2)
    assert len(host.left) == 1
    assert 0.5 < host.left[0] < 0.5 + 2 * PATIENCE * EVERY


def test_a_slow_moment_is_no_reason():
    def pace(core: int, now: float) -> float:
        return BUSY if (now / EVERY) % 20 < PATIENCE - 2 else FAST

    assert Host(pace).watched(2).left == []


def test_of_new_cores_it_takes_the_first_quick_one_with_less_patience():
    host = Host(lambda core, now: FAST if now < 0.1 or core == 4 else BUSY).watched(1)
    assert host.core == 4
    assert host.left[-1] - host.left[0] < 3 * 2 * NEW_PATIENCE * EVERY


def test_where_all_are_slow_it_rests_between_rounds_of_hops():
    host = Host(later_slow).watched(10)
    pauses = sum(later - sooner > REST for sooner, later in itertools.pairwise(host.left))
    assert len(host.left) <= 10 / REST * (HOPS + 1)
    assert 5 / REST < pauses <= 10 / REST


def test_it_leaves_again_after_a_quick_time():
    host = Host(lambda core, now: FAST if core % 3 == 0 and now % 1.0 < 0.6 else BUSY).watched(5)
    assert any(3.6 < moment < 3.6 + 2 * PATIENCE * EVERY for moment in host.left)


def test_a_core_that_others_have_had_is_left_at_once():
    host = Host(lambda core, now: FAST).watched(0.1)
    host.was_away(host.now, 0.9 * LOST)
    assert host.left == []
    host.was_away(host.now, 1.1 * LOST)
    assert host.left == [host.now]
    host.was_away(host.now, 4 * LOST)
    assert len(host.left) == 2, "the new one is taken, too"


def test_where_all_cores_are_taken_it_rests_between_rounds_of_hops():
    host = Host(lambda core, now: FAST)
    for _ in range(1000):
        host.now += 4 * LOST
        host.was_away(host.now, 3 * LOST)
    assert len(host.left) <= 4 / REST * (HOPS + 1)
    assert any(later - sooner >= REST for sooner, later in itertools.pairwise(host.left))


@pytest.mark.parametrize(("num_ranks", "moves"), [(1, True), (2, True), (3, False), (8, False)])
def test_few_cores_are_not_for_moving(num_ranks, moves):
    host = Host(later_slow, num_ranks=num_ranks).watched(1)
    assert bool(host.left) == moves
    host.left.clear()
    host.was_away(host.now + REST, 2 * LOST)
    assert bool(host.left) == moves


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-3,8-11\n", [0, 1, 2, 3, 8, 9, 10, 11]), ("5\n", [5]), ("\n", []), ("x", [])],
)
def test_cores_beside_a_gpu_are_those_the_system_names(tmp_path, monkeypatch, text, found):
    monkeypatch.setattr(quick_core, "_DEVICES", tmp_path)
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(text)
    assert cores_beside("0000:1b:00.0") == found
    assert cores_beside("0000:ff:00.0") == []
    assert cores_beside("") == []


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 27, "pci_device_id": 0}, "0000:1b:00.0"),
        ({"pci_bus_id": 27}, ""),
    ],
)
def test_a_gpu_has_the_address_that_the_system_gives_it(monkeypatch, fields, address):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**fields)
    )
    assert pci_address(torch.device("cuda", 0)) == address


@pytest.mark.parametrize(
    ("near", "own"), [((), [1, 3, 5, 7]), (range(4, 16), [5, 7]), (range(64, 96), [1, 3, 5, 7])]
)
def test_a_rank_keeps_to_the_cores_beside_its_gpu(near, own):
    assert QuickCore(1, 2, near)._own == own


def test_a_rank_on_a_cpu_has_no_core_of_its_own():
    assert core_beside(torch.device("cpu"), 0, 1) is None


def test_ranks_go_to_cores_of_their_own(cores, monkeypatch):
    asked: dict[int, set[int]] = {0: set(), 1: set()}
    for rank, found in asked.items():

        def note(process: int, where: set[int] | list[int], found: set[int] = found) -> None:
            found.update(where if len(where) == 1 else ())

        monkeypatch.setattr(os, "sched_setaffinity", note, raising=False)
        core = QuickCore(rank, 2)
        for _ in range(200):
            core._leave()
    assert asked[0] | asked[1] == set(cores)
    assert not asked[0] & asked[1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_whoever_has_left_may_run_anywhere(monkeypatch):
    mine = os.sched_getaffinity(0)
    monkeypatch.setattr(quick_core, "usable_cores", lambda: sorted(mine))
    asked = []
    move = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, to: (asked.append(to), move(who, to)))
    core = QuickCore(0, 1)
    core._leave()
    assert [set(to) for to in asked] == [asked[0], mine]
    assert len(asked[0]) == 1
    assert asked[0] <= mine
    assert os.sched_getaffinity(0) == mine
    assert 0.0 < core._pace() < 1.0


def test_a_host_that_is_slow_for_good_is_quick_enough():
    host = Host(lambda core, now: FAST if now < 0.1 else 1.4 * FAST).watched(20)
    assert host.left
    assert host.left[-1] < 10.0


def test_cores_that_were_taken_away_are_not_taken_back(cores, monkeypatch):
    asked: list[list[int]] = []
    core = QuickCore(0, 1)
    monkeypatch.setattr(quick_core, "usable_cores", lambda: [2, 5])
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda who, to: asked.append(sorted(to)), raising=False
    )
    for _ in range(20):
        core._leave()
    assert all(to in ([2], [5], [2, 5]) for to in asked)
    monkeypatch.setattr(quick_core, "usable_cores", lambda: [11])
    core._leave()
    assert not core._moves


def test_where_moving_is_forbidden_it_stays(monkeypatch):
    calls: list[object] = []

    def refuse(process: int, where: object) -> None:
        calls.append(where)
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    core = QuickCore(0, 1)
    monkeypatch.setattr(core, "_pace", iter([FAST, *[BUSY] * 500]).__next__)
    for turn in range(400):
        core.look(turn * EVERY)
    assert len(calls) == 1


def test_where_the_system_does_not_say_it_stays(monkeypatch):
    monkeypatch.setattr(quick_core, "usable_cores", list)
    assert Host(later_slow).watched(1).left == []
