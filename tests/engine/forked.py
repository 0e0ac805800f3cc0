"""Processes of the engine from a fork server that has loaded what each would spend seconds on.

They have what the engine uses of ``subprocess.Popen``; other options are refused. Their parent is
the fork server, so that a rank does not see its run end. In tests/e2e the same modules are started
as users start them: by an interpreter of their own, and end when the run does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from multiprocessing import reduction
from typing import Literal

LOADED = ("codesign.engine.gpu.ranks", "codesign.engine.remote_draft")
MODULES = ("codesign.engine.gpu.rank_process", "codesign.engine.draft_process")


class Passed:
    """A file descriptor, which is a number of its own in the new process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self):
        return taken, (reduction.DupFd(self._number),)


def taken(passed) -> int:
    return passed.detach()


def become(module: str, words: list[str | int], standard: list[int]) -> None:
    """Run a module as ``python -m`` does."""
    os.setsid()
    for number, source in enumerate(standard):
        os.dup2(source, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = [module, *map(str, words)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Forked:
    """A process that runs ``command[2]``, a module.

    Args:
        command: Of ``subprocess.Popen``, as the engine writes it.
        stdin: PIPE, or nothing is there to read.
        text: Of pipes; they are nothing else here.
        start_new_session: As ``become`` does in any case.
        pass_fds: Their numbers are words of the command.
    """

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        start_new_session: Literal[True],
        text: bool = False,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        assert start_new_session
        assert text or stdin != subprocess.PIPE
        module, *words = command[2:]
        numbers = {str(fd): Passed(fd) for fd in pass_fds}
        reader, writer = os.pipe()
        self.stdin = open(writer, "w")  # noqa: SIM115, PTH123
        if stdin != subprocess.PIPE:
            self.stdin.close()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=become,
            args=(module, [numbers.get(w, w) for w in words], [*map(Passed, (reader, 1, 2))]),
            daemon=True,
        )
        self._process.start()
        os.close(reader)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        self.stdin.close()
        self.wait()


def popen(command, *arguments, **options):
    """What stands for ``subprocess.Popen``: others than these are started as ever."""
    if isinstance(command, list) and command[1:2] == ["-m"] and command[2] in MODULES:
        return Forked(command, *arguments, **options)
    return REAL(command, *arguments, **options)


REAL = subprocess.Popen
