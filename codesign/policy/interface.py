"""What a speculation policy is: the questions that a round asks it.

A policy sees the draft trees of all requests in the batch. It says which leaves the draft model
runs on next, and which nodes the target verifies. Chains are trees of width 1. Whatever it decides,
the output is unchanged: the target decides tokens by walking (policy/walk.py).

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log1p

from codesign.policy.cost import Calibration
from codesign.policy.host_cost import Drafting
from codesign.policy.light import light
from codesign.policy.tree import UNEXPANDED, DraftTree

LEAST_CHANCE = 1e-6  # that is calibrated, and the greatest is as far from 1
MOST_CHANCE = 1.0 - LEAST_CHANCE
MAX_TREE_ROWS = 128  # expanded nodes per request, so that draft KV slabs have a fixed size


@light
class Progress:
    """How far a request has come, for policies that serve each to its own target.

    Attributes:
        elapsed: Seconds since its first token.
        tokens: Tokens emitted since then, the first one not counted.
        slo_tpot: Its own target of seconds per token; None for the run's.
    """

    elapsed: float = 0.0
    tokens: int = 0
    slo_tpot: float | None = None


class Speculation:
    """Plain autoregression, and what the other policies share.

    A round, unless it ``stays_at_rest``: ``begin``; while ``leaves`` names any, the draft model
    runs on them; ``select`` names the nodes to verify; an asynchronous policy then names
    ``overlap_leaves`` while the target verifies. Named leaves of a tree are all its root alone, or
    begin with its root and follow one another, or leave out its root.

    Attributes:
        fanout: Most children of a node.
        overlap: Draft forwards beside the target's verification; may change from round to round.
        is_batch_coupled: What one request drafts or verifies depends on the others of the batch,
            or on predicted times.
        needs_progress: ``begin`` wants each request's Progress.
        tree_type: Makes the draft trees: DraftTree, a subclass, or one with its arguments bound.
        beside: Requests of the batch that are not drafted for, and their KV rows; set before
            ``begin``.
        sharing: As in protocol.Verdict: prompt rows that share the round's forward, and requests
            that wait for their first token; set before ``begin``.
        now: Seconds since the start of the run, by the target's clock; set before ``begin``.
        reads_prompts: Whether prompts that begin now are run by the draft model, too, a part at a
            time; otherwise with the request's first expansion.
        asks: The host names the rows of each draft forward when it has read the one before, of one
            request, too: ``following`` never tells of any.
        decides: What it decides about a batch takes the host a time that counts; see
            cost.RoundCost.deciding.
        rests: The round is plain decoding: nothing was drafted, and no tree is left to move.
        repeats: The round drafts without a look at the batch.
        grown: Leaves that an expansion takes of which ``following`` tells.
    """

    fanout: int = 1
    overlap: int = 0
    is_batch_coupled: bool = False
    needs_progress: bool = False
    asks: bool = False
    decides: bool = False
    tree_type: Callable[..., DraftTree] = DraftTree
    beside: tuple[int, int] = (0, 0)
    sharing: tuple[int, int] = (0, 0)
    now: float = 0.0
    reads_prompts: bool = True
    rests: bool = False
    repeats: bool = False
    grown: int = 0

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = calibration or Calibration()

    @property
    def drafting(self) -> Drafting:
        """What costs depend on."""
        return Drafting(self.fanout, self.asks, self.decides)

    @property
    def weighing(self) -> Calibration:
        """What ``weigh`` calibrates with, unless a policy has a way of its own."""
        return self._calibration

    def weigh(self, log_probs: Sequence[float]) -> Sequence[float]:
        """Calibrated log chance of acceptance of each draft log probability; at most 0."""
        if self._calibration.is_identity:
            return log_probs
        return _calibrated(log_probs, self._calibration)

    def stays_at_rest(self) -> bool:
        """Whether the round that starts is plain decoding without a look at the trees."""
        return False

    def rests_on(self) -> bool:
        """Whether ``stays_at_rest`` will be true of the next round."""
        return False

    def looks_ahead(self) -> bool:
        """Whether it is best to look at the trees beside this round at rest: the next one would."""
        return False

    def looked(self, seconds: float) -> None:
        """A look after which the policy ``rests`` took the host so long; told if anyone knows."""

    def begin(self, trees: Sequence[DraftTree], progress: Sequence[Progress] = ()) -> None:
        """A round with a look at the trees starts; these are already re-rooted.

        Args:
            trees: One per request.
            progress: One per request if ``needs_progress``, else none.
        """

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        """Leaves of each tree to run next, after ``done`` expansions; all empty to stop."""
        return [[] for _ in trees]

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """Leaves of each tree to run while the target verifies; called ``overlap`` times."""
        return [[] for _ in trees]

    def following(self, tree: DraftTree, done: int) -> int:
        """Expansions that are sure to follow the one that ``leaves`` has named after ``done``.

        Each takes the ``grown`` heaviest leaves of the tree, as far as there are any. 0 where this
        is not so or not known yet: whoever runs the draft model may run ahead of the host by them.
        """
        return 0

    def overlap_following(self, tree: DraftTree, done: int) -> int:
        """The same of ``overlap_leaves``, which was called ``done`` times before."""
        return 0

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """Nodes of each tree that the target verifies, root included, connected."""
        return [[0] for _ in trees]

    def settle(self) -> None:
        """Do what no forward waits for; called while one runs, the draft's or the target's.

        Before trees are changed by what a target's forward has verified.
        """


def last_confidence(tree: DraftTree) -> float:
    """Chance of a chain's last token given its parent, as the draft model sees it."""
    parent = tree.parents[-1]
    return exp(tree.log_weights[-1] - tree.log_weights[parent])


