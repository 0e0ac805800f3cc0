"""Python's garbage collector beside forwards, not between them.

Left to itself it starts wherever a round makes an object too many: of a batch 0.1 ms every few
rounds, 2 to 10 ms now and then, and 50 to 125 ms when it looks at all that torch has loaded. While
requests are served it is off; the loops call ``collect`` where a GPU is busy anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 2000  # objects since the last look, of which most are gone by then
OFTEN = 10  # looks at the young ones before one at those that were young
IDLE = 0.05  # seconds without a request that are enough for a look at all


@contextmanager
def collected_beside() -> Iterator[None]:
    """Leave the collector to ``collect``; what is there already is not looked at meanwhile."""
    if not gc.isenabled():  # somebody else's
        yield
        return
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect() -> None:
    """Look at young objects, if there are many; at older ones if that was often enough."""
    young, looks, _ = gc.get_count()
    if young > YOUNG and not gc.isenabled():
        gc.collect(1 if looks > OFTEN else 0)


def collect_idle(seconds: float) -> None:
    """With nothing to do for so long, look at all that was made since serving began."""
    if seconds > IDLE and gc.get_count()[2] > OFTEN and not gc.isenabled():
        gc.collect()
