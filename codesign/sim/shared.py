"""What the replicas of a run have in common: the clock, the requests, and who hears of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from codesign.records import RoundLog
from codesign.sim.requests import SimulatedRequest


def _nobody_comes(start: float, end: float) -> int:
    return 0


def _nobody_asks(request_id: int, at: float) -> None:
    """There is no pool for prompts."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all replicas of a run share.

    Attributes:
        env: The clock.
        requests: By number.
        rounds: Where rounds are written.
        on_finish: Called when a request is over.
        next_event: When something from outside happens to a replica next, at the earliest, by its
            number.
        on_taken: Called with a request whose prompt has run elsewhere, and when it was admitted.
        num_arriving: Requests that a replica is given after one time and not after another.
    """

    env: simpy.Environment
    requests: dict[int, SimulatedRequest]
    rounds: RoundLog
    on_finish: Callable[[], None]
    next_event: Callable[[int], float]
    on_taken: Callable[[int, float], None] = _nobody_asks
    num_arriving: Callable[[float, float], int] = _nobody_comes
