"""What plain rounds of several requests take less than their steps: ranks run ahead of the host.

A step is timed by itself, and with the host's loop beside it. Where the next step of the same
requests is enqueued while this one runs, the GPU does not wait for that loop. Rounds of one request
were served as a whole, and need no such thing.

Must not import torch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from codesign.fit.least_squares import non_negative_fit
from codesign.policy.host_cost import SEVERAL
from codesign.policy.step_time import StepTime

FEWEST = 4  # rounds of a kind: of fewer none is sure to be a usual one


def with_ahead(target: StepTime, served: pd.DataFrame) -> StepTime:
    """A step with its loop, and what plain rounds that were served took less, by requests.

    Args:
        target: Seconds of a step after which the host is waited for.
        served: Target's spans of plain rounds, in seconds, with rows, requests and context.
    """
    plain = served.loc[(served["requests"] >= SEVERAL) & (served["rows"] == served["requests"])]
    steps = target.of_arrays(plain["rows"], plain["context"], plain["requests"])
    timed = plain.assign(steps=steps, less=steps - plain["seconds"]).groupby("requests")
    found = timed[["steps", "less"]].median().loc[timed.size() >= FEWEST]
    if found.empty:
        return target
    beyond = found.index.to_numpy(np.float64) - 1.0
    # Rounds of one number of requests alone say nothing of each further one.
    design = np.column_stack([np.ones_like(beyond), beyond])[:, : len(found)]
    less, seconds = (found[name].to_numpy(np.float64) for name in ("less", "steps"))
    ahead, each = [*map(float, non_negative_fit(design, less, seconds)), 0.0][:2]
    return replace(target, ahead=ahead, ahead_each=each)
