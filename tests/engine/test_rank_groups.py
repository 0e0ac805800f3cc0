"""Rank groups on a CPU: the GPU engine's code with plain PyTorch ops, over gloo and shared memory.

Outputs are compared with plain decoding on one rank at the same number of rows, in float32.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu import ranks as ranks_module
from codesign.engine.gpu.launch import LocalRanks
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.watch import SILENCE
from codesign.errors import HardwareError
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling

SAMPLINGS = {
    "greedy": Sampling(),
    "0.7": Sampling(temperature=0.7, seed=3),
    "1.0, top-p": Sampling(temperature=1.0, top_p=0.9, seed=4),
}


@pytest.fixture
def serve_ranks(pair):
    """Serve requests with a policy label on target and draft ranks of this host's CPU."""

    def run(policy, requests, *, target_ranks=1, draft_ranks=0, max_batch=3, **options):
        candidate = Candidate(
            Deployment(target_ranks, draft_ranks), parse_policy(policy), max_batch
        )
        run_options = {k: options.pop(k) for k in ("inspect", "progress") if k in options}
        options.setdefault("check", True)
        setup = rank_setup(
            candidate,
            requests,
            target=pair.target_dir,
            draft=pair.draft_dir,
            device="cpu",
            dtype="float32",
            **options,
        )
        faults = []
        run_options.setdefault(
            "inspect", lambda rank: faults.extend(m.num_faults() for m in rank.models.values())
        )
        result = run_on_ranks(setup, candidate, requests, **run_options)
        assert not any(faults)
        return result

    return run


@pytest.fixture
def plain_on_a_rank(serve_ranks, kept_runs):
    """Plain decoding on one rank, once for the same requests and sampling."""

    def run(requests, sampling=None):
        key = (tuple(requests), sampling)
        if key not in kept_runs:
            kept_runs[key] = serve_ranks("plain", requests, sampling=sampling or Sampling())
        return kept_runs[key]

    return run


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_one_rank_decodes_as_the_cpu_engine_does(serve, serve_ranks, make_requests, sampling):
    requests = make_requests(5)
    assert (
        serve_ranks("plain", requests, sampling=sampling).outputs
        == serve("plain", requests, sampling=sampling).outputs
    )


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("policy", ["chain-3", "tree-8x4x2", "tree-4x2x3"])
def test_serial_speculation_changes_no_token(
    serve_ranks, plain_on_a_rank, make_requests, policy, sampling
):
    requests = make_requests(5)
    plain = plain_on_a_rank(requests, sampling)
    ours = serve_ranks(policy, requests, sampling=sampling)
    assert ours.outputs == plain.outputs
    assert len(ours.records.rounds) < len(plain.records.rounds)


@pytest.mark.parametrize(
    ("policy", "target_ranks", "draft_ranks"),
    [("plain", 2, 0), ("tree-8x4x2", 3, 0), ("async-tree-8x4x2", 1, 1), ("async-tree-8x4x2", 2, 2)],
)
def test_any_split_of_the_ranks_changes_no_token(
    serve_ranks, plain_on_a_rank, make_requests, policy, target_ranks, draft_ranks
):
    requests = make_requests(5)
    sampling = SAMPLINGS["0.7"]
    plain = plain_on_a_rank(requests, sampling)
    ours = serve_ranks(
        policy, requests, sampling=sampling, target_ranks=target_ranks, draft_ranks=draft_ranks
    )
    assert ours.outputs == plain.outputs
    assert not ours.records.notes
    if policy != "plain":
        assert len(ours.records.rounds) < len(plain.records.rounds)


def test_ranks_in_turns_gather_through_their_sums(serve_ranks, plain_on_a_rank, make_requests):
    requests, sampling = make_requests(3), SAMPLINGS["0.7"]
    plain = plain_on_a_rank(requests, sampling)
    ours = serve_ranks(
        "async-tree-8x4x2", requests, sampling=sampling, target_ranks=2, draft_ranks=2,
        shares_gpus=True,
    )  # fmt: skip
    assert ours.outputs == plain.outputs


def test_acceptance_is_that_of_the_cpu_engine(serve, serve_ranks, make_requests):
    """Wrong KV rows on the draft's side would change no token, but what is accepted."""
    requests = make_requests(5, max_new_tokens=40)
    for policy in ("tree-8x4x2", "chain-3"):
        theirs, ours = serve(policy, requests, max_batch=3), serve_ranks(policy, requests)
        assert [r.num_accepted_tokens for r in ours.records.requests] == [
            r.num_accepted_tokens for r in theirs.records.requests
        ]


HUNG = 3.0  # seconds of silence; longer than a busy machine holds a process up


class Killer:
    """Signals a rank after some progress; rank numbers as in ``LocalRanks.pids``."""

    def __init__(
        self, monkeypatch, rank: int, *, after: int, sign: signal.Signals = signal.SIGKILL
    ) -> None:
        self._rank, self._left, self._sign = rank, after, sign
        self._ranks: list[LocalRanks] = []
        start = LocalRanks.__init__

        def kept(ranks, setup) -> None:
            self._ranks.append(ranks)
            start(ranks, setup)

        monkeypatch.setattr(LocalRanks, "__init__", kept)

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._left -= 1
        if self._left == 0:
            self.at = time.monotonic()
            os.kill(self._ranks[-1].pids[self._rank], self._sign)


