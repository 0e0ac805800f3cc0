"""Start the other ranks of a run on this host, notice when one is gone, and end them.

Under torchrun the ranks are there already: ``TorchrunRanks`` is the same handle without processes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.partner import DraftLostError, TargetLostError
from codesign.errors import HardwareError

SETUP_FILE = "setup.pickle"
START_SECONDS = 600.0
END_SECONDS = 5.0


class LocalRanks:
    """Every rank of a run but the target's leader, as processes of this host.

    Args:
        setup: The run; its folder exists.
    """

    def __init__(self, setup: RankSetup) -> None:
        assert setup.folder is not None, "ranks of one host meet in a folder"
        self._setup = setup
        self._folder = setup.folder
        (setup.folder / SETUP_FILE).write_bytes(pickle.dumps(setup))
        self._processes = {
            rank: self._start(rank) for rank in range(setup.num_ranks) if rank != setup.leader
        }

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        module = "codesign.engine.gpu.rank_process"
        command = [sys.executable, "-m", module, str(self._folder), str(rank)]
        # A session of its own: Ctrl-C is the leader's to handle.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

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
                    raise HardwareError(
                        f"rank {rank} did not start{_exit_code(process)}; the reason stands above. "
                        "Try fewer workers: codesign plan --workers 1"
                    )
                sleep(0.02)

    def check_draft(self) -> None:
        """Raise DraftLostError when a draft rank is gone."""
        for rank, process in self._processes.items():
            if self._setup.drafts(rank) and process.poll() is not None:
                raise DraftLostError(f"draft rank {rank} ended{_exit_code(process)}")

    def check_target(self) -> None:
        """Raise TargetLostError when a target rank is gone."""
        for rank, process in self._processes.items():
            if not self._setup.drafts(rank) and process.poll() is not None:
                raise TargetLostError(f"target rank {rank} ended{_exit_code(process)}")

    def end_draft(self) -> None:
        """End the draft's processes, asked or not."""
        self._end([rank for rank in self._processes if self._setup.drafts(rank)])

    def close(self) -> None:
        """End all processes, asked or not."""
        self._end(list(self._processes))

    def _end(self, ranks: list[int]) -> None:
        deadline = monotonic() + END_SECONDS
        for rank in ranks:
            process = self._processes[rank]
            try:
                process.wait(timeout=max(deadline - monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class TorchrunRanks:
    """Ranks that torchrun started and will end when one of them fails."""

    def wait_until_loaded(self) -> None:
        """Joining waits."""

    def check_draft(self) -> None:
        """torchrun watches."""

    def check_target(self) -> None:
        """torchrun watches."""

    def end_draft(self) -> None:
        """They end themselves."""

    def close(self) -> None:
        """They end themselves."""


def torchrun_rank() -> int | None:
    """This process's global rank if torchrun started it, else None."""
    rank = os.environ.get("RANK")
    return int(rank) if rank is not None and "TORCHELASTIC_RUN_ID" in os.environ else None


def read_setup(folder: Path) -> RankSetup:
    """What ``LocalRanks`` left for the ranks that it starts."""
    return pickle.loads((folder / SETUP_FILE).read_bytes())


def _exit_code(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    return "" if code is None else f", exit code {code}"
