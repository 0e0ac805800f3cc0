"""Start the other ranks of a run on this host, notice when one is gone, and end them.

Under torchrun the ranks are there already: ``TorchrunRanks`` is the same handle without processes.
torchrun ends all of them as soon as one fails.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.watch import Watch
from codesign.engine.partner import DraftLostError, TargetLostError
from codesign.engine.remote_draft import exit_text, start_failure
from codesign.errors import HardwareError

SETUP_FILE = "setup.pickle"
START_SECONDS = 600.0
END_SECONDS = 5.0
MOST_ON_CPU = 16  # ranks that stand for GPUs: each is a process that loads torch and the models
_MODULE = "codesign.engine.gpu.rank_process"
_waiting: list[subprocess.Popen[str]] = []  # for a run of this process to take


def keep_waiting(count: int) -> None:
    """Start processes that load what every rank needs, for runs of this process to come."""
    _waiting.extend(_rank_process() for _ in range(count))


def check_on_cpu(needed: int, fix: str) -> None:
    """Refuse more ranks than a CPU is asked to start, with the advice ``fix``.

    Raises:
        HardwareError: If there are more.
    """
    if needed > MOST_ON_CPU:
        raise HardwareError(
            f"{needed:,} processes would stand for GPUs, cpu-ranks starts {MOST_ON_CPU} at most. "
            f"{fix}"
        )


@atexit.register
def _dismiss() -> None:
    """No run came for these."""
    for process in _waiting:
        process.kill()
        process.communicate()


def _rank_process() -> subprocess.Popen[str]:
    # A session of its own: Ctrl-C is the leader's to handle.
    command = [sys.executable, "-m", _MODULE]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


class LocalRanks:
    """Every rank of a run but the target's leader, as processes of this host.

    Args:
        setup: The run; its folder exists.

    Attributes:
        of_draft: For waits on the draft.
        of_target: For waits on the target's followers.
        of_all: For waits on all of them, before they serve.
    """

    def __init__(self, setup: RankSetup) -> None:
        assert setup.folder is not None, "ranks of one host meet in a folder"
        self._setup = setup
        self._folder = setup.folder
        (setup.folder / SETUP_FILE).write_bytes(pickle.dumps(setup))
        self._processes = {
            rank: self._start(rank) for rank in range(setup.num_ranks) if rank != setup.leader
        }
        self.of_draft = _of_draft(setup, partial(self._check, draft=True))
        self.of_target = _of_target(setup, partial(self._check, draft=False))
        self.of_all = _of_all(self._check_all)

    def _start(self, rank: int) -> subprocess.Popen[str]:
        process = _waiting.pop(0) if _waiting else _rank_process()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # whoever waits for it says so
            process.stdin.write(f"{rank} {self._folder}\n")
            process.stdin.flush()
        return process

    @property
    def pids(self) -> dict[int, int]:
        """Process numbers by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def wait_until_loaded(self) -> None:
        """Wait until every rank has opened its models.

        Raises:
            HardwareError: If one ends before.
        """
        deadline = monotonic() + START_SECONDS
        for rank, process in self._processes.items():
            while not (self._folder / f"ready-{rank}").exists():
                if process.poll() is not None or monotonic() > deadline:
                    failure = f"{exit_text(process)}; {start_failure(process)}"
                    raise HardwareError(
                        f"rank {rank} did not start{failure}. "
                        "Try fewer workers: codesign plan --trace TRACE --workers 1"
                    )
                sleep(0.02)

    def _check(self, *, draft: bool) -> None:
        for rank, process in self._processes.items():
            if self._setup.drafts(rank) == draft and process.poll() is not None:
                name, lost = ("draft", DraftLostError) if draft else ("target", TargetLostError)
                raise lost(f"{name} rank {rank} ended{exit_text(process)}")

    def _check_all(self) -> None:
        self._check(draft=True)
        self._check(draft=False)

    def let_write(self) -> None:
        """Nothing is served any more; here only the user interrupts what follows."""

    def end_draft(self, *, at_once: bool = False) -> None:
        """End the draft's processes; ``at_once`` if they will not do it themselves."""
        ranks = [rank for rank in self._processes if self._setup.drafts(rank)]
        self._end(ranks, 0.0 if at_once else END_SECONDS)

    def close(self, *, at_once: bool = False) -> None:
        """End all processes; ``at_once`` if one is lost, for which the others may wait."""
        self._end(list(self._processes), 0.0 if at_once else END_SECONDS)

    def _end(self, ranks: list[int], seconds: float) -> None:
        deadline = monotonic() + seconds
        for rank in ranks:
            process = self._processes[rank]
            try:
                process.wait(timeout=max(deadline - monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()  # before, a rank takes it for the end of the run


class TorchrunRanks:
    """Ranks that torchrun started and will end when one of them fails.

    Args:
        setup: The run.
    """

    def __init__(self, setup: RankSetup) -> None:
        self.of_draft, self.of_target, self.of_all = _of_draft(setup), _of_target(setup), _of_all()
        signal.signal(signal.SIGTERM, _end_of_run)

    def wait_until_loaded(self) -> None:
        """Joining waits."""

    def end_draft(self, *, at_once: bool = False) -> None:
        """They end themselves."""

    def let_write(self) -> None:
        """Nothing is served any more: torchrun's signal must not end what follows.

        A connection to a lost rank breaks before torchrun sends it; then it gives 30 s.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def close(self, *, at_once: bool = False) -> None:
        """They end themselves."""
        self.let_write()


def _of_draft(setup: RankSetup, check: Callable[[], None] | None = None) -> Watch:
    return Watch("the draft", DraftLostError, setup.silence, check)


def _of_target(setup: RankSetup, check: Callable[[], None] | None = None) -> Watch:
    return Watch("target ranks", TargetLostError, setup.silence, check)


def _of_all(check: Callable[[], None] | None = None) -> Watch:
    return Watch("the other ranks", TargetLostError, check=check)


def _end_of_run(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TargetLostError("torchrun ended the run, for a rank of it was lost")


@dataclass(frozen=True, slots=True)
class TorchrunProcess:
    """This process among those that torchrun started.

    Attributes:
        number: Global.
        count: Of all.
    """

    number: int
    count: int

    @classmethod
    def this(cls) -> TorchrunProcess | None:
        """This process, if torchrun started it."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def rank(self, setup: RankSetup) -> int | None:
        """Its rank in a run; None if the run has fewer ranks.

        The first process leads the target, and the draft's ranks come last: what a user sees and
        what is written comes from the first, whatever the split.
        """
        if self.number >= setup.num_ranks:
            return None
        return (self.number + setup.leader) % setup.num_ranks


def read_setup(folder: Path) -> RankSetup:
    """What ``LocalRanks`` left for the ranks that it starts."""
    return pickle.loads((folder / SETUP_FILE).read_bytes())
