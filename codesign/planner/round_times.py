"""Seconds of a round for many plans at once: fitted step times as NumPy arithmetic.

The simulator prices the same forwards one by one; here each policy on each deployment is priced at
a grid of batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codesign.planner.behaviour import Behaviour
from codesign.policy.cost import RoundCost
from codesign.policy.host_cost import SEVERAL
from codesign.policy.turns import turn_prices

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class BehaviourTable:
    """Behaviours of P policies as columns.

    Attributes:
        emitted: (P,) as in ``Behaviour``; likewise rows, overlapped, overlapped_rows, fanout,
            kept_trees, kept_nodes, unused and by_request.
        awaited: (P, F) as in ``Behaviour``, filled up with 0; likewise awaited_rows, with 1,
            and ends, with 0.
    """

    emitted: Floats
    rows: Floats
    awaited: Floats
    awaited_rows: Floats
    ends: Floats
    overlapped: Floats
    overlapped_rows: Floats
    fanout: Floats
    kept_trees: Floats
    kept_nodes: Floats
    unused: Floats
    by_request: Floats

    @classmethod
    def of(cls, behaviours: Sequence[Behaviour]) -> BehaviourTable:
        """One row per behaviour."""
        most = max([len(b.awaited) for b in behaviours], default=0)
        shape = len(behaviours), most

        def filled(values: Sequence[float], end: float) -> list[float]:
            return [*values, *[end] * (most - len(values))]

        return cls(
            emitted=np.array([b.emitted for b in behaviours], np.float64),
            rows=np.array([b.rows for b in behaviours], np.float64),
            awaited=np.array([filled(b.awaited, 0.0) for b in behaviours]).reshape(shape),
            awaited_rows=np.array([filled(b.awaited_rows, 1.0) for b in behaviours]).reshape(shape),
            ends=np.array([filled(b.ends, 0.0) for b in behaviours], np.float64).reshape(shape),
            overlapped=np.array([b.overlapped for b in behaviours], np.float64),
            overlapped_rows=np.array([b.overlapped_rows for b in behaviours], np.float64),
            fanout=np.array([b.fanout for b in behaviours], np.float64),
            kept_trees=np.array([b.kept_trees for b in behaviours], np.float64),
            kept_nodes=np.array([b.kept_nodes for b in behaviours], np.float64),
            unused=np.array([b.unused for b in behaviours], np.float64),
            by_request=np.array([b.by_request for b in behaviours], np.float64),
        )

    def with_ends(self, answers: Floats) -> BehaviourTable:
        """The same on average over all rounds of answers, of which the last ones draft less.

        Args:
            answers: (P,) answers for each token that rounds could have emitted.
        """
        left_out = np.minimum(self.ends * answers[:, None], 1.0)
        return replace(self, awaited=self.awaited * (1.0 - left_out))


def round_seconds(
    table: BehaviourTable, cost: RoundCost, *, batch: ArrayLike, context: float, is_apart: bool
) -> Floats:
    """Seconds of one round on the critical path; of turns, what a token of each request takes.

    Args:
        table: (P,) policies.
        cost: Step times of the deployment.
        batch: (B,) requests in the round.
        context: KV rows of each.
        is_apart: The draft has workers of its own.

    Returns:
        (P, B) seconds.
    """
    size = np.atleast_1d(np.asarray(batch, np.float64))
    all_context = context * size
    rows = table.rows[:, None] * size
    target = cost.target.of_arrays(rows, all_context, size)
    drafts = (table.awaited.sum(axis=1) + table.overlapped > 0)[:, None]
    target = np.where(drafts, target, _plain_seconds(cost, size, context))
    # A forward that one request needs holds up the whole batch: (P, F, B).
    needs = 1.0 - (1.0 - table.awaited[:, :, None]) ** size
    users = np.maximum(table.awaited[:, :, None] * size / np.maximum(needs, 1e-12), 1.0)
    draft_rows = table.awaited_rows[:, :, None] * users
    drafting = _draft_seconds(cost, table, draft_rows, context * users, users)
    awaited = (needs * drafting).sum(axis=1)
    first = cost.first_alone * (size < SEVERAL)
    if table.awaited.shape[1]:
        awaited += needs[:, 0] * first
    drafted = (table.awaited * table.awaited_rows).sum(axis=1)
    drafted += table.overlapped * table.overlapped_rows
    row = cost.reroot_row + cost.reroot_node * table.fanout
    trees, nodes = table.kept_trees[:, None], table.kept_nodes[:, None]
    reroot = cost.reroots(size) + (row * drafted)[:, None] * size + cost.choices(size, rows)
    reroot += cost.keeping(trees * size, nodes * size, 1.0 - (1.0 - trees) ** size)
    if not is_apart:
        return target + awaited + np.where(drafts, reroot, 0.0)
    one = _draft_seconds(cost, table, table.overlapped_rows[:, None] * size, all_context, size)
    beside = table.overlapped[:, None] * one + first * (table.overlapped > 0.0)[:, None]
    slowed = np.minimum(target + cost.slowdown * beside, target / (1.0 - cost.slowdown))
    return np.maximum(slowed + 2.0 * cost.message(size), beside) + awaited + reroot


def _draft_seconds(
    cost: RoundCost, table: BehaviourTable, rows: Floats, context: Floats, requests: Floats
) -> Floats:
    """(P, ...) seconds of a draft forward, with as many children as each policy's rows get."""
    fanout = table.fanout.reshape(-1, *[1] * (rows.ndim - 1))
    children = cost.child * fanout * (requests >= SEVERAL) * rows
    return cost.draft.of_arrays(rows, context, requests) + children


def _plain_seconds(cost: RoundCost, size: Floats, context: float) -> Floats:
    """(B,) seconds for a token of each request of a batch.

    Where requests may take turns, those of a fraction lie straight between whole numbers.
    """
    turns = turn_prices(cost.target)
    seconds = cost.target.of_arrays(size, context * size, size)
    taking = size > turns.fewest - 1.0
    if taking.any():
        sizes = size[taking]
        whole = np.arange(np.floor(sizes.min()), np.ceil(sizes.max()) + 1.0)
        saved = [turns.saved(int(num), int(num * context)) for num in whole]
        prices = cost.target.of_arrays(whole, context * whole, whole) - saved
        seconds[taking] = np.interp(sizes, whole, prices)
    return seconds
