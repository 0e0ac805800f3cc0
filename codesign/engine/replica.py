"""One replica of several, from the process that routes: its process, its line and its load."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from codesign.candidate import Candidate
from codesign.engine.feed import Feed
from codesign.engine.partner import TargetLostError
from codesign.engine.remote_draft import exit_text
from codesign.engine.run import EngineRun, ServeOptions
from codesign.engine.source import EngineSource
from codesign.policy.kv_memory import PrefixCache
from codesign.prompts import BoundRequest

SETUP_FILE = "setup.pickle"


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """What a replica's process serves; picklable.

    Attributes:
        source: Its engine.
        candidate: Split, policy and batch limit of one replica.
        requests: All that may come.
        options: Of each replica.
    """

    source: EngineSource
    candidate: Candidate
    requests: Sequence[BoundRequest]
    options: ServeOptions

    def serve(self, feed: Feed) -> EngineRun:
        """Be a replica."""
        engine = self.source.load()
        return engine.serve(self.candidate, self.requests, self.options, feed=feed)


class Replica:
    """A replica's process, from here; its load, to the router.

    Args:
        folder: Where its ``ReplicaSetup`` lies.
        number: Of this replica.
        gpus: That it may use; None where it uses cores.
        cache: A guess at its prefix cache, if it has one: blocks that were sent there.
        max_kv_tokens: KV rows that it has.

    Attributes:
        run: What it sent at its end.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        gpus: Sequence[str] | None,
        cache: PrefixCache | None,
        max_kv_tokens: int,
    ) -> None:
        self.number = number
        self.cache = cache
        self.run: EngineRun | None = None
        self._max_kv_tokens = max_kv_tokens
        self._blocks: dict[int, tuple[int, ...]] = {}  # of requests that wait or run there
        self.line, theirs = Pipe()
        module = "codesign.engine.replica_process"
        words = [str(folder / SETUP_FILE), str(number), str(theirs.fileno())]
        environment = None
        if gpus is not None:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        # A session of its own: Ctrl-C is for this process to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()  # so that its end is seen here

    @property
    def num_requests(self) -> int:
        """Requests that wait or run there."""
        return len(self._blocks)

    def give(self, request_id: int, blocks: tuple[int, ...]) -> None:
        """A request goes there."""
        self._blocks[request_id] = blocks
        if self.cache is not None:
            self.cache.hold(blocks)
        self.tell(request_id)

    def tell(self, message: Any) -> None:
        """Send a message of ``feed``; a process that is gone is noticed when it should answer."""
        with contextlib.suppress(OSError):
            self.line.send(message)

    def hear(self) -> Any:
        """Its next message.

        Raises:
            TargetLostError: If its process has ended without what it should have sent.
        """
        try:
            message = self.line.recv()
        except (EOFError, OSError) as error:
            raise TargetLostError(f"replica {self.number} ended{self._exit_code()}") from error
        if isinstance(message, EngineRun):
            self.run = message
            if self._blocks:
                why = (message.records.notes or ["no reason given"])[-1]
                raise TargetLostError(f"replica {self.number} ended early ({why})")
        elif isinstance(message, list):
            self._forget(message)
        return message

    def _forget(self, request_ids: list[int]) -> None:
        for number in request_ids:
            blocks = self._blocks.pop(number)
            if self.cache is not None:
                self.cache.release(blocks)
                self.cache.shrink(max(self._max_kv_tokens - self.cache.held_tokens, 0))

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.line.close()
        try:
            self._process.wait(timeout=5.0 if self.run is not None else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exit_code(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the line may break first
            self._process.wait(timeout=1)
        return exit_text(self._process)
