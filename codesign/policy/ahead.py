"""Steps of plain decoding that a target's ranks begin before their host has read the last one.

What the engine does (engine/gpu/decode_ahead.py), the simulator prices (sim/under_way.py).

Must not import torch or read a clock.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from codesign.policy.step_time import StepTime

# Seconds before a step's end at which the next one is asked for, or is not; a host that is slow
# takes up to 150 us to start a step on all ranks. Who comes later joins a round later.
LEAD = 250e-6


@lru_cache(maxsize=64)
def asked(step: StepTime) -> StepTime:
    """A step that the host asks for when it has read the one before."""
    return replace(step, ahead=0.0, ahead_each=0.0)


def runs_ahead(step: StepTime) -> bool:
    """Whether steps were measured whose ranks do not wait for their host."""
    return bool(step.ahead or step.ahead_each)
