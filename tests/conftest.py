"""Shared by all tests: threads, hypothesis profiles, and the command line as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

import codesign

# Before anything imports torch or NumPy's BLAS; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared machines stall: a deadline would fail a test for what its neighbour does.
settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run ``python -m codesign ARGUMENTS`` in an empty folder, with the copy that tests import."""
    home = str(Path(codesign.__file__).parents[1])

    def run(*arguments: str | Path, timeout: float = 120.0, **environment: str):
        return subprocess.run(
            [sys.executable, "-m", "codesign", *map(str, arguments)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": home, **environment},
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """The real default target, from the user's cache; fetched once if a network allows."""
    from codesign.errors import HardwareError
    from codesign.model_fetch import fetch_model

    try:
        return fetch_model("smollm2-135m").path
    except HardwareError as err:
        pytest.skip(f"the default target cannot be fetched: {err}")