def chain_end(tree: DraftTree) -> list[int]:
    """The leaf of a chain, if it may grow: what ``tree.leaves(1)`` finds, without a search."""
    is_open = tree.slots[-1] == UNEXPANDED and tree.depths[-1] < tree.max_depth
    return [len(tree.slots) - 1] if is_open else []


def context_rows(trees: Sequence[DraftTree]) -> int:
    """KV rows of all requests before a forward over their roots."""
    return sum([tree.base_len for tree in trees]) - len(trees)


def likeliest_path(tree: DraftTree, node: int = 0) -> list[int]:
    """Nodes from ``node`` along each one's first child, which is its likeliest."""
    nodes = [node]
    while children := tree.children[node]:
        node = children[0]
        nodes.append(node)
    return nodes


def to_run(tree: DraftTree, nodes: Sequence[int]) -> list[int]:
    """Those of ``nodes`` without a KV row that may have children; none if the slab is full."""
    slots, depths, deepest = tree.slots, tree.depths, tree.max_depth
    open_nodes = [n for n in nodes if slots[n] == UNEXPANDED and depths[n] < deepest]
    return open_nodes if tree.num_expanded + len(open_nodes) <= MAX_TREE_ROWS else []


def first_to_run(tree: DraftTree, levels: Sequence[Sequence[int]]) -> list[int]:
    """``to_run`` of the first level of nodes that has any."""
    for level in levels:
        if nodes := to_run(tree, level):
            return nodes
    return []


def _calibrated(log_probs: Sequence[float], calibration: Calibration) -> list[float]:
    # sigmoid(slope * logit(p) + intercept) = 1 / (1 + exp(-intercept) * ((1 - p) / p) ** slope)
    slope, factor = calibration.slope, exp(-calibration.intercept)
    found = []
    for log_prob in log_probs:
        chance = exp(log_prob)
        if chance < LEAST_CHANCE:
            chance = LEAST_CHANCE
        elif chance > MOST_CHANCE:
            chance = MOST_CHANCE
        found.append(-log1p(factor * ((1.0 - chance) / chance) ** slope))
    return found
