"""Disaggregated speculation: the draft model in an operating-system process of its own.

Messages go through a pair of sockets. The draft grows its trees while the target verifies. When it
dies, every wait on it ends with DraftLostError; when the target does, the draft ends, too.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import Any

import torch

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.garbage import collected_beside
from codesign.engine.partner import Answer, DraftLostError
from codesign.policy.protocol import Verdict

START_TIMEOUT = 120.0  # seconds; loading two models may take long
ANSWER_TIMEOUT = 60.0  # a draft that is silent for this long counts as lost
END_TIMEOUT = 3.0  # for a draft process to end by itself


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """How the draft process makes its worker; picklable.

    Attributes:
        build: Makes the worker, in the draft process.
        num_threads: CPU threads of the draft process.
        delay: Seconds to sleep before each answer, by round; for tests of timing.
    """

    build: Callable[[], DraftWorker]
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
        ours, theirs = socket.socketpair()
        # A draft that hangs takes nothing: what does not fit its buffer must not wait for ever.
        limit = struct.pack("ll", int(ANSWER_TIMEOUT), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._line = Connection(ours.detach())
        self._sent = 0.0
        with theirs:
            # A plain subprocess: unlike multiprocessing's "spawn" it does not run the user's script
            # again, so no script needs an ``if __name__ == "__main__"``.
            module = "codesign.engine.draft_process"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A session of its own: Ctrl-C is the target's to handle, from the first moment.
                start_new_session=True,
            )
        try:
            self._send(setup)
            self._receive(START_TIMEOUT)
        except DraftLostError as lost:
            failure = f"{exit_text(self._process)}; {start_failure(self._process)}"
            self.close()
            raise DraftLostError(
                f"draft process did not start{failure}. "
                "Try it in one process: codesign run --plan PLAN --candidate chain-3"
            ) from lost
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process number of the draft."""
        return self._process.pid

    def send(self, verdict: Verdict) -> None:
        """Send a verdict; it waits in a buffer while the draft is busy."""
        self._sent = perf_counter()
        self._send(verdict)

    def receive(self) -> Answer:
        """Wait for the candidates."""
        candidates, times = self._receive(ANSWER_TIMEOUT)
        return Answer(candidates, self._sent, times, perf_counter())

    def run_prompts(self) -> None:
        """The draft runs them after it has answered."""

    def catch_up(self) -> None:
        """The draft does so after it has answered."""

    def rests_on(self) -> bool:
        """Nobody knows before it has answered."""
        return False

    def close(self) -> None:
        """Let the draft process end, which it does without a line, or end it."""
        self._line.close()
        try:
            self._process.wait(timeout=END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: object) -> None:
        try:
            self._line.send_bytes(pickle.dumps(message))
        except BlockingIOError as error:
            raise _silence(ANSWER_TIMEOUT) from error
        except OSError as error:
            raise self._end() from error

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._line.poll(seconds):
                raise _silence(seconds)
            return pickle.loads(self._line.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._end() from error

    def _end(self) -> DraftLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its line breaks before it ends
            self._process.wait(timeout=ANSWER_TIMEOUT)
        return DraftLostError(f"draft process ended{exit_text(self._process)}")


def exit_text(process: subprocess.Popen[Any]) -> str:
    """Words behind "ended"; none while it runs."""
    code = process.poll()
    return "" if code is None else f", exit code {code}"


def start_failure(process: subprocess.Popen[Any]) -> str:
    """Why a process did not start: it has said so itself, unless it runs or was killed."""
    code = process.poll()
    if code is None:
        return "it took too long"
    return "it was killed, maybe for lack of memory" if code < 0 else "the reason is above"


def _silence(seconds: float) -> DraftLostError:
    return DraftLostError(f"the draft process gave no answer within {seconds:g} s")


def serve_draft(line: Connection) -> None:
    """Be the draft process: answer verdicts until the target lets it go, or is gone."""
    setup: DraftSetup | None = _next(line)
    if setup is None:
        return
    torch.set_num_threads(setup.num_threads)
    worker = setup.build()
    _say(line, "ready")
    with collected_beside():
        while (verdict := _next(line)) is not None:
            if setup.delay is not None:
                sleep(setup.delay(verdict.round))
            _say(line, worker.answer(verdict))
            worker.overlap()


def _say(line: Connection, message: object) -> None:
    with contextlib.suppress(OSError):  # the next verdict's absence will tell
        line.send_bytes(pickle.dumps(message))


def _next(line: Connection) -> Any:
    """The next message; None when the target is gone."""
    try:
        message = line.recv_bytes()
    except (EOFError, OSError):
        return None
    return pickle.loads(message)
