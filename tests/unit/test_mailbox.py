"""Mailboxes over gloo, as between hosts: messages arrive whole, and a lost peer ends every wait."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from codesign.engine.gpu import watch as watch_module
from codesign.engine.gpu.mailbox import GlooMailbox
from codesign.engine.gpu.watch import Watch
from codesign.engine.partner import DraftLostError

LENGTHS = (1, 5000, 0, 7)


def join(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def echo(store: str) -> None:
    """Give every message back, but do not wait for it to be taken."""
    join(store, 1)
    inbox, outbox = GlooMailbox(writer=0, readers=(1,)), GlooMailbox(writer=1, readers=(0,))
    for _ in LENGTHS:
        outbox.send(inbox.receive() + 1)
    outbox.flush()
    dist.destroy_process_group()


def leave(store: str) -> None:
    """Take one message and be gone."""
    join(store, 1)
    GlooMailbox(writer=0, readers=(1,)).receive()


def hang(store: str) -> None:
    """Join, and say nothing."""
    join(store, 1)
    time.sleep(60)


@pytest.fixture
def peer(tmp_path: Path):
    """Start a function as rank 1 of two, and join as rank 0."""
    started = []

    def start(function):
        store = str(tmp_path / "store")
        process = multiprocessing.get_context("forkserver").Process(target=function, args=(store,))
        process.start()
        started.append(process)
        join(store, 0)

    yield start
    for process in started:
        process.kill()
        process.join()
    dist.destroy_process_group()


def mailboxes(limit: float | None) -> tuple[GlooMailbox, GlooMailbox]:
    watch = Watch("the draft", DraftLostError, limit)
    outbox = GlooMailbox(writer=0, readers=(1,), watch=watch)
    return outbox, GlooMailbox(writer=1, readers=(0,), watch=watch)


def test_messages_arrive_in_order_and_whole(peer):
    peer(echo)
    outbox, inbox = mailboxes(30.0)
    for i, length in enumerate(LENGTHS):
        outbox.send(np.full(length, i, np.int32))
        assert inbox.receive().tolist() == [i + 1] * length


def test_a_peer_that_is_gone_is_a_lost_draft(peer):
    peer(leave)
    outbox, inbox = mailboxes(None)
    outbox.send(np.zeros(3, np.int32))
    with pytest.raises(DraftLostError, match="the draft cannot be reached"):
        inbox.receive()
    with pytest.raises(DraftLostError, match="the draft cannot be reached"):
        outbox.send(np.zeros(3, np.int32))


def test_a_peer_that_hangs_is_a_lost_draft_after_the_limit(peer):
    peer(hang)
    _, inbox = mailboxes(1.0)
    start = time.monotonic()
    with pytest.raises(DraftLostError, match="the draft cannot be reached"):
        inbox.receive()
    assert 0.9 < time.monotonic() - start < 30


def test_the_end_of_a_process_is_named_though_this_host_stood_still_before_it_is_seen(monkeypatch):
    now, looks = [0.0], iter([None, None, DraftLostError("draft rank 0 ended, exit code -9")])

    def check() -> None:
        if (ended := next(looks)) is not None:
            raise ended

    monkeypatch.setattr(watch_module, "monotonic", lambda: now[0], raising=False)
    monkeypatch.setattr(watch_module, "sleep", lambda seconds: now.__setitem__(0, now[0] + 2.0))
    watch = Watch("the draft", DraftLostError, check=check)
    with pytest.raises(DraftLostError, match="draft rank 0 ended, exit code -9"):
        watch.broken(RuntimeError("connection closed"))
