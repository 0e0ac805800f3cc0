"""Stages of a benchmark, each a process with a time limit: one that hangs stops no other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any


def say_row(**row: Any) -> None:
    """Print one row of the results, in a stage."""
    print("ROW " + json.dumps(row), flush=True)


def run_stage(
    stage: str, command: Sequence[str], log: Path, limit: float
) -> tuple[list[dict[str, Any]], str]:
    """Run a stage; its rows, and what it wrote to standard error.

    Args:
        stage: Its name, for the rows.
        command: Python's arguments; it prints rows as ``say_row`` does.
        log: File of its standard error.
        limit: Seconds; then its processes dump their stacks to the log (SIGUSR1) and are killed.
    """
    command = [sys.executable, "-X", "faulthandler", *command]
    start = monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        late = ""
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            late = f"not done after {limit:g} s"
            family = descendants(process.pid)
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            sleep(1.0)
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            printed, _ = process.communicate()
    said = log.read_text()
    rows = [json.loads(line[4:]) for line in printed.splitlines() if line.startswith("ROW ")]
    code = process.returncode
    rows = [{"stage": stage, **row} for row in rows]
    seconds = round(monotonic() - start, 1)
    rows.append({"stage": stage, "exit_code": code, "stage_seconds": seconds, "late": late})
    for row in rows:
        print(json.dumps(row), flush=True)
    if code:
        print(said[-3000:], flush=True)
    return rows, said


def descendants(pid: int) -> list[int]:
    """A process and those that it started, children first."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += descendants(int(child))
    return [*found, pid]
