"""Messages of int32 words between processes: through shared memory on one host, else over gloo.

A mailbox has one writer and one or more readers, and holds one message: the writer waits until
every reader has taken the last one. In shared memory a message is there about two microseconds
after it was sent; both ends spin for a while before they sleep.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from time import perf_counter, sleep
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from codesign.engine.gpu.watch import Watch

Words = NDArray[np.int32]

NAP = 50e-6
WATCH_EVERY = 0.05
DAY = 86400.0  # between two messages a trace may be silent
_SENT, _LENGTH, _TAKEN = 0, 1, 2  # int64 words before the message; one "taken" per reader


class Mailbox(Protocol):
    """One end of a one-way channel."""

    def send(self, words: Words) -> None:
        """Hand over a message, after the last one was taken."""
        ...

    def receive(self) -> Words:
        """Wait for the next message."""
        ...

    def has_message(self) -> bool:
        """Whether a message is there; never, where one would have to wait for it to know."""
        ...

    def flush(self) -> None:
        """Wait until the last message is on its way: this end may go then."""
        ...


def shared_memory_is_ordered() -> bool:
    """Whether this processor shows another one's writes in their order, which mailboxes need."""
    return platform.machine().lower() in ("x86_64", "amd64")


class SharedMailbox:
    """A mailbox in a file of shared memory.

    Args:
        path: The file; the first side to open it creates it.
        max_words: Longest message.
        num_readers: Readers, each with a number of its own.
        reader: Number of this end's reader; None for the writer.
        spin: Seconds to spin before naps; short where processes outnumber processors.
        watch: Of the other ends.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_words: int,
        num_readers: int = 1,
        reader: int | None = None,
        spin: float = 0.05,
        watch: Watch | None = None,
    ) -> None:
        head = 8 * (_TAKEN + num_readers)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, head + 4 * max_words)
            self._memory = mmap.mmap(descriptor, head + 4 * max_words)
        finally:
            os.close(descriptor)
        # Words of a view are read and written whole, as NumPy's are, in a third of their time.
        self._counts = memoryview(self._memory)[:head].cast("q")
        self._words = np.frombuffer(self._memory, np.int32, max_words, offset=head)
        self._taken = _TAKEN if reader is None else _TAKEN + reader
        self._spin = spin
        self._watch = watch

    def send(self, words: Words) -> None:
        """See ``Mailbox.send``."""
        counts = self._counts
        sent = counts[_SENT]
        for reader in range(_TAKEN, len(counts)):
            self._wait(lambda reader=reader: counts[reader] == sent)
        self._words[: len(words)] = words
        counts[_LENGTH] = len(words)
        counts[_SENT] = sent + 1  # last: it is what readers poll

    def receive(self) -> Words:
        """See ``Mailbox.receive``."""
        counts, at = self._counts, self._taken
        taken = counts[at]
        self._wait(lambda: counts[_SENT] != taken)
        words = self._words[: counts[_LENGTH]].copy()
        counts[at] = taken + 1
        return words

    def has_message(self) -> bool:
        """See ``Mailbox.has_message``."""
        return self._counts[_SENT] != self._counts[self._taken]

    def flush(self) -> None:
        """The memory stays."""

    def _wait(self, is_there: Callable[[], bool]) -> None:
        start = look_at = perf_counter()
        while not is_there():
            now = perf_counter()
            if now - start > self._spin:
                sleep(NAP)
            if self._watch is not None and now > look_at:
                self._watch.look(now - start)
                look_at = now + WATCH_EVERY


class GlooMailbox:
    """A mailbox between hosts: point-to-point messages of torch.distributed over gloo.

    Args:
        writer: Global rank of the writer.
        readers: Global ranks of the readers.
        watch: Of the other ends.
    """

    def __init__(self, *, writer: int, readers: Sequence[int], watch: Watch | None = None) -> None:
        self._writer = writer
        self._readers = tuple(readers)
        self._watch = watch
        self._outgoing: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, words: Words) -> None:
        """See ``Mailbox.send``."""
        self.flush()
        for part in (torch.tensor([len(words)], dtype=torch.int32), torch.tensor(words)):
            for reader in self._readers:
                self._outgoing.append((self._start(dist.isend, part, reader), part))

    def receive(self) -> Words:
        """See ``Mailbox.receive``."""
        return self._receive(int(self._receive(1)[0]))

    def has_message(self) -> bool:
        """See ``Mailbox.has_message``."""
        return False

    def flush(self) -> None:
        """See ``Mailbox.flush``."""
        for work, _ in self._outgoing:
            self._finish(work)
        self._outgoing = []

    def _receive(self, count: int) -> Words:
        part = torch.zeros(count, dtype=torch.int32)
        self._finish(self._start(dist.irecv, part, self._writer))
        return part.numpy()

    def _start(
        self, call: Callable[..., dist.Work | None], part: torch.Tensor, peer: int
    ) -> dist.Work:
        try:
            work = call(part, peer)
        except RuntimeError as error:  # the connection is closed already
            if self._watch is None:
                raise
            self._watch.broken(error)
        assert work is not None
        return work

    def _finish(self, work: dist.Work) -> None:
        # A peer that died closes its connection, which ends the wait with an error.
        limit = self._watch.limit if self._watch is not None else None
        try:
            work.wait(timedelta(seconds=limit or DAY))
        except RuntimeError as error:
            if self._watch is None:
                raise
            self._watch.broken(error)
