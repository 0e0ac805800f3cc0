"""A replica's end of its line to the process that routes: requests come in, news go out.

What goes through is pickled, by two processes of one program. In: the start of the run, numbers of
requests, then OVER, or STOP at any time. Out: READY, lists of the numbers of requests that are
over, and the ``EngineRun`` at the end.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from codesign.engine.partner import TargetLostError

READY, OVER, STOP = "ready", "over", "stop"


class Feed:
    """Where a replica's loop gets its requests from.

    Args:
        line: To the process that routes.
        replica: Number of this replica.

    Attributes:
        is_over: Whether every request of this replica has come.
    """

    def __init__(self, line: Connection, replica: int) -> None:
        self._line = line
        self.replica = replica
        self.is_over = False

    def start(self) -> float:
        """Say that this replica can serve, and wait for the others.

        Returns:
            ``perf_counter`` at the start of the run, a clock that processes of one host share.

        Raises:
            TargetLostError: If the process that routes is gone.
        """
        self._line.send(READY)
        return self._receive()

    def take(self, *, wait: bool) -> list[int]:
        """Requests that have come since.

        Args:
            wait: For one, if none has and more may come.

        Raises:
            KeyboardInterrupt: If the run is to stop.
            TargetLostError: If the process that routes is gone.
        """
        taken: list[int] = []
        while not self.is_over and ((wait and not taken) or self._line.poll()):
            message = self._receive()
            if message == STOP:
                raise KeyboardInterrupt
            if message == OVER:
                self.is_over = True
            else:
                taken.append(message)
        return taken

    def finished(self, numbers: list[int]) -> None:
        """Requests are over: finished, or refused for want of room in the queue."""
        try:
            self._line.send(numbers)
        except OSError:  # the next ``take`` says it
            return

    def _receive(self) -> Any:
        try:
            return self._line.recv()
        except (EOFError, OSError) as error:
            raise TargetLostError("the process that routes requests is gone") from error
