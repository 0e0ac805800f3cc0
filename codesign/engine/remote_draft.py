"""Disaggregated speculation: the draft model in an operating-system process of its own.

Two ranks of torch.distributed over gloo: 0 is the target (this process), 1 the draft. The draft
grows its trees while the target verifies. When it dies, every wait on it ends with DraftLostError.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, perf_counter, sleep

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
END_TIMEOUT = 3.0  # seconds for a draft process to end by itself
SETUP_FILE, READY_FILE = "setup.pickle", "ready"


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """How the draft process makes its worker.

    Attributes:
        build: Makes the worker, in the draft process; picklable.
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
        folder = Path(self._folder.name)
        (folder / SETUP_FILE).write_bytes(pickle.dumps(setup))
        # A plain subprocess: unlike multiprocessing's "spawn" it does not run the user's script
        # again, so no script needs an ``if __name__ == "__main__"``.
        command = [sys.executable, "-m", "codesign.engine.draft_process", str(folder)]
        # A session of its own: Ctrl-C is the target's to handle, from the first moment.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._outgoing: list[tuple[dist.Work | None, torch.Tensor]] = []
        try:
            self._wait_until_ready(folder)
            _join(folder, TARGET_RANK, START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, folder: Path) -> None:
        deadline = monotonic() + START_TIMEOUT.total_seconds()
        while not (folder / READY_FILE).exists():
            if self._process.poll() is not None or monotonic() > deadline:
                raise DraftLostError(
                    f"draft process did not start{self._exit_code()}; the reason stands above. "
                    "Try it in one process: codesign run --plan PLAN --candidate chain-3"
                )
            sleep(0.02)

    @property
    def pid(self) -> int:
        """Process number of the draft."""
        return self._process.pid

    def send(self, verdict: Verdict) -> None:
        """Send a verdict, and prompts if there are any, without waiting until they are received."""
        message, prompts = encode_verdict(verdict, self._limits)
        self._sent = perf_counter()
        try:
            self._finish_sending()
            for words in (message, prompts) if len(prompts) else (message,):
                tensor = torch.from_numpy(words)
                self._outgoing.append((dist.isend(tensor, DRAFT_RANK), tensor))
        except RuntimeError as error:
            raise DraftLostError(self._cause(error)) from error

    def _finish_sending(self) -> None:
        """Wait until the draft has taken what was sent; the tensors must live until then."""
        while self._outgoing:
            work, _ = self._outgoing.pop(0)
            if work is not None:
                work.wait(ANSWER_TIMEOUT)

    def receive(self) -> Answer:
        """Wait for the candidates."""
        message = torch.zeros(self._limits.candidate_words, dtype=torch.int32)
        self._receive(message, ANSWER_TIMEOUT)
        received = perf_counter()
        candidates, times = decode_candidates(message.numpy())
        return Answer(candidates, self._sent, times, received)

    def run_prompts(self) -> None:
        """The draft runs them after it has answered."""

    def close(self) -> None:
        """Tell the draft process to end, and end it if it does not."""
        with contextlib.suppress(DraftLostError):
            if self._process.poll() is None and dist.is_initialized() and not self._outgoing:
                self.send(Verdict(0, is_last=True))
        try:
            self._process.wait(timeout=END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._outgoing.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    def _receive(self, message: torch.Tensor, timeout: timedelta) -> None:
        try:
            work = dist.irecv(message, DRAFT_RANK)
            assert work is not None
            work.wait(timeout)
            self._finish_sending()
        except RuntimeError as error:
            raise DraftLostError(self._cause(error)) from error

    def _cause(self, error: RuntimeError) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the connection may break first
            self._process.wait(timeout=1)
        code = self._exit_code()
        return f"draft process ended{code}" if code else str(error).partition("\n")[0]

    def _exit_code(self) -> str:
        code = self._process.poll()
        return "" if code is None else f", exit code {code}"


def _join(folder: Path, rank: int, timeout: timedelta) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: never wait for name look-ups
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)


def serve_draft(folder: Path) -> None:
    """Be the draft process: answer verdicts until the last one, or until the target is gone."""
    setup: DraftSetup = pickle.loads((folder / SETUP_FILE).read_bytes())
    torch.set_num_threads(setup.num_threads)
    worker = setup.build()
    (folder / READY_FILE).touch()
    _join(folder, DRAFT_RANK, IDLE_TIMEOUT)
    _answer_verdicts(worker, setup)
    dist.destroy_process_group()


def _answer_verdicts(worker: DraftWorker, setup: DraftSetup) -> None:
    while (verdict := _next_verdict(setup.limits)) is not None and not verdict.is_last:
        if setup.delay is not None:
            sleep(setup.delay(verdict.round))
        candidates, times = worker.answer(verdict)
        reply = torch.from_numpy(encode_candidates(candidates, times, setup.limits))
        work = dist.isend(reply, TARGET_RANK)
        worker.overlap()  # the target may take the reply later: it may be prefilling
        with contextlib.suppress(RuntimeError):  # the next verdict's absence will tell
            if work is not None:
                work.wait()


def _next_verdict(limits: WireLimits) -> Verdict | None:
    """The next verdict; None when the target is gone."""
    message = torch.zeros(limits.verdict_words, dtype=torch.int32)
    try:
        dist.recv(message, TARGET_RANK)
        words = message.numpy()
        prompts = torch.zeros(prompt_words(words), dtype=torch.int32)
        if len(prompts):
            dist.recv(prompts, TARGET_RANK)
    except RuntimeError:
        return None
    return decode_verdict(words, prompts.numpy())
