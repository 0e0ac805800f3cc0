"""Processes that tests start and do not wait for, and ports for those that serve."""

from __future__ import annotations

import random
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_process() -> Iterator[Start]:
    """``start_process(command, ...)`` as ``subprocess.Popen``, with pipes; ended with its test.

    What a failed test leaves behind would warn in some later test, and keep its cores busy.
    """
    started: list[subprocess.Popen[str]] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start(command: list[str], **options) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, **{**pipes, **options}))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            process.communicate(timeout=60)  # comes to an end when all have gone that it started


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on, below those that a system gives to whoever asks for any.

    Of those, another program may get it before the test's own program binds it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
            return port
