"""A rank that a run started: python -m codesign.engine.gpu.rank_process.

It loads what takes long before it reads its task, RANK FOLDER, from its standard input: a process
may wait for a run to come. The input stays open as long as the run does.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
from pathlib import Path
from threading import Thread

from codesign.engine.gpu.launch import read_setup
from codesign.engine.gpu.ranks import serve_rank
from codesign.engine.gpu.watch import is_broken_collective
from codesign.engine.partner import DraftLostError, TargetLostError
from codesign.errors import CodesignError


def _end_with_run(folder: Path) -> None:
    """End when the leader is gone, whatever this rank waits for; nobody else removes its folder."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Serve; when others are lost, end without a word: the run's leader says what happened."""
    faulthandler.register(signal.SIGUSR1)  # shows where a rank waits
    rank, _, folder = sys.stdin.readline().rstrip("\n").partition(" ")
    if not rank:
        return  # no run came
    Thread(target=_end_with_run, args=(Path(folder),), daemon=True).start()
    try:
        serve_rank(read_setup(Path(folder)), int(rank))
    except (DraftLostError, TargetLostError):
        os._exit(1)
    except (RuntimeError, OSError, CodesignError) as error:
        is_over = not Path(folder).exists()  # another rank has seen it first, and tidied up
        if not (is_over or is_broken_collective(error)):
            if not isinstance(error, CodesignError):
                raise
            sys.stderr.write(f"rank {rank}: {error}\n")
        os._exit(1)


if __name__ == "__main__":
    main()
