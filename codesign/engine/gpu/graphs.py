"""Steps of a rank as CUDA graphs, and where their messages lie.

On a CPU there are no graphs: calls run one by one. Answers: outbox.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from codesign.engine.gpu.outbox import Outbox
from codesign.engine.gpu.step_rows import Words
from codesign.engine.gpu.tensor_group import TensorGroup
from codesign.kernels.row_attention import Scratch


@dataclass(slots=True)
class Step:
    """A bucket's step: expect an answer, then run it."""

    run: Callable[[], None]
    outbox: Outbox
    scratch: Scratch | None


class Graphs:
    """Graphs of one model on a rank.

    They run one after the other and keep nothing, so they share memory: that of one pool and
    stream.

    Args:
        group: The ranks that hold the model.
        device: Of this rank.
    """

    def __init__(self, group: TensorGroup, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._device = device
        self._group = group
        self._pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self._stream = torch.cuda.Stream(device) if self.on_gpu else None

    def host_words(self, count: int) -> Tensor:
        """Words on the host that a GPU copies to and from."""
        return torch.zeros(count, dtype=torch.int32, pin_memory=self.on_gpu)

    def inbox(self, words: int) -> Inbox:
        """Where messages of so many words lie."""
        on_device = torch.zeros(words, dtype=torch.int32, device=self._device)
        return Inbox(self, self.host_words(words), on_device)

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """On a GPU a graph of what runs, captured while it writes to scratch alone."""
        stream = self._stream
        if stream is None:
            return torch.inference_mode()(run)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), self._group.patient():
            run()  # compiles and loads kernels, sets up collectives
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"
        with uncollected(), torch.cuda.graph(graph, self._pool, stream, capture_error_mode=mode):
            run()
        return graph.replay


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no reference cycles meanwhile: the end of a graph in one would spoil a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Inbox:
    """Where a message lies: on the host, and from the beginning of its step on the device.

    Args:
        graphs: Of the steps.
        staging: Words on the host.
        on_device: As many on the device.

    Attributes:
        on_device: At an address that graphs hold.
    """

    def __init__(self, graphs: Graphs, staging: Tensor, on_device: Tensor) -> None:
        self._graphs = graphs
        self._staging = staging
        self._words = staging.numpy()  # the same memory
        self.on_device = on_device

    def put(self, message: Words, length: int = 0) -> None:
        """Take a message, with zeros behind it up to ``length`` words; the last one was fetched."""
        self._words[: len(message)] = message
        self._words[len(message) : length] = 0

    def fetch(self, words: int) -> None:
        """Copy so many words to the device, within a step."""
        self.on_device[:words].copy_(self._staging[:words], non_blocking=True)

    def captured(self, run: Callable[[], None], idle: Words) -> Callable[[], None]:
        """A graph of what runs, captured with a message that writes to scratch alone."""
        if self._graphs.on_gpu:
            self._staging.zero_()
            self.put(idle)
        return self._graphs.captured(run)
