"""A rank that a run started: python -m codesign.engine.gpu.rank_process.

It loads what takes long before it reads its task, RANK FOLDER, from its standard input: a process
may wait for a run to come.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

from codesign.engine.gpu.launch import read_setup
from codesign.engine.gpu.ranks import serve_rank
from codesign.engine.gpu.watch import is_broken_collective
from codesign.engine.partner import DraftLostError, TargetLostError
from codesign.errors import CodesignError


def _check_parent(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)  # the run is gone; a collective may still hang


def main() -> None:
    """Serve; when others are lost, end without a word: the run's leader says what happened."""
    parent = os.getppid()
    faulthandler.register(signal.SIGUSR1)  # shows where a rank waits
    rank, _, folder = sys.stdin.readline().rstrip("\n").partition(" ")
    if not rank:
        return  # no run came
    try:
        serve_rank(read_setup(Path(folder)), int(rank), lambda: _check_parent(parent))
    except (DraftLostError, TargetLostError):
        os._exit(1)
    except (RuntimeError, CodesignError) as error:
        if not is_broken_collective(error):
            if not isinstance(error, CodesignError):
                raise
            sys.stderr.write(f"rank {rank}: {error}\n")
        os._exit(1)


if __name__ == "__main__":
    main()
