"""Leave a core that is slow at the moment, as one is on a host that is shared with others.

A virtual machine's core runs at half its pace while something else has the other half of the
physical one: for a tenth of a second to many seconds, each core by itself. Every rank keeps its
core busy, so that the system leaves it there. Its host's work between two steps is then twice as
long, and all ranks wait for the slowest. On one host of sixteen cores a process that stayed was
slow for 35 to 45 % of the time, one that left as this does for 9 %.

The pace is that of an empty loop, timed while the rank waits for its GPU anyway.
"""

from __future__ import annotations

import os
from random import Random
from time import perf_counter

EVERY = 1e-3  # seconds between two looks
SETTLE = 4e-3  # before the first look at a core that had nothing to do
SLOW = 1.3  # times the least that a look has taken
PATIENCE = 5  # slow looks in a row, after which it leaves
MOST_PATIENCE = 320  # where leaving has not helped
_LOOP = range(200)  # 1.5 us


class QuickCore:
    """Keeps this process, which must be the only busy one on its core, off slow ones.

    Args:
        num_busy: Processes of this run that keep a core busy on this host; with fewer than two
            cores for each it stays where it is.
    """

    def __init__(self, num_busy: int) -> None:
        self._cores = usable_cores()
        self._moves = len(self._cores) > 2 * num_busy
        self._random = Random(os.getpid())
        self._least = 1.0
        self._next = 0.0
        self._num_slow, self._patience = 0, PATIENCE

    def look(self) -> None:
        """Time this core, and leave it if it has been slow for a while; takes 5 us or less."""
        now = perf_counter()
        if not self._moves or now < self._next:
            return
        self._next = now + EVERY
        pace = self._pace()
        self._least = min(self._least, pace)
        if pace <= SLOW * self._least:
            self._num_slow, self._patience = 0, PATIENCE
            return
        self._num_slow += 1
        if self._num_slow >= self._patience:
            self._leave()
            self._next = now + SETTLE
            self._num_slow, self._patience = 0, min(2 * self._patience, MOST_PATIENCE)

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
        """Go to another core; the system may move it on, as it may before."""
        os.sched_setaffinity(0, {self._random.choice(self._cores)})
        os.sched_setaffinity(0, self._cores)


def usable_cores() -> list[int]:
    """Cores that this process may run on; none where the system does not say (not Linux)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
