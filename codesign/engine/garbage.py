"""Python's garbage collector beside forwards, not between them.

Left to itself it starts wherever a round makes an object too many: most often for 0.2 ms, now and
then for 1 to 10, and for 120 when it looks at all that torch has loaded. While requests are served
it is off; the loops call ``collect`` where a GPU is busy anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 2000  # objects since the last look, of which most are gone by then
OFTEN = 10  # looks at the young ones before one at those that were young
SELDOM = 200  # looks at those before one at all: of some millions that have stayed
IDLE = 0.5  # seconds without a request that are enough for it


@contextmanager
def collected_beside() -> Iterator[None]:
    """Leave the collector to ``collect``; what is there already is not looked at meanwhile."""
    if not gc.isenabled() or gc.get_freeze_count():  # somebody else's
        yield
        return
    try:
        gc.freeze()
        gc.disable()
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect() -> None:
    """Look at young objects, if there are many; at older ones if that was often enough."""
    young, looks, older = gc.get_count()
    if young > YOUNG and not gc.isenabled():
        gc.collect(0 if looks <= OFTEN else 1 if older <= SELDOM else 2)


def collect_idle(seconds: float) -> None:
    """With nothing to do for so long, look at all that was made since serving began."""
    if seconds > IDLE and gc.get_count()[2] > OFTEN and not gc.isenabled():
        gc.collect()
