"""While requests are served, collections start where a loop asks for them, and nowhere else."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import pytest

from codesign.engine import garbage


def callers(frame: FrameType | None) -> list[str]:
    """Names of the functions that are under way, the innermost first."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.mark.parametrize("policy", ["plain", "tree-4x2x3", "chain-3"])
def test_collections_of_a_run_are_asked_for(serve, make_requests, policy, monkeypatch):
    monkeypatch.setattr(garbage, "YOUNG", 50)
    starters: list[list[str]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and "_serve" in callers(sys._getframe(1)):
            starters.append(callers(sys._getframe(1))[:2])

    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(20)  # so that a run of this size would be interrupted
    try:
        run = serve(policy, make_requests(4, max_new_tokens=60), max_batch=2)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    assert all(len(output) == 60 for output in run.outputs.values())
    assert starters, "nothing was collected"
    places = [["collect", "_catch_up"], ["collect", "_beside_forward"]]
    assert all(starter in places for starter in starters)
    assert gc.isenabled()
