"""How far the simulations of a search are, in requests, and how many are still expected."""

from __future__ import annotations

from codesign import Progress


class Tally:
    """Counts requests that were simulated, and tells of them.

    What may be simulated later is expected from the start, so that what is told as left shrinks
    where it is not needed, and hardly ever grows.

    Args:
        progress: Called as ``progress(stage, requests done, requests in all)``.
        stage: Name of the first stage.
    """

    def __init__(self, progress: Progress | None, stage: str) -> None:
        self._progress, self._stage = progress, stage
        self._done = self._total = 0

    def expect(self, num_requests: int) -> None:
        """From now on so many are left."""
        self._total = self._done + num_requests

    def add(self, num_requests: int) -> None:
        """So many were simulated; the last one is only told of by ``end``."""
        self._done += num_requests
        if self._progress and num_requests:
            self._progress(self._stage, self._done, max(self._total, self._done + 1))

    def end(self) -> None:
        """The stage is done, whatever was expected."""
        if self._progress and self._done:
            self._progress(self._stage, self._done, self._done)
        self._done = self._total = 0

    def begin(self, stage: str) -> None:
        """End this stage; another one begins, with nothing done."""
        self.end()
        self._stage = stage
