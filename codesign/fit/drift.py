"""What a machine does between its profile and its runs, which is in no residual of a fit.

Priors from eight campaigns of 22 and 23 November (docs/validation.md, "Drift between a profile and
its runs"): runs were off by three things beyond their steps' residuals. A fixed time per round, as
a shared host takes it: a run meets its slow phases in another mix than the profile did. A share of
the round, mostly the same for all runs of a deployment: all of the machine is faster or slower than
it was in the profile. And another share of rounds of several requests.

Must not import torch.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from codesign.fit.round_costs import PACE
from codesign.policy.cost import SEVERAL

HOST = 35e-6  # standard deviation, seconds a round
SHARE = 0.012  # standard deviation, a share of a round's seconds
BATCH = 0.017  # the same, besides, of a round of several requests
# Seconds that a round takes more where a plain round's own host time takes one more: in the slow
# phases of an 8B's host 14 us there were 100 us of a plain round.
EXPOSURE = 7.0


def host_spreads(steps: pd.DataFrame) -> dict[str, float]:
    """By deployment, how unsure the host's pace is: a run sees it for as long as its profile, or
    longer, and has other slow phases.

    Args:
        steps: Rows of steps.parquet.

    Returns:
        Standard error of the mean of what a plain round took the host, in seconds; nothing of
        deployments whose profile does not say.
    """
    paces = steps.loc[steps["op"] == PACE].groupby("deployment")["seconds"]
    return {
        str(label): float(np.sqrt(np.mean((seconds - seconds.median()) ** 2) / len(seconds)))
        for label, seconds in paces
    }


def drift_error(seconds: float, *, requests: float = 1.0, host_spread: float = 0.0) -> float:
    """Relative standard error of a round's time that its fit does not know of.

    ``HOST`` is of hosts with slow phases like others: one whose profile shows more has its own.

    Args:
        seconds: Of the round.
        requests: That share it.
        host_spread: Of ``host_spreads``.
    """
    if seconds <= 0.0:
        return 0.0
    batch = BATCH if requests >= SEVERAL else 0.0
    return math.hypot(max(HOST, EXPOSURE * host_spread) / seconds, SHARE, batch)
