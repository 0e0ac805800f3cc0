"""What the target's step takes in rounds before which prompts ran, from rounds that are served.

The host has not just done what a round does, and takes longer for it. Where requests join one by
one, rounds with prompts and without them alternate, so that both meet the same host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from codesign.fit.served_rounds import JOINED, SETTLED

if TYPE_CHECKING:
    from codesign.profiler.rank_bench import RankBench

_TREE = "tree-3x2x2"  # none of the plans that a campaign holds out


def joining_timings(bench: RankBench) -> pd.DataFrame:
    """Rows of steps.parquet, but for the deployment: the target's span of each round."""
    rounds = bench.joined_rounds(f"async-{_TREE}" if bench.setup.draft_ranks else _TREE)
    ops = np.where(rounds["prefill_tokens"] > 0, JOINED, SETTLED)
    return pd.DataFrame(
        {
            "rows": rounds["rows"],
            "requests": rounds["batch"],
            "context": rounds["context"],
            "op": ops,
            "beside": False,
            "seconds": rounds["target"],
        }
    )
