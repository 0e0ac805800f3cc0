"""A process that keeps one model busy while the other is timed in this process.

What a draft loses by sharing memory bandwidth with the target, and the target by sharing it with
the draft, is measured with a real neighbour of as many threads as the deployment gives it. Needs a
system where pipes can be polled (not Windows).
"""

from __future__ import annotations

import base64
import pickle
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from codesign.engine.model import load_decoder
from codesign.engine.run import DraftSource
from codesign.errors import HardwareError
from codesign.policy.walk import Sampling
from codesign.profiler.bench import DraftBench, TargetBench
from codesign.profiler.steps import StepShape

Side = Literal["target", "draft"]

_REQUESTS, _ROWS, _CONTEXT = 2, 4, 128  # a round as busy as a laptop's usually is
_START_SECONDS = 180.0  # importing torch and loading two models may take long
_ANSWER_SECONDS = 60.0
_REST = b"rest"


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
    """The process, from here: ``keep`` it busy with a model, or let it ``rest``.

    It reads a command a line and answers each with a line; when its input ends, so does it.

    Args:
        setup: What it loads.

    Raises:
        HardwareError: If it ends or does not answer.
    """

    def __init__(self, setup: NeighbourSetup) -> None:
        # A session of its own: Ctrl-C is for this process to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "codesign.profiler.neighbour"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._tell(base64.b64encode(pickle.dumps(setup)), _START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def keep(self, side: Side, *, num_threads: int) -> None:
        """Run steps of one model without a pause, until told otherwise."""
        self._tell(f"{side} {num_threads}".encode(), _ANSWER_SECONDS)

    def rest(self) -> None:
        """Do nothing until told otherwise."""
        self._tell(_REST, _ANSWER_SECONDS)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()  # closes both pipes and reaps

    def _tell(self, command: bytes, seconds: float) -> None:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None, "both pipes were asked for"
        assert back is not None, "both pipes were asked for"
        try:
            to.write(command + b"\n")
            to.flush()
        except (BrokenPipeError, ValueError) as err:  # it has ended, or was closed
            raise HardwareError(_lost("ended")) from err
        if not select.select([back], [], [], seconds)[0]:
            raise HardwareError(_lost(f"did not answer in {seconds:.0f} s"))
        if not back.readline():
            raise HardwareError(_lost("ended"))


def _lost(what: str) -> str:
    return (
        f"the second process of the measurement {what}; is there memory for both models twice? "
        "Go on with the same command and --resume"
    )


def _main() -> None:
    """Load both models, then do as the input says."""
    commands, answers = sys.stdin.buffer, sys.stdout.buffer
    first = commands.readline()
    if not first.endswith(b"\n"):  # the other end went before it had said what to load
        return
    setup: NeighbourSetup = pickle.loads(base64.b64decode(first))
    target = load_decoder(setup.target)
    size = {"num_requests": _REQUESTS, "max_context": setup.context}
    benches = {
        "target": TargetBench(target, sampling=setup.sampling, **size),
        "draft": DraftBench(setup.draft.load(target), **size),
    }
    work: tuple[TargetBench | DraftBench, StepShape] | None = None
    answer = True
    while True:
        if answer:
            answers.write(b"done\n")
            answers.flush()
        # A command comes only after the answer to the last: nothing hides in the buffer.
        answer = work is None or bool(select.select([commands], [], [], 0.0)[0])
        if answer:
            command = commands.readline().strip()
            if not command:  # the other end is gone: so are we
                return
            work = None if command == _REST else _work(benches, command, setup.context)
        if work is not None:
            work[0].seconds(work[1])  # before the answer: it is busy when it says so


def _work(
    benches: dict[str, TargetBench | DraftBench], command: bytes, context: int
) -> tuple[TargetBench | DraftBench, StepShape]:
    side, num_threads = command.decode().split()
    torch.set_num_threads(int(num_threads))
    op = "target" if side == "target" else "draft"
    return benches[side], StepShape(op, _REQUESTS, _ROWS, context)


if __name__ == "__main__":
    _main()
