"""Disaggregated speculation: the draft model in an operating-system process of its own.

Two ranks of torch.distributed over gloo: 0 is the target (this process), 1 the draft. The draft
grows its trees while the target verifies. When it dies, every wait on it ends with DraftLostError.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter, sleep

import torch
import torch.distributed as dist

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.partner import Answer, DraftLostError
from codesign.engine.wire import (
    WireLimits,
    decode_candidates,
    decode_verdict,
    encode_candidates,
    encode_verdict,
    prompt_words,
)
from codesign.policy.protocol import Verdict

TARGET_RANK, DRAFT_RANK = 0, 1
START_TIMEOUT = timedelta(seconds=120)  # loading two models may take long
ANSWER_TIMEOUT = timedelta(seconds=60)  # a draft that is silent for this long counts as lost
IDLE_TIMEOUT = timedelta(hours=24)  # between two verdicts a trace may be silent


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """How the draft process makes its worker.

    Attributes:
        build: Called once in the draft process; picklable.
        limits: Message sizes.
        num_threads: CPU threads of the draft process.
        delay: Seconds to sleep before each answer, by round; for tests of timing.
    """

    build: Callable[[], DraftWorker]
    limits: WireLimits
    num_threads: int
    delay: Callable[[int], float] | None = None


class RemoteDraft:
    """The target's end of the pair.

    Args:
        setup: What the draft process builds.

    Raises:
        DraftLostError: If the draft process ends before it is ready.
    """

    is_async = True

    def __init__(self, setup: DraftSetup) -> None:
        self._limits = setup.limits
        self._folder = tempfile.TemporaryDirectory(prefix="codesign-")
        self._sent = 0.0
        store = str(Path(self._folder.name) / "rendezvous")
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_draft_main, args=(setup, store), daemon=True)
        self._process.start()
        try:
            _join(store, TARGET_RANK)
            self._ready = torch.zeros(1, dtype=torch.int32)
            self._receive(self._ready, START_TIMEOUT)
        except DraftLostError:
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            raise DraftLostError(f"draft process did not start: {_first_line(error)}") from error

    @property
    def pid(self) -> int:
        """Process number of the draft."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, verdict: Verdict) -> None:
        """Send a verdict, and prompts if there are any."""
        message, prompts = encode_verdict(verdict, self._limits)
        self._sent = perf_counter()
        try:
            dist.send(torch.from_numpy(message), DRAFT_RANK)
            if len(prompts):
                dist.send(torch.from_numpy(prompts), DRAFT_RANK)
        except RuntimeError as error:
            raise DraftLostError(self._cause(error)) from error

    def receive(self) -> Answer:
        """Wait for the candidates."""
        message = torch.zeros(self._limits.candidate_words, dtype=torch.int32)
        self._receive(message, ANSWER_TIMEOUT)
        received = perf_counter()
        candidates, times = decode_candidates(message.numpy())
        return Answer(candidates, self._sent, times, received)

    def close(self) -> None:
        """Tell the draft process to end, and end it if it does not."""
        with contextlib.suppress(DraftLostError):
            if self._process.is_alive() and dist.is_initialized():
                self.send(Verdict(0, is_last=True))
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    def _receive(self, message: torch.Tensor, timeout: timedelta) -> None:
        try:
            work = dist.irecv(message, DRAFT_RANK)
            assert work is not None
            work.wait(timeout)
        except RuntimeError as error:
            raise DraftLostError(self._cause(error)) from error

    def _cause(self, error: RuntimeError) -> str:
        self._process.join(timeout=1)
        if self._process.exitcode is not None:
            return f"draft process ended with code {self._process.exitcode}"
        return _first_line(error)


def _join(store: str, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: never wait for name look-ups
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=IDLE_TIMEOUT
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _draft_main(setup: DraftSetup, store: str) -> None:
    """Answer verdicts until the last one, or until the target is gone."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the target's to handle
    torch.set_num_threads(setup.num_threads)
    _join(store, DRAFT_RANK)
    worker = setup.build()
    with contextlib.suppress(RuntimeError):  # the target is gone: so are we
        dist.send(torch.ones(1, dtype=torch.int32), TARGET_RANK)
        _answer_verdicts(worker, setup)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def _answer_verdicts(worker: DraftWorker, setup: DraftSetup) -> None:
    message = torch.zeros(setup.limits.verdict_words, dtype=torch.int32)
    while True:
        dist.recv(message, TARGET_RANK)
        words = message.numpy()
        prompts = torch.zeros(prompt_words(words), dtype=torch.int32)
        if len(prompts):
            dist.recv(prompts, TARGET_RANK)
        verdict = decode_verdict(words, prompts.numpy())
        if verdict.is_last:
            return
        if setup.delay is not None:
            sleep(setup.delay(verdict.round))
        candidates, times = worker.answer(verdict)
        reply = encode_candidates(candidates, times, setup.limits)
        dist.send(torch.from_numpy(reply), TARGET_RANK)
        worker.overlap()
