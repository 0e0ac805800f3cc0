"""Answers of graphs as they come to lie on the host, and waiting for them.

A kernel at the end of a step writes its answer into memory of the host, each word with a flag that
the host polls. On a CPU an answer is there when its step has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from codesign.engine.gpu.quick_core import QuickCore
from codesign.engine.gpu.step_rows import Words
from codesign.engine.gpu.tensor_group import TensorGroup
from codesign.engine.gpu.watch import Watch
from codesign.kernels.host_answer import post_words

PATIENCE = 0.05  # seconds between two checks of the GPU and of the other ranks


@dataclass(frozen=True, slots=True)
class Due:
    """An answer whose words are there once their flags are 1; no flags: they are."""

    words: Words
    flags: Words | None = None

    def is_there(self) -> bool:
        """Whether the answer can be read."""
        flags = self.flags
        # Most often all come at once, and ``all`` takes twice as long.
        return flags is None or bool(flags[-1] and np.count_nonzero(flags) == len(flags))


class Outbox:
    """Where the answers of one graph lie on the host.

    Args:
        words: Of an answer.
        device: That the graph runs on.
        slots: Answers that may be under way at once.
    """

    def __init__(self, words: int, device: torch.device, slots: int = 1) -> None:
        self._slots_SW2 = torch.zeros(
            slots, words, 2, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        on_host = self._slots_SW2.numpy()  # the same memory
        self._due = tuple(Due(slot[:, 0], slot[:, 1]) for slot in on_host)

    def post(
        self, answer: Tensor, turn_1: Tensor | None = None, kept: Tensor | None = None
    ) -> None:
        """Within a graph: send its answer.

        Args:
            answer: Words on the device.
            turn_1: Slot on the device, counted up here; None for the first.
            kept: Where it stays on the device, too.
        """
        post_words(answer, self._slots_SW2, turn_1, kept)

    def expect(self, slot: int = 0) -> Due:
        """The answer of a graph that is about to run; the last one in this slot was taken."""
        due = self._due[slot]
        assert due.flags is not None, "slots have flags"
        due.flags[:] = 0
        return due


def wait(
    due: Due,
    group: TensorGroup,
    device: torch.device,
    watch: Watch | None,
    core: QuickCore | None = None,
    is_called: Callable[[], bool] | None = None,
) -> bool:
    """Poll for an answer, so that a rank that died ends the wait on a collective with it.

    Meanwhile there is time to see whether the core is slow, and whether others have it, too.

    Args:
        due: The answer.
        group: Of the rank.
        device: Of the rank.
        watch: Of the other ranks.
        core: Of this process, if it may leave its own.
        is_called: Whether there is something else to do, which ends the wait.

    Returns:
        Whether the answer is there.

    Raises:
        RuntimeError: The GPU failed, or ended its work without the answer.
    """
    start = before = perf_counter()
    look_at = start + PATIENCE
    while not due.is_there():
        if is_called is not None and is_called():
            return False
        now = perf_counter()
        if core is not None:
            core.was_away(now, now - before)
            core.look(now)
        before = now
        if now < look_at:
            continue
        is_idle = device.type != "cuda" or torch.cuda.current_stream(device).query()
        if is_idle and not due.is_there():
            raise RuntimeError("a step ended without its answer")
        if watch is not None:
            watch.look(now - start)
        look_at, before = now + PATIENCE, perf_counter()
    if core is not None:
        now = perf_counter()
        core.was_away(now, now - before)
    group.check()
    return True
