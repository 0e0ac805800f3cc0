"""Runs that lose their draft, are interrupted, or cannot start."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from codesign.errors import InputError


def kill_draft_after(calls: int):
    """A progress callback that kills the draft process at its ``calls``-th call."""
    count = 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal count
        count += 1
        if count == calls:
            (draft,) = multiprocessing.active_children()
            assert draft.pid is not None
            os.kill(draft.pid, signal.SIGKILL)

    return progress


def test_a_killed_draft_process_loses_no_request_and_is_said(serve, make_requests):
    requests = make_requests(6)
    plain = serve("plain", requests)
    ours = serve("async-tree-8x4x2", requests, progress=kill_draft_after(8))
    assert ours.outputs == plain.outputs
    assert all(record.finish is not None for record in ours.records.requests)
    assert len(ours.records.notes) == 1
    assert "draft process ended with code -9" in ours.records.notes[0]
    assert ours.records.rounds[0].num_draft_tokens + ours.records.rounds[1].num_draft_tokens > 0
    assert ours.records.rounds[-1].num_draft_tokens == 0


@pytest.mark.parametrize("policy", ["tree-8x4x2", "async-tree-8x4x2"])
def test_an_interrupted_run_keeps_what_is_done(serve, make_requests, policy):
    requests = make_requests(6)
    plain = serve("plain", requests)
    calls = 0

    def interrupt(stage: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt

    ours = serve(policy, requests, progress=interrupt)
    assert "unfinished" in ours.records.notes[0]
    assert not multiprocessing.active_children()
    emitted = 0
    for request_id, tokens in ours.outputs.items():
        assert tokens == plain.outputs[request_id][: len(tokens)]
        emitted += len(tokens)
    assert 0 < emitted < sum(len(tokens) for tokens in plain.outputs.values())


def test_a_request_that_can_never_fit_is_refused_before_anything_starts(serve, make_requests):
    with pytest.raises(InputError, match=r"request \d+ needs \d+ KV tokens, the limit is 30"):
        serve("plain", make_requests(6), max_kv_tokens=30)


def test_speculation_without_a_draft_is_refused(serve, make_requests):
    with pytest.raises(InputError, match="codesign models list"):
        serve("chain-3", make_requests(2), draft=None)
