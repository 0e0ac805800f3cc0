"""A rank that a run started: python -m codesign.engine.gpu.rank_process FOLDER RANK."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from codesign.engine.gpu.launch import read_setup
from codesign.engine.gpu.ranks import serve_rank


def _watch_parent(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)  # the run is gone; a collective may still hang


if __name__ == "__main__":
    _parent = os.getppid()
    serve_rank(read_setup(Path(sys.argv[1])), int(sys.argv[2]), lambda: _watch_parent(_parent))
