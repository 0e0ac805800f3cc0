"""What the host takes for the children that rows of a draft's forward get.

Before the next forward of several requests it takes in all of them: 15 a row of a tree of 16 rows,
seven of one of eight. A profile times the same forward with more children and with fewer.

Must not import torch.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from codesign.policy.host_cost import SEVERAL

WIDE = "wide"  # op whose rows say what forwards of a draft take whose rows get more children
NODES = "nodes"  # column that profiles may have: children that the rows of the draft may get
_SHAPE = ["rows", "requests", "context"]
_MOST = 0.5  # of a forward that its children may take


def child_seconds(drafts: pd.DataFrame, wide: pd.DataFrame) -> float:
    """Seconds for each child of a row of several requests; 0 where a profile does not say.

    At most half of any forward is its children's.

    Args:
        drafts: Timings of forwards, with ``NODES`` if they are to say so.
        wide: The same of shapes among these, with more children.
    """
    drafts = drafts.loc[drafts["requests"] >= SEVERAL]
    if NODES not in drafts or wide.empty or bool(np.isnan(drafts[NODES].to_numpy(float)).any()):
        return 0.0
    few, many = (timed.groupby(_SHAPE)[["seconds", NODES]].median() for timed in (drafts, wide))
    more = (many - few).dropna().to_numpy(np.float64)
    if not len(more):
        return 0.0
    seconds, children = few.to_numpy(np.float64).T
    least = float((seconds / children).min())
    return min(max(float(np.median(more[:, 0] / more[:, 1])), 0.0), _MOST * least)


def without_children(drafts: pd.DataFrame, child: float) -> pd.DataFrame:
    """Timings less so many seconds for each child, where several requests have any."""
    if not child:
        return drafts
    theirs = np.where(drafts["requests"] >= SEVERAL, child * drafts[NODES], 0.0)
    return drafts.assign(seconds=drafts["seconds"] - theirs)
