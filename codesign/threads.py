"""How the CPU threads of a step wait for one another. Must be known before torch is imported.

They sleep. OpenMP's own way is to spin first, which is up to twice as fast on an idle machine and
two to five times as slow beside another process, or another rank, that wants the core: what a
profile says would not come true.
"""

from __future__ import annotations

from collections.abc import Mapping

_KNOWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def calm_waits(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make OpenMP's threads sleep while they wait; none if the user has a say.

    Args:
        environ: Variables of this process.
    """
    return {} if any(name in environ for name in _KNOWN) else {"OMP_WAIT_POLICY": "PASSIVE"}
