"""A process that keeps one model busy while the other is timed in this process.

What a draft loses by sharing memory bandwidth with the target, and the target by sharing it with
the draft, is measured with a real neighbour, pinned to as many threads as the deployment gives it.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch

from codesign.engine.measure import DraftBench, TargetBench
from codesign.engine.model import load_decoder
from codesign.engine.run import DraftSource
from codesign.errors import HardwareError
from codesign.policy.walk import Sampling
from codesign.profile_steps import StepShape

Side = Literal["target", "draft"]

_REQUESTS, _ROWS, _CONTEXT = 2, 4, 128  # a round as busy as a laptop's usually is
_START_SECONDS = 180.0  # importing torch and loading two models may take long
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class NeighbourSetup:
    """What the neighbour loads; picklable.

    Attributes:
        target: Directory of the target.
        draft: Where the draft comes from.
        sampling: How the target samples.
        context: Most KV rows that both models can take.
    """

    target: Path
    draft: DraftSource
    sampling: Sampling
    context: int = _CONTEXT


class Neighbour:
    """The process, from here: ``keep`` it busy with a model, or ``rest``.

    Raises:
        HardwareError: If it ends or does not answer.
    """

    def __init__(self, setup: NeighbourSetup) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_main, args=(setup, far_end), daemon=True)
        self._process.start()
        far_end.close()
        self._wait(_START_SECONDS)

    def keep(self, side: Side, *, num_threads: int) -> None:
        """Run steps of one model without a pause, until told otherwise."""
        self._tell((side, num_threads))

    def rest(self) -> None:
        """Do nothing until told otherwise."""
        self._tell(None)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _tell(self, command: tuple[Side, int] | None) -> None:
        try:
            self._pipe.send(command)
        except OSError as err:
            raise HardwareError(_lost("ended")) from err
        self._wait(_ANSWER_SECONDS)

    def _wait(self, seconds: float) -> None:
        try:
            if not self._pipe.poll(seconds):
                raise HardwareError(_lost(f"did not answer in {seconds:.0f} s"))
            self._pipe.recv()
        except (EOFError, OSError) as err:
            raise HardwareError(_lost("ended")) from err


def _lost(what: str) -> str:
    return (
        f"the second process of the measurement {what}; is there memory for both models twice? "
        "Go on with what was measured: codesign profile --resume"
    )


def _main(setup: NeighbourSetup, pipe: Connection) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's to handle
    target = load_decoder(setup.target)
    benches = {
        "target": TargetBench(
            target,
            sampling=setup.sampling,
            num_requests=_REQUESTS,
            max_context=setup.context,
        ),
        "draft": DraftBench(
            setup.draft.load(target), num_requests=_REQUESTS, max_context=setup.context
        ),
    }
    command: tuple[Side, int] | None = None
    try:
        pipe.send("ready")
        while True:
            if command is None or pipe.poll():
                command = pipe.recv()
                if command is not None:
                    torch.set_num_threads(command[1])
                    _step(benches, command[0], setup.context)  # busy from before the answer on
                pipe.send("done")
            else:
                _step(benches, command[0], setup.context)
    except (EOFError, OSError):  # the other end is gone: so are we
        return


def _step(benches: dict[str, TargetBench | DraftBench], side: Side, context: int) -> None:
    benches[side].seconds(StepShape(side, _REQUESTS, _ROWS, context))
