"""How threads wait is settled before torch is loaded, whichever module is asked for first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from codesign.threads import calm_waits

# Stands for torch, and tells what torch's OpenMP would have read.
SPY = """
import importlib, os, sys

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
            raise SystemExit

sys.meta_path.insert(0, Spy())
importlib.import_module(sys.argv[1])
"""


def seen_by_torch(module: str, **variables: str) -> str:
    """Spin count and wait policy at the moment when torch is imported."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SPY, module],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["codesign.engine.llm", "codesign.engine.draft_process", "codesign.profiler.session"]
)
def test_threads_sleep_whatever_loads_torch(module: str) -> None:
    assert seen_by_torch(module) == "None PASSIVE"


def test_the_users_own_wait_policy_stays() -> None:
    assert seen_by_torch("codesign.engine", OMP_WAIT_POLICY="ACTIVE") == "None ACTIVE"


def test_the_users_own_spin_count_stays() -> None:
    assert not calm_waits({"GOMP_SPINCOUNT": "7"})
