"""Runs that lose their draft, are interrupted, or cannot start."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import codesign.engine.run as engine_run
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine import DraftSource, remote_draft
from codesign.engine.gpu.launch import TorchrunRanks
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.kv_cache import KVCache
from codesign.engine.partner import DraftLostError, LosablePartner, NoDraft, TargetLostError
from codesign.engine.remote_draft import DraftSetup, RemoteDraft
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.engine.target_worker import TargetWorker
from codesign.errors import InputError
from codesign.policy.batching import BatchLimits
from codesign.policy.protocol import Admission, Verdict
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.profiler.link import idle_worker


@pytest.fixture
def drafts(monkeypatch) -> list[RemoteDraft]:
    """Every draft process that the test starts."""
    started: list[RemoteDraft] = []

    class Kept(RemoteDraft):
        def __init__(self, setup) -> None:
            started.append(self)
            super().__init__(setup)

    monkeypatch.setattr(engine_run, "RemoteDraft", Kept)
    return started


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_draft_process_loses_no_request_and_is_said(serve, make_requests, drafts):
    requests = make_requests(6)
    plain = serve("plain", requests)
    calls = itertools.count()

    def kill(stage: str, done: int, total: int) -> None:
        if next(calls) == 8:
            os.kill(drafts[0].pid, signal.SIGKILL)

    ours = serve("async-tree-8x4x2", requests, progress=kill)
    assert ours.outputs == plain.outputs
    assert all(record.finish is not None for record in ours.records.requests)
    assert len(ours.records.notes) == 1
    assert "draft process ended, exit code -9" in ours.records.notes[0]
    assert ours.records.rounds[0].num_draft_tokens + ours.records.rounds[1].num_draft_tokens > 0
    assert ours.records.rounds[-1].num_draft_tokens == 0


def exchange(draft: RemoteDraft, verdict: Verdict) -> None:
    draft.send(verdict)
    draft.receive()


@pytest.mark.parametrize("num_tokens", [10, 1_000_000], ids=["fits", "fills the line"])
def test_a_draft_process_that_hangs_is_lost_after_the_limit(monkeypatch, num_tokens):
    monkeypatch.setattr(remote_draft, "ANSWER_TIMEOUT", 1.0)
    draft = RemoteDraft(DraftSetup(idle_worker, 1))
    os.kill(draft.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DraftLostError, match="gave no answer within 1 s"):
            exchange(draft, Verdict(0, admitted=(Admission(0, (1,) * num_tokens, 5),)))
    finally:
        draft.close()
    assert not is_running(draft.pid)


@pytest.mark.parametrize("policy", ["tree-8x4x2", "async-tree-8x4x2"])
def test_an_interrupted_run_keeps_what_is_done(serve, make_requests, drafts, policy):
    requests = make_requests(6)
    plain = serve("plain", requests)
    calls = itertools.count()

    def interrupt(stage: str, done: int, total: int) -> None:
        if next(calls) == 10:
            raise KeyboardInterrupt

    ours = serve(policy, requests, progress=interrupt)
    assert "unfinished" in ours.records.notes[0]
    assert not any(is_running(draft.pid) for draft in drafts)
    emitted = 0
    for request_id, tokens in ours.outputs.items():
        assert tokens == plain.outputs[request_id][: len(tokens)]
        emitted += len(tokens)
    assert 0 < emitted < sum(len(tokens) for tokens in plain.outputs.values())


def test_requests_that_cannot_be_served_are_refused_while_others_go_on(serve, make_requests):
    good = make_requests(3)
    wrong = {
        "empty": {"prompt_ids": ()},
        "at least one": {"max_new_tokens": 0},
        "outside 0 to 60": {"prompt_ids": (5, 61)},
        "needs 525 KV tokens, the limit is 300": {"prompt_ids": (1,) * 500},
    }
    bad = [replace(good[0], request_id=3 + i, **what) for i, what in enumerate(wrong.values())]
    requests = [*good, *bad]
    ours = serve("plain", requests, max_kv_tokens=300)
    assert ours.records.refused.keys() == {3, 4, 5, 6}
    for (said, _), note in zip(wrong.items(), ours.records.notes, strict=True):
        assert said in note
    served = serve("plain", good).outputs
    assert ours.outputs == served | {number: [] for number in (3, 4, 5, 6)}


def test_a_run_without_a_request_that_can_be_served_ends_before_anything_starts(
    serve, make_requests
):
    with pytest.raises(InputError, match="request 0: it needs 26 KV tokens, the limit is 20"):
        serve("plain", make_requests(6), max_kv_tokens=20)


def test_requests_that_find_the_queue_full_are_refused(serve, make_requests):
    requests = make_requests(6)
    ours = serve("plain", requests, max_batch=2, max_waiting=1)
    assert ours.records.refused.keys() == {3, 4, 5}
    assert all(ours.outputs[number] == [] for number in (3, 4, 5))
    served = serve("plain", requests[:3]).outputs
    assert {number: ours.outputs[number] for number in range(3)} == served


def test_speculation_without_a_draft_is_refused(serve, make_requests):
    with pytest.raises(InputError, match="codesign models list"):
        serve("chain-3", make_requests(2), draft=None)


@pytest.mark.parametrize("policy", ["static-tree-4x4x8", "chain-128"])
def test_a_tree_of_more_rows_than_a_forward_is_refused_on_ranks(pair, make_requests, policy):
    candidate = Candidate(Deployment(1, 0), parse_policy(policy), 1)
    with pytest.raises(InputError, match=r"rows of a request at once, ranks at most 128\. Take"):
        rank_setup(
            candidate, make_requests(1), target=pair.target_dir, draft=pair.draft_dir, device="cpu"
        )


def test_a_draft_that_cannot_load_is_reported_and_leaves_no_process(
    serve, make_requests, drafts, tmp_path, capfd
):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DraftLostError, match="did not start, exit code 1"):
        serve("async-tree-8x4x2", make_requests(2), draft=DraftSource(tmp_path, tmp_path))
    assert not is_running(drafts[0].pid)
    assert "config.json" in capfd.readouterr().err


@pytest.fixture
def never_ready(monkeypatch) -> None:
    """Draft processes stay at their models for ever, however long this process is held up."""

    class NeverReady(RemoteDraft):
        def __init__(self, setup) -> None:
            super().__init__(replace(setup, build=functools.partial(time.sleep, 600)))

    monkeypatch.setattr(engine_run, "RemoteDraft", NeverReady)


@pytest.mark.usefixtures("never_ready")
def test_a_draft_that_is_killed_before_it_is_ready_gives_no_reason_above(
    serve, make_requests, monkeypatch
):
    receive = RemoteDraft._receive

    def kill(self, seconds: float):
        os.kill(self.pid, signal.SIGKILL)
        return receive(self, seconds)

    monkeypatch.setattr(RemoteDraft, "_receive", kill)
    with pytest.raises(DraftLostError, match="exit code -9; it was killed, maybe for lack of mem"):
        serve("async-tree-8x4x2", make_requests(2))


@pytest.mark.usefixtures("never_ready")
def test_a_draft_that_is_silent_until_it_is_given_up_was_not_short_of_memory(
    serve, make_requests, monkeypatch
):
    monkeypatch.setattr(remote_draft, "START_TIMEOUT", 0.01)
    monkeypatch.setattr(remote_draft, "END_TIMEOUT", 0.0)  # we kill it
    with pytest.raises(DraftLostError, match=r"did not start; it took too long\. Try"):
        serve("async-tree-8x4x2", make_requests(2))


def test_a_rank_whose_run_is_over_before_it_has_begun_ends_without_a_word(tmp_path, capfd):
    """The leader was killed, and another rank has removed their folder."""
    module = "codesign.engine.gpu.rank_process"
    rank = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        rank.stdin.write(f"1 {tmp_path / 'gone'}\n")
        rank.stdin.flush()
        assert rank.wait(timeout=60) == 1
    finally:
        rank.kill()
        rank.communicate()
    assert capfd.readouterr().err == ""


def test_an_error_in_the_draft_process_is_not_taken_for_a_normal_end(
    serve, make_requests, drafts, capfd
):
    requests = make_requests(3)
    # A stand-in for any error of torch in a forward: chunk(..., 0) in round 0 is a RuntimeError.
    broken = functools.partial(torch.chunk, torch.zeros(3))
    ours = serve("async-tree-8x4x2", requests, draft_delay=broken)
    assert "draft process ended, exit code 1" in ours.records.notes[0]
    assert ours.outputs == serve("plain", requests).outputs
    assert "RuntimeError" in capfd.readouterr().err


def test_a_signal_of_torchrun_after_a_rank_was_lost_leaves_what_is_done_to_be_written(
    pair, make_requests
):
    """The connection to a lost rank breaks first; torchrun sees a little later that it ended."""
    before = signal.getsignal(signal.SIGTERM)

    class Lost(TargetWorker):
        def verify(self, candidates, meanwhile, goes_on):
            raise TargetLostError("target ranks cannot be reached")

    class Told(NoDraft):
        def close(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    requests = make_requests(2)
    cache = KVCache(pair.target.shape, num_slots=2, max_tokens=100)
    schedule = Schedule(requests, BatchLimits(2, 1000), Serving(), round_rows=1)
    try:
        ranks = TorchrunRanks(SimpleNamespace(silence=60.0))
        worker = Lost(pair.target, cache, sampling=Sampling())
        records = Server(worker, Told(), schedule, requests, ended=ranks.let_write).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert records.notes == ["target ranks cannot be reached: 2 of 2 requests unfinished"]


@pytest.mark.parametrize("when", ["send", "receive"])
def test_a_partner_that_is_lost_is_told_of_once_closed_and_none_drafts_from_then_on(when):
    told, closed = [], []

    class Lost(NoDraft):
        is_async = True

        def close(self) -> None:
            closed.append(self)

    def lose(*_):
        raise DraftLostError("on purpose")

    lost = Lost()
    setattr(lost, when, lose)
    partner = LosablePartner(lost, told.append)
    assert partner.is_async
    for number in range(2):
        partner.send(Verdict(number, (), ()))
        assert partner.receive().candidates is None
    assert not partner.is_async
    assert list(map(str, told)) == ["on purpose"]
    assert closed == [lost]
