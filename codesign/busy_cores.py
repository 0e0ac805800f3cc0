"""What others do on the cores of this process while something is measured; Linux only."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

_STAT = Path("/proc/stat")
_FEW = 0.15  # of a core: what a desktop does anyway


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Seconds so far, of the cores that this process may use.

    Attributes:
        busy: All that ran there, other guests of the machine included.
        own: What this process and the children that it has waited for used.
        wall: Of the clock.
    """

    busy: float
    own: float
    wall: float

    def note(self, later: CoreTimes) -> str:
        """A warning if others used the cores between two readings; empty if they did not."""
        seconds = later.wall - self.wall
        others = (later.busy - self.busy - (later.own - self.own)) / max(seconds, 1e-9)
        if others < _FEW:
            return ""
        return (
            f"other processes used {others:.1f} of this machine's cores during the run: times are "
            "too long"
        )


def core_times() -> CoreTimes | None:
    """A reading; None where the system does not tell."""
    if not _STAT.exists():
        return None
    spent = os.times()
    own = spent.user + spent.system + spent.children_user + spent.children_system
    ticks = busy_ticks(_STAT.read_text(encoding="ascii"), os.sched_getaffinity(0))
    return CoreTimes(ticks / os.sysconf("SC_CLK_TCK"), own, perf_counter())


def busy_ticks(stat: str, cores: Collection[int]) -> int:
    """Ticks that these cores were not idle, by the text of /proc/stat.

    Source: proc_stat(5): user nice system idle iowait irq softirq steal; guests are in user.
    """
    total = 0
    for line in stat.splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _, _, *interrupts = map(int, counts[:8])
            total += user + nice + system + sum(interrupts)
    return total
