"""Leave a core that is slow, or taken by others, as happens on a host that is shared.

A virtual machine's core runs at half its pace while something else has the other half of the
physical one: for 2 ms in the middle and up to seconds, each core by itself. Every rank keeps its
core busy, so that the system leaves it there. Its host's work between two steps is then twice as
long, and all ranks wait for the slowest. What leaving gains depends on the host (docs/engine.md).

The pace is that of an empty loop, timed while the rank waits for its GPU anyway. On a host of
several sockets a rank stays beside its GPU.

A core may also be taken for 3 to 4 ms, and then often is again 8 ms later, for 25 to 50 ms: so were
two thirds of the rounds of an 8B that lost as much. A rank leaves when it has been away once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from random import Random
from time import perf_counter

import torch

from codesign.artifacts.machine import usable_cores

EVERY = 0.5e-3  # seconds between two looks
LOST = 1e-3  # seconds between two polls, after which somebody else has had the core
SLOW = 1.3  # times the least that a look has taken
RISE = 0.01  # share by which that grows in a second: clocks may fall for good
PATIENCE = 8  # slow looks in a row, after which it leaves
NEW_PATIENCE = 3  # the same on a core that has not been quick yet
HOPS = 20  # cores in a row that were slow, after which it rests on one
REST = 0.1  # seconds
_LOOP = range(200)  # 1.5 us
_DEVICES = Path("/sys/bus/pci/devices")


class QuickCore:
    """Keeps a rank off slow cores; ranks of a run go to different ones.

    Replicas do not know of each other, and may meet. A process that was bound to few cores, or is
    one of many ranks on several hosts, has too few to move.

    Args:
        rank: Of this process.
        num_ranks: Of the run; with fewer than three cores for each they stay where they are.
        near: Cores beside its GPU, which it keeps to if it may use any of them.
    """

    def __init__(self, rank: int, num_ranks: int, near: Collection[int] = ()) -> None:
        usable = usable_cores()
        cores = [core for core in usable if core in near] or usable
        self._own = cores[rank::num_ranks]
        self._moves = len(cores) >= 3 * num_ranks
        self._random = Random(os.getpid())
        self._least = 1.0
        self._next = self._looked = self._rested = 0.0
        self._num_slow, self._hops = 0, 0

    def was_away(self, now: float, seconds: float) -> None:
        """Leave this core if somebody else has had it.

        Args:
            now: Seconds of ``perf_counter``.
            seconds: Since this process last ran, as it had nothing else to do.
        """
        if seconds > LOST and self._moves and now >= self._rested:
            self._hop(now)

    def look(self, now: float) -> None:
        """If it is time for that, time this core, and leave it where it has been slow for a while.

        Args:
            now: Seconds of ``perf_counter``.
        """
        if now < self._next or not self._moves:
            return
        self._next = now + EVERY
        pace = self._pace()
        self._least = min(self._least * (1.0 + RISE * (now - self._looked)), pace)
        self._looked = now
        if pace <= SLOW * self._least:
            self._num_slow = self._hops = 0
            return
        self._num_slow += 1
        if self._num_slow >= (NEW_PATIENCE if self._hops else PATIENCE):
            self._hop(now)

    def _hop(self, now: float) -> None:
        self._num_slow, self._hops = 0, self._hops + 1
        self._leave()
        if self._hops > HOPS:
            self._next = self._rested = now + REST
            self._hops = 0

    def _pace(self) -> float:
        """Seconds of a loop, the quicker of two: whatever interrupts one is not the core's pace."""
        found = []
        for _ in range(2):
            start = perf_counter()
            for _ in _LOOP:
                pass
            found.append(perf_counter() - start)
        return min(found)

    def _leave(self) -> None:
        """Go to another core; from there the system may move it on, as ever."""
        usable = usable_cores()  # somebody may have given this process others
        own = [core for core in self._own if core in usable]
        try:
            os.sched_setaffinity(0, {self._random.choice(own)})
            os.sched_setaffinity(0, usable)
        except (IndexError, OSError):  # none is left, or it is forbidden
            self._moves = False


def core_beside(device: torch.device, rank: int, num_ranks: int) -> QuickCore | None:
    """A rank's, beside its GPU; None of a rank on a CPU."""
    if device.type != "cuda":
        return None
    return QuickCore(rank, num_ranks, cores_beside(pci_address(device)))


def pci_address(device: torch.device) -> str:
    """Of a GPU, as the system names its folder; "" if this torch does not say."""
    found = torch.cuda.get_device_properties(device)
    numbers = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        return ""
    domain, bus, place = numbers
    return f"{domain:04x}:{bus:02x}:{place:02x}.0"


def cores_beside(address: str) -> list[int]:
    """Cores of the socket that a PCI device is attached to; none where the system does not say."""
    try:
        text = (_DEVICES / address / "local_cpulist").read_text(encoding="ascii")
        spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except (OSError, ValueError):
        return []
    return [core for span in spans for core in range(span[0], span[-1] + 1)]
