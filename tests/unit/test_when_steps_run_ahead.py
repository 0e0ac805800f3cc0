"""When a target's ranks are asked for the next step of plain decoding, and what followers wait for.

Clocks and ranks are made up here; tests/engine/test_decode_ahead.py serves with real ones.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from codesign.engine.gpu import decode_ahead
from codesign.engine.gpu.decode_ahead import DecodeAhead
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.next_steps import next_message
from codesign.engine.gpu.outbox import Due
from codesign.engine.gpu.paging import PageTable
from codesign.engine.gpu.request_rows import RequestRows
from codesign.engine.gpu.step_rows import (
    AHEAD,
    FOLLOWED,
    HEADER,
    KIND,
    NEXT,
    PAGES,
    STEP,
    pack_step,
)
from codesign.engine.target import nothing
from codesign.policy.protocol import VerifyRows


class Leader:
    """Ranks whose steps take so many seconds one after another, by a clock of its own."""

    scratch_slot = 9

    def __init__(self, seconds) -> None:
        self.seconds = iter(seconds)
        self.now, self.num_begun = 0.0, 0
        self.free = 0.0  # when the GPU is
        self.ends: deque[float] = deque()
        self.asked: list[tuple[float, float]] = []  # when a next step was, and when its last ended
        self.rank = SimpleNamespace(has_next=lambda _: True, runs_beside=True)

    def begin(self, message) -> int:
        self.num_begun += 1
        if message[KIND] == NEXT:
            self.asked.append((self.now, self.free))
        self.free = max(self.now, self.free) + next(self.seconds)
        self.ends.append(self.free)
        return 1

    def answers_by(self, moment: float) -> bool:
        self.now = max(self.now, min(moment, self.ends[0]))
        return self.now >= self.ends[0]

    def take(self):
        self.now = max(self.now, self.ends.popleft())
        return np.zeros(16, np.int32)

    def settle(self) -> None:
        while self.ends:
            self.take()


def rows_of(contexts: dict[int, int]) -> list[VerifyRows]:
    return [VerifyRows(n, (1,), (-1,), (c,), c) for n, c in contexts.items()]


def message_of(rows):
    parts = [
        RequestRows(n, (1,), (r.context,), r.context, (r.context,), ((0,),), (-1,))
        for n, r in enumerate(rows)
    ]
    return pack_step(parts, bucket=8, scratch_slot=9)


@pytest.fixture
def decode(monkeypatch):
    """Decode plainly in so many rounds of one request; the leader, and the share run ahead."""

    def run(seconds, rounds: int, host: float = 1e-4):
        leader = Leader(seconds)
        monkeypatch.setattr(decode_ahead, "perf_counter", lambda: leader.now)
        ahead = DecodeAhead(leader, PageTable(2), 8)
        context = 10
        for _ in range(rounds):
            rows = rows_of({0: context})
            rest = (rows, nothing, lambda: True, lambda _: False)
            places = ahead.places(rows)
            if places is None:
                ahead.run(message_of(rows), *rest)
            else:
                ahead.go_on(places, *rest)
            leader.now += host
            context += 1
        return leader, ahead.num_used / rounds

    return run


def test_the_next_step_is_asked_for_shortly_before_the_last_one_ends(decode):
    leader, share = decode([2e-3] * 99, 50)
    assert share == 49 / 50 - 1 / 50  # the first step tells how long one takes
    early = [end - asked for asked, end in leader.asked]
    assert early == pytest.approx([decode_ahead.LEAD] * len(early), abs=1e-9)
    assert leader.free == pytest.approx(51 * 2e-3 + 1e-4)  # the host is waited for once


def test_a_step_shorter_than_its_lead_is_followed_at_once(decode):
    leader, share = decode([1e-4] * 99, 50, host=2e-4)
    assert share == 48 / 50  # though each has ended when the host comes back
    assert leader.now == pytest.approx(50 * 2e-4 + 2e-4)


@pytest.mark.parametrize("seconds", [2e-3, 12e-3, 22e-3])
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_steps_that_vary_are_run_ahead_too(decode, seconds, noise):
    chance = random.Random(3)
    steps = [seconds * max(chance.gauss(1.0, noise), 0.5) for _ in range(402)]
    leader, share = decode(steps, 400)
    assert share == 398 / 400
    assert leader.now == pytest.approx(sum(steps[:400]) + 1e-4 * 2)  # no step waits for the host


def test_a_step_that_took_long_is_no_measure_of_the_next_one_for_long(decode):
    steps = [2e-3] * 20 + [0.2] + [2e-3] * 40
    leader, share = decode(steps, 50)
    assert share == 48 / 50
    early = [end - asked for asked, end in leader.asked]
    assert sum(abs(each - decode_ahead.LEAD) > 1e-6 for each in early) <= 2


def test_where_steps_run_within_their_beginning_none_is_run_ahead(decode, monkeypatch):
    leave = Leader.begin

    def begin(self, message):
        leave(self, message)
        self.now = self.ends[-1]
        return 1

    monkeypatch.setattr(Leader, "begin", begin)
    init = Leader.__init__

    def on_cpu(self, seconds):
        init(self, seconds)
        self.rank.runs_beside = False

    monkeypatch.setattr(Leader, "__init__", on_cpu)
    assert decode([2e-3] * 99, 50)[1] == 0.0


def step_of(kind: int, *, followed: bool = False) -> np.ndarray:
    message = np.zeros(HEADER, np.int32)
    message[KIND], message[FOLLOWED] = kind, followed
    return message


class Follower(ModelRank):
    """A follower whose answers come when they are let; notes in which order it did what."""

    def __init__(self) -> None:
        self._due: deque[Due] = deque()
        self.log: list[str] = []

    def start(self, message, watch=None) -> int:
        if message[KIND] == PAGES:
            self.log.append("pages")
            return 0
        name = {STEP: "step", NEXT: "next", AHEAD: "ahead"}[int(message[KIND])]
        self.log.append(name)
        self._due.append(Due(np.zeros(1, np.int32), np.zeros(1, np.int32)))
        return 1

    def is_there(self, watch, is_called=None) -> bool:
        if is_called is not None and is_called():
            return False
        self.log.append("answer")
        return True


def test_a_follower_runs_the_next_step_before_it_has_the_answer_of_the_last_one():
    rank = Follower()
    for message in (step_of(STEP), step_of(NEXT), step_of(PAGES), step_of(NEXT)):
        rank.replay(message, None, lambda: True)  # another message is there, always
    assert rank.log == ["step", "next", "pages", "answer", "next"]  # no more than two under way
    rank.replay(step_of(STEP), None, lambda: True)
    assert rank.log[5:] == ["answer", "answer", "step"]  # its message may lie where theirs did


def test_a_follower_without_another_message_waits_for_all_answers_and_tidies_up_before():
    rank = Follower()
    rank.replay(step_of(STEP), None, lambda: True)
    rank.replay(step_of(NEXT), None, lambda: False, lambda: rank.log.append("tidies up"))
    assert rank.log == ["step", "next", "tidies up", "answer", "answer"]
    assert not rank._due


def test_what_follows_a_step_at_once_is_waited_for_before_its_answer():
    rank = Follower()
    rank.replay(
        step_of(STEP, followed=True), None, lambda: False, lambda: rank.log.append("tidies up")
    )
    rank.replay(step_of(AHEAD), None, lambda: False)
    assert rank.log == ["step", "ahead", "answer", "answer"]


def test_a_message_for_the_next_step_says_which_rows_go_on():
    message = next_message(8, {0: 5000, 1: 7, 2: 8})
    assert message[HEADER:].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
