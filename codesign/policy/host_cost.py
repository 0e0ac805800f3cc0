"""Seconds of a round that the host takes beside the forwards, by what the round does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from codesign.policy.step_time import StepTime

_ROUNDING = 1e-12  # seconds: what is left of a wait that is priced already
Number = TypeVar("Number", float, NDArray[np.float64])
SEVERAL = 1.5  # requests, which planners count in fractions: more are not one


class Drafting(NamedTuple):
    """How a policy drafts, as far as what a round takes depends on it; see Speculation.

    Attributes:
        fanout: Children that each row of the draft gets.
        asks: No forward of the draft runs ahead of the host, not even of one request.
        decides: Looks at the batch take time.
    """

    fanout: int = 1
    asks: bool = False
    decides: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """What a round takes beside its forwards and messages.

    Attributes:
        reroot: Seconds to re-root and move KV rows, per round of one request.
        reroot_each: The same for every request beyond the first.
        reroot_row: The same for every row that the draft runs in a round: larger trees have more to
            keep, to drop and to move. Where target and draft take turns a re-root moves the trees
            of the round before, by whose rows it is timed; simulations count those of its own,
            which is the same over a request.
        reroot_node: The same for every child that these rows may get: trees that are kept from
            round to round. ``drafting`` counts them.
        reroot_any: The same if it keeps more than the root of any tree.
        reroot_tree: The same for every tree of which it keeps more than the root.
        reroot_kept: The same for every node that it keeps, roots left out.
        child: Seconds for every child that a row of a draft's forward gets, of several requests:
            the host takes them in before the next forward, while of one request ranks run ahead of
            it. 0 where the forwards' own seconds have it; ``drafting`` counts them.
        choice: Seconds to choose the candidates, per round of one request; 0 where a profile has
            them in the re-root.
        choice_each: The same for every request beyond the first.
        choice_row: The same for every row that the target verifies.
        choice_alone: What a round of one request takes besides: its first draft forward waits for
            the host, the others do not, unless the policy asks for each.
        first_alone: What a row of draft forwards of one request takes besides, where the draft has
            workers of its own: the first of them waits for the host, the others do not, likewise.
        deciding: Host seconds of a look of a policy that decides by the whole batch (one before
            each draft forward, one at the end), beside what the steps hold; 0 where unknown.
        deciding_each: The same for every request that it looks at.
    """

    reroot: float = 0.0
    reroot_each: float = 0.0
    reroot_row: float = 0.0
    reroot_node: float = 0.0
    child: float = 0.0
    reroot_any: float = 0.0
    reroot_tree: float = 0.0
    reroot_kept: float = 0.0
    choice: float = 0.0
    choice_each: float = 0.0
    choice_row: float = 0.0
    choice_alone: float = 0.0
    first_alone: float = 0.0
    deciding: float = 0.0
    deciding_each: float = 0.0

    def drafting(self, how: Drafting) -> Self:
        """The same cost for a policy that drafts so; once."""
        return replace(self, **self._counted(how))

    def draft_step(self, step: StepTime, how: Drafting) -> StepTime:
        """A draft forward of a policy that drafts so; ``self`` as it was before ``drafting``."""
        return step.with_dearer_rows(self.child * how.fanout).later_alone(self.waiting(how))

    def waiting(self, how: Drafting) -> float:
        """Seconds that each draft forward of one request waits for the host.

        As the first one of a round does, where a policy asks for each. A look that counts by itself
        is part of that.
        """
        alone = self.choice_alone + self.first_alone - (self.look(1) if how.decides else 0.0)
        return alone if how.asks and alone > _ROUNDING else 0.0

    def _counted(self, how: Drafting) -> dict[str, float]:
        row, waiting = self.reroot_row + self.reroot_node * how.fanout, self.waiting(how)
        return {
            "reroot_row": row,
            "reroot_node": 0.0,
            "child": 0.0,
            "choice_alone": max(self.choice_alone - waiting, 0.0),
            "first_alone": max(self.first_alone - waiting, 0.0),
        }

    def reroots(self, requests: Number, draft_rows: Number | float = 0.0) -> Number:
        """Seconds of the re-root of so many requests and draft rows: numbers, or arrays."""
        return self.reroot + self.reroot_each * (requests - 1.0) + self.reroot_row * draft_rows

    def keeping(self, trees: Number, nodes: Number, chance: Number | None = None) -> Number:
        """What a re-root takes besides that keeps so many trees, and nodes but their roots.

        Args:
            trees: Of which more than the root is kept; or how many are expected.
            nodes: Of these.
            chance: That there is any such tree, where they are expected ones.
        """
        some = self.reroot_any * (trees > 0.0 if chance is None else chance)
        return some + self.reroot_tree * trees + self.reroot_kept * nodes

    def choices(self, requests: Number, rows: Number | float = 0.0) -> Number:
        """The same of choosing rows to verify, and whatever else the draft's span has in it."""
        seconds = self.choice + self.choice_each * (requests - 1.0)
        if self.choice_alone:
            seconds = seconds + self.choice_alone * (requests < SEVERAL)
        return seconds + self.choice_row * rows

    def look(self, requests: int) -> float:
        """Seconds of a look at so many requests; 0 where nobody has timed it."""
        return self.deciding + self.deciding_each * requests


NO_HOST = HostCost()
