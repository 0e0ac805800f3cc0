"""A roofline of one engine: what a few of its steps say of degrees that nobody has run.

The data sheets' roofline is fitted to whole engines of others and is 20 to 120 % too slow for ours.
Here the same line is fitted to steps of one engine: the bandwidth at which it reads its weights,
its seconds per layer, per all-reduce and per further peer. What grows with rows or context stays as
the data sheet says, which holds for as many rows as one tile of the products has (8).

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from codesign.errors import InputError
from codesign.fit.devices import Device
from codesign.fit.least_squares import non_negative_fit
from codesign.fit.priced_model import PricedModel
from codesign.fit.roofline import DEFAULT_SOFTWARE, Forward, Software


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One forward that was timed.

    Attributes:
        model: What ran.
        gpus: Tensor parallel degree.
        rows: Of the forward.
        context: KV rows before it.
        seconds: That it took.
    """

    model: PricedModel
    gpus: int
    rows: int
    context: int
    seconds: float

    def predicted(self, device: Device, software: Software) -> float:
        """Its seconds by a roofline."""
        forward = Forward(self.model, device, self.gpus, software)
        return forward.decode(self.rows, self.context)


def engine_software(
    steps: Sequence[TimedStep], device: Device, base: Software = DEFAULT_SOFTWARE
) -> Software:
    """How near the engine that took these steps comes to the hardware.

    Args:
        steps: At one degree at least; all-reduces and peers can be told from steps at two and at
            three only, and are taken from ``base`` and as none before.
        device: That they ran on.
        base: For what steps do not tell.

    Raises:
        InputError: If there is no step.
    """
    if not steps:
        raise InputError("no steps were timed. Measure some: codesign profile")
    kinds = sorted({kind for step in steps for kind in step.model.weight_bytes(step.gpus)})
    design = np.array([_terms(step, device, kinds) for step in steps])
    rest = np.array([_beyond(step, device) for step in steps])
    found = non_negative_fit(design, rest, np.array([step.seconds for step in steps])).tolist()
    layer, all_reduce, peer = found[len(kinds) :]
    shares = {kind: 1.0 / cost for kind, cost in zip(kinds, found, strict=False) if cost > 0}
    degrees = {step.gpus for step in steps} - {1}
    link = device.link
    reduces = {**base.all_reduce, link: all_reduce if degrees else base.all_reduce[link]}
    return replace(
        base,
        weight_share={**base.weight_share, **shares},
        layer=layer,
        all_reduce=reduces,
        peer=peer if len(degrees) > 1 else 0.0,
    )


def _terms(step: TimedStep, device: Device, kinds: Sequence[str]) -> list[float]:
    """What each coefficient is multiplied by in a step's seconds."""
    read, layers = step.model.weight_bytes(step.gpus), step.model.shape.layers
    reduces = 2 * layers if step.gpus > 1 else 0
    seconds = [read.get(kind, 0.0) / device.memory_bandwidth for kind in kinds]
    return [*seconds, layers, reduces, reduces * (step.gpus - 1)]


def _beyond(step: TimedStep, device: Device) -> float:
    """Seconds of a step less those of its rows and its context."""
    forward = Forward(step.model, device, step.gpus)
    return step.seconds - forward.alpha * step.context - forward.gamma * step.rows


def errors_by_degree(
    steps: Sequence[TimedStep], device: Device, most: int, base: Software = DEFAULT_SOFTWARE
) -> list[tuple[TimedStep, float]]:
    """Relative error of each step on more than ``most`` GPUs when the others are fitted to.

    Args:
        steps: Timed on several numbers of GPUs.
        device: The GPU.
        most: GPUs of the steps that are fitted to.
        base: What the steps do not show.
    """
    software = engine_software([s for s in steps if s.gpus <= most], device, base)
    return [
        (step, step.predicted(device, software) / step.seconds - 1.0)
        for step in steps
        if step.gpus > most
    ]
