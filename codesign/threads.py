"""How the CPU threads of a step wait for one another. Must be known before torch is imported.

A step of a small model has hundreds of parts that run on all threads, tens of microseconds apart. A
thread that sleeps in between must be woken for each part, which costs more than a second thread
saves; one that spins for long, as OpenMP's do by default, holds a core that another process, or its
own team, could use. So ours spin for a fraction of a millisecond and then sleep.
"""

from __future__ import annotations

from collections.abc import Mapping

_SETTINGS = {
    "GOMP_SPINCOUNT": "10000",  # GNU OpenMP, on Linux: looks at memory, 20 to 50 ns each
    "KMP_BLOCKTIME": "1",  # LLVM's and Intel's, on macOS: milliseconds, their smallest
}


def short_waits(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make OpenMP's threads spin for a short time; none if the user has a say.

    Args:
        environ: Variables of this process.
    """
    if "OMP_WAIT_POLICY" in environ:
        return {}
    return {name: value for name, value in _SETTINGS.items() if name not in environ}