def test_a_killed_draft_rank_loses_no_request(
    serve_ranks, plain_on_a_rank, make_requests, monkeypatch
):
    requests = make_requests(5)
    plain = plain_on_a_rank(requests)
    killer = Killer(monkeypatch, 0, after=8)
    ours = serve_ranks("async-tree-8x4x2", requests, target_ranks=1, draft_ranks=1, progress=killer)
    assert ours.outputs == plain.outputs
    assert "draft rank 0 ended, exit code -9" in ours.records.notes[0]


def test_a_killed_target_rank_ends_the_run_soon_with_what_is_done(
    serve_ranks, plain_on_a_rank, make_requests, monkeypatch
):
    requests = make_requests(5)
    plain = plain_on_a_rank(requests)
    killer = Killer(monkeypatch, 1, after=8)
    ours = serve_ranks("plain", requests, target_ranks=2, progress=killer, inspect=None)
    assert time.monotonic() - killer.at < SILENCE
    assert "target rank 1 ended, exit code -9: 5 of 5 requests unfinished" in ours.records.notes[0]
    assert any(ours.outputs.values())
    for request_id, tokens in ours.outputs.items():
        assert tokens == plain.outputs[request_id][: len(tokens)]


def test_a_hung_draft_rank_loses_no_request(
    serve_ranks, plain_on_a_rank, make_requests, monkeypatch
):
    requests = make_requests(4)
    plain = plain_on_a_rank(requests)
    killer = Killer(monkeypatch, 0, after=8, sign=signal.SIGSTOP)
    ours = serve_ranks("async-tree-8x4x2", requests, draft_ranks=1, progress=killer, silence=HUNG)
    assert ours.outputs == plain.outputs
    assert f"the draft gave no answer within {HUNG:g} s" in ours.records.notes[0]


def test_a_hung_follower_of_the_draft_loses_no_request(
    serve_ranks, plain_on_a_rank, make_requests, monkeypatch
):
    """Its leader notices; so does the target, whichever is first."""
    requests = make_requests(4)
    plain = plain_on_a_rank(requests)
    killer = Killer(monkeypatch, 1, after=8, sign=signal.SIGSTOP)
    ours = serve_ranks("async-tree-8x4x2", requests, draft_ranks=2, progress=killer, silence=HUNG)
    assert ours.outputs == plain.outputs
    assert "draft lost in round" in ours.records.notes[0]


def test_a_hung_target_rank_ends_the_run_soon_with_what_is_done(
    serve_ranks, plain_on_a_rank, make_requests, monkeypatch
):
    requests = make_requests(4)
    plain = plain_on_a_rank(requests)
    killer = Killer(monkeypatch, 1, after=8, sign=signal.SIGSTOP)
    ours = serve_ranks(
        "plain", requests, target_ranks=2, progress=killer, inspect=None, silence=HUNG
    )
    assert time.monotonic() - killer.at < SILENCE
    assert "4 of 4 requests unfinished" in ours.records.notes[0]
    assert any(ours.outputs.values())
    for request_id, tokens in ours.outputs.items():
        assert tokens == plain.outputs[request_id][: len(tokens)]


@pytest.mark.parametrize(
    ("policy", "ranks", "named"),
    [
        ("plain", {"target_ranks": 2}, "target rank 1 ended, exit code -9"),
        ("async-tree-8x4x2", {"draft_ranks": 1}, "draft rank 0 ended, exit code -9"),
    ],
)
def test_a_rank_that_dies_while_the_ranks_meet_is_said_at_once(
    serve_ranks, make_requests, monkeypatch, policy, ranks, named
):
    """The leader would wait for it in C++, as long as loading large models may take."""
    ready, killed = LocalRanks.wait_until_loaded, []

    def kill(self) -> None:
        ready(self)
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        killed.append(time.monotonic())

    monkeypatch.setattr(LocalRanks, "wait_until_loaded", kill)
    with pytest.raises(HardwareError, match=named):
        serve_ranks(policy, make_requests(2), **ranks)
    assert time.monotonic() - killed[0] < 30


def test_a_rank_that_dies_while_others_load_is_said_as_such(
    serve_ranks, make_requests, monkeypatch
):
    load = ranks_module._model_rank

    def kill(setup, model, forward, core):
        started_ranks[-1].kill()
        return load(setup, model, forward, core)

    started_ranks = []
    start = LocalRanks._start

    def kept(self, rank):
        started_ranks.append(start(self, rank))
        return started_ranks[-1]

    monkeypatch.setattr(LocalRanks, "_start", kept)
    monkeypatch.setattr(ranks_module, "_model_rank", kill)
    with pytest.raises(HardwareError, match="target rank 1 ended, exit code -9"):
        serve_ranks("plain", make_requests(2), target_ranks=2)
