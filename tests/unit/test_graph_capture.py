"""What surrounds the capture of a graph; on a GPU: tests/gpu/test_prompt_graphs.py."""

from __future__ import annotations

import gc

import pytest

from codesign.engine.gpu.graphs import uncollected


def spoiled() -> None:
    with uncollected():
        assert not gc.isenabled()
        raise RuntimeError("spoiled")


@pytest.mark.parametrize("enabled", [True, False])
def test_cycles_wait_for_the_end_of_a_capture_even_of_one_that_fails(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError, match="spoiled"):
            spoiled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
