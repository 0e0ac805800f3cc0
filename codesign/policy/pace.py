"""What a token of a running request takes, lately, and what it would in a larger or smaller batch.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable

_MEMORY = 0.1  # weight of a round


class Pace:
    """Takes in rounds.

    Args:
        step: Seconds of a plain round of so many requests.
    """

    def __init__(self, step: Callable[[float], float]) -> None:
        self._step = step
        self._running = 1.0
        self.token = self.round = step(1.0)  # seconds of a token of a request, and of a round

    def round_over(self, seconds: float, running: int, emitted: int) -> None:
        """A round took so long, without its prompts, and all emitted so much."""
        self.token += _MEMORY * (seconds * running / emitted - self.token)
        self.round += _MEMORY * (seconds - self.round)
        self._running += _MEMORY * (running - self._running)

    def of(self, running: int) -> float:
        """Seconds of a token if so many run: steps of other batches differ as plain ones do."""
        return self.token * self._step(float(running)) / self._step(self._running)
