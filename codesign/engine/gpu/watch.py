"""Waiting for other ranks: how long, and which error says that they are gone.

A rank can be gone (its process ended, its connections closed) or hang (nothing comes). Both end
every wait on it: the first within a second, the second after ``limit`` seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from time import sleep
from typing import NoReturn, TypeVar

import torch.distributed as dist

from codesign.engine.partner import DraftLostError, TargetLostError
from codesign.kernels.symmetric import PeerLostError

_Made = TypeVar("_Made")
SILENCE = 60.0  # seconds without an answer after which a rank counts as lost
_LOOK_SECONDS = 0.05
_CAUSE_LOOKS = 20  # a connection breaks before the end of its process can be seen


@dataclass(frozen=True, slots=True)
class Watch:
    """Watches the ranks at the other end of a wait.

    Attributes:
        who: Their name in the error.
        lost: The error.
        limit: Seconds of silence after which they count as lost; None where silence is right.
        check: Raises if a process of theirs has ended, where that can be seen.
    """

    who: str
    lost: type[DraftLostError] | type[TargetLostError]
    limit: float | None = None
    check: Callable[[], None] | None = None

    def look(self, waited: float) -> None:
        """Raise if the others are lost, ``waited`` seconds into a wait."""
        if self.check is not None:
            self.check()
        if self.limit is not None and waited > self.limit:
            raise self.lost(f"{self.who} gave no answer within {self.limit:g} s")

    def broken(self, error: BaseException) -> NoReturn:
        """A connection broke or timed out: raise what is the cause of it."""
        # Looks are counted, not seconds: on a host that stood still none may be left of these.
        for _ in range(_CAUSE_LOOKS):
            if self.check is None:
                break
            self.check()
            sleep(_LOOK_SECONDS)
        reason = str(error).partition("\n")[0].rpartition("] ")[2]
        raise self.lost(f"{self.who} cannot be reached: {reason}") from error

    def over(self, make: Callable[[], _Made]) -> _Made:
        """What ``make`` returns: it meets the others in C++, where neither a signal nor their end
        is seen, and so has a thread, which is left behind where they are lost.
        """
        made: Future[_Made] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except BaseException as error:  # raised again below
                made.set_exception(error)

        thread = Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            if not made.done():
                self.look(0.0)
        return made.result()


def is_broken_collective(error: BaseException) -> bool:
    """Whether an error says that another rank is gone, and not that this one erred."""
    return isinstance(error, dist.DistError | PeerLostError) or "gloo" in str(error)
