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
        self._share = 1.0  # of a plain round of as many, that a token takes
        self.token = self.round = step(1.0)  # seconds of a token of a request, and of a round

    def round_over(self, seconds: float, running: int, emitted: int) -> None:
        """A round took so long, without its prompts, and all emitted so much."""
        token = seconds * running / emitted
        self.token += _MEMORY * (token - self.token)
        self.round += _MEMORY * (seconds - self.round)
        self._share += _MEMORY * (token / self._step(float(running)) - self._share)

    def of(self, running: int) -> float:
        """Seconds of a token if so many run: rounds of other batches differ as plain ones do."""
        return self._share * self._step(float(running))

    def least(self) -> float:
        """The same where few run; two may be faster than one that its host delays."""
        return min(self.of(1), self.of(2))
