"""Processes that tests start and do not wait for, ports for those that serve, and short cuts."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache

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


@pytest.fixture(scope="session")
def components_scanned_once() -> Iterator[None]:
    """Streamlit looks for components in all that is installed whenever a test opens an app."""
    from streamlit.components.v2 import manifest_scanner

    with pytest.MonkeyPatch.context() as patch:
        scan = cache(manifest_scanner.scan_component_manifests)
        patch.setattr(manifest_scanner, "scan_component_manifests", scan)
        yield


# The command with as few passes as it may make, and with nothing timed again: a machine that runs
# tests is busy, and a profile would be two or three times as long for it.
BRIEF = """
import sys
from codesign.cli import main
from codesign.profiler import (
    deciding, host_pace, rank_parts, rank_rounds, rank_serving, recorder, session
)
from codesign.profiler.steps import Effort

def fewest(seconds, least, most):
    return Effort(0.1, least, least)

for module, name in (
    (rank_parts, "_QUICK"), (host_pace, "_UNSETTLED"), (host_pace, "_MORE_SERIES"),
    (rank_parts, "TOLERANCE"), (rank_parts, "CHECK"), (rank_rounds, "_TRIES"),
    (rank_rounds, "_BATCHES"), (rank_rounds, "_PLAIN"), (rank_rounds, "_CONTEXT"),
    (rank_rounds, "_SHORT"), (rank_rounds, "_DEEP_TOKENS"), (rank_rounds, "_CHAIN_TOKENS"),
    (recorder, "QUICK_TOKENS"), (deciding, "_ROUNDS"), (rank_serving, "_PACE_ROUNDS"),
):
    assert hasattr(module, name), name
session.Effort, rank_parts._QUICK, rank_parts.CHECK = fewest, fewest(6.0, 1, 7), fewest(0.4, 1, 3)
host_pace._UNSETTLED, host_pace._MORE_SERIES = 2.0, 0
rank_parts.TOLERANCE, rank_rounds._TRIES = 100.0, 1
rank_rounds._BATCHES, rank_rounds._PLAIN, rank_rounds._CONTEXT = (2, 2, 1), (2, 1), 40
rank_rounds._SHORT, rank_rounds._DEEP_TOKENS, rank_rounds._CHAIN_TOKENS = (12, 2), 24, 24
deciding._ROUNDS, rank_serving._PACE_ROUNDS = 4, 8
recorder.QUICK_TOKENS = {1: int(sys.argv.pop(1))}
sys.exit(main())
"""


@pytest.fixture(scope="session")
def brief_tokens() -> int:
    """Recorded after each prompt by ``brief_codesign``."""
    return 24


@pytest.fixture(scope="session")
def brief_codesign(brief_tokens) -> list[str]:
    """Words in front of ``profile ...``: ``codesign`` that measures no more than it must."""
    return [sys.executable, "-c", BRIEF, str(brief_tokens)]


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
