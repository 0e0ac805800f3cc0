"""What re-roots kept, round by round, of rounds that a profile serves.

A tree of which something survives its re-root is renumbered node by node, which takes the host a
multiple of dropping one. No record of a round holds it, so a profile's draft worker notes it, after
the re-root's span and before its first forward. Imports no torch.
"""

from __future__ import annotations

import pandas as pd

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.drafter import Drafter
from codesign.fit.round_costs import KEPT
from codesign.policy.protocol import Candidates
from codesign.policy.speculation import Speculation

Kept = dict[int, tuple[int, int]]  # by round: trees of more than a root, nodes of all but roots


class NotingWorker(DraftWorker):
    """A draft worker that notes what its re-roots kept.

    Attributes:
        kept: So far.
    """

    def __init__(self, policy: Speculation, drafter: Drafter) -> None:
        super().__init__(policy, drafter)
        self.kept: Kept = {}

    def _draft(self, number: int) -> Candidates:
        self.kept[number] = self.side.kept
        return super()._draft(number)


def with_kept(rounds: pd.DataFrame, kept: Kept) -> pd.DataFrame:
    """Rounds with two columns more, without those of which it is not known."""
    known = pd.DataFrame.from_dict(kept, orient="index", columns=list(KEPT))
    return rounds.join(known, on="round", how="inner")
