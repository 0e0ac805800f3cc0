"""Rounds that repeat the last one without a look at the batch, where looks have gained less.

A look takes the host's time: one before each draft forward, one at the end. Of the first forward it
says what the last round's said, as long as the requests are the same. What it may find beside that
is a further forward, siblings, or nodes that are worth no row. A round of looks is compared with
one without: one forward, each request's likeliest child. Where that has been better lately, with so
many requests, it is repeated until looks are their share of the time (resting.py), somebody comes
or goes, or it is longer than an SLO allows.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

from codesign.policy.batch_round import BatchRound
from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Progress
from codesign.policy.resting import Resting, rounds_until_look
from codesign.policy.traffic import COLD
from codesign.policy.tree import DraftTree

_MEMORY = 0.1  # weight of a look in what looks gain
_SHARE_MEMORY = 0.02  # weight of a round in the share of those with a look


class Repeating(Resting):
    """A policy that says when it repeats a round.

    Attributes:
        looking: Share of the rounds begun that have looks, lately.
    """

    def __init__(
        self, goodput: Goodput, calibration: Calibration | None = None, *, fanout: int = 1
    ) -> None:
        super().__init__(calibration)
        self.fanout = fanout
        self._goodput = goodput.with_fanout(fanout)
        self._round = BatchRound(self._goodput)
        self.looking = 1.0
        self._left = 0  # rounds that repeat the last one
        self._batch: list[DraftTree] = []  # whom they serve
        self._others = 0  # requests beside them that are not drafted for
        self._seconds = 0.0  # of each
        self._gains: dict[int, float] = {}  # share of goodput that looks gain, by requests

    def _allowed(self, progress: Sequence[Progress]) -> float:
        """Seconds that a round with draft tokens may take."""
        return inf

    def _begins_repeat(self, trees: Sequence[DraftTree], progress: Sequence[Progress]) -> bool:
        """Whether the round that starts repeats the last one."""
        prompt_rows, _ = self.sharing
        same = (list(trees), self.beside[0]) == (self._batch, self._others)
        may = self._left > 0 and not prompt_rows and same
        self.repeats = may and self._seconds <= self._allowed(progress)
        self._left -= 1
        self.looking += _SHARE_MEMORY * ((not self.repeats) - self.looking)
        return self.repeats

    def _weigh_looks(self, trees: Sequence[DraftTree], tokens: float, rows: int) -> None:
        """Compare a round of looks with one without; repeat that if it has been better lately.

        Args:
            trees: Of the batch.
            tokens: Expected of the round.
            rows: Nodes that it verifies, the roots not counted.
        """
        this, self._left = self._round, 0
        look = self._goodput.host.look(this.batch)
        if not (look and this.num_forwards) or this.num_base > this.batch:
            return
        beside = this.overhead - this.look + this.stall
        seconds = this.drafting + this.target.of(this.num_base + rows, this.context) + beside
        firsts = likeliest_children(trees)
        pairs = zip(trees, firsts, strict=True)
        chances = [exp(tree.log_weights[nodes[1]]) for tree, nodes in pairs if len(nodes) > 1]
        blind = this.first + this.target.of(this.num_base + len(chances), this.context) + beside
        looks = look * (1 + this.num_forwards)
        gain = tokens / (seconds + looks) / ((this.roots + sum(chances)) / blind) - 1.0
        mean = self._gains.get(this.batch, 0.0)
        self._gains[this.batch] = mean = mean + _MEMORY * (gain - mean)
        if mean < 0.0 and this.look:  # not before confidences are learned
            self._left = rounds_until_look(looks, blind - this.stall) - 1
            self._batch, self._others = list(trees), self.beside[0]
            self._seconds = blind - this.stall


def likeliest_leaves(trees: Sequence[DraftTree], done: int) -> list[list[int]]:
    """Of each request that is drafted for its likeliest leaf, in the first forward alone."""
    if done:
        return [[] for _ in trees]
    return [tree.leaves(1) if tree.missing < COLD else [] for tree in trees]


def likeliest_children(trees: Sequence[DraftTree]) -> list[list[int]]:
    """The root of each tree and its likeliest child, if there is any."""
    return [[0, *list(tree.children[0].values())[:1]] for tree in trees]
