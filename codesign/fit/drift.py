"""What a machine does between its profile and its runs, which is in no residual of a fit.

Priors from eight campaigns of 22 and 23 November (docs/validation-history.md, "Drift between a
profile and its runs"): runs were off by three things beyond their steps' residuals. A fixed time
per round, as a shared host takes it: a run meets its slow phases in another mix than the profile
did. A share of the round, mostly the same for all runs of a deployment: all of the machine is
faster or slower than it was in the profile. And another share of rounds of several requests.

Must not import torch.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from codesign.fit.round_costs import PACE
from codesign.policy.host_cost import SEVERAL

HOST = 35e-6  # standard deviation, seconds a round
SHARE = 0.012  # standard deviation, a share of a round's seconds
BATCH = 0.017  # the same, besides, of a round of several requests
# Seconds that a round takes more where a plain round's own host time takes one more: in the slow
# phases of an 8B's host 14 us there were 100 us of a plain round.
EXPOSURE = 7.0
VISIT = "visit"  # column that profiles may have: in which visit to the deployment, from 1
SHAPE = ["op", "rows", "requests", "context", "beside"]  # columns that tell steps apart


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


def visit_spreads(steps: pd.DataFrame) -> dict[str, float]:
    """By deployment, how unsure its forwards are because each visit of a profile had its own pace.

    All steps of a visit are off together, so that no number of them averages it out. A run is one
    more visit: it is off by its own difference from the mean and by that of the mean.

    Args:
        steps: Rows of steps.parquet.

    Returns:
        Relative standard error of a further visit's seconds; nothing of deployments that were
        visited once.
    """
    if VISIT not in steps:
        return {}
    is_forward = steps["op"].isin(["target", "draft"]) & (steps["seconds"] > 0.0)
    forwards = steps.loc[is_forward]
    found = {}
    for label, part in forwards.groupby("deployment", sort=False):
        medians = part.groupby([*SHAPE, VISIT])["seconds"].median().unstack(VISIT).dropna()
        logs = np.log(medians.to_numpy(np.float64))
        if min(logs.shape) < 1 or (visits := logs.shape[1]) < 2:
            continue
        paces = np.median(logs - logs.mean(axis=1, keepdims=True), axis=0)
        found[str(label)] = float(np.std(paces, ddof=1) * math.sqrt(1.0 + 1.0 / visits))
    return found


def drift_error(
    seconds: float, *, requests: float = 1.0, host_spread: float = 0.0, visit_spread: float = 0.0
) -> float:
    """Relative standard error of a round's time that its fit does not know of.

    ``HOST`` and ``SHARE`` are of machines like others: one whose profile shows more has its own.

    Args:
        seconds: Of the round.
        requests: That share it.
        host_spread: Of ``host_spreads``.
        visit_spread: Of ``visit_spreads``.
    """
    if seconds <= 0.0:
        return 0.0
    batch = BATCH if requests >= SEVERAL else 0.0
    share = max(SHARE, visit_spread)
    return math.hypot(max(HOST, EXPOSURE * host_spread) / seconds, share, batch)
