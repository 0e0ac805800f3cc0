"""No collection starts within a served round."""

from __future__ import annotations

import gc
import sys

import pytest

from codesign.engine import garbage


@pytest.mark.parametrize("policy", ["plain", "tree-4x2x3", "chain-3"])
def test_collections_of_a_run_are_asked_for(serve, make_requests, policy, monkeypatch):
    monkeypatch.setattr(garbage, "YOUNG", 50)
    starters: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            starters.append(sys._getframe(1).f_code.co_name)

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
    assert set(starters) == {"collect"}
    assert gc.isenabled()
