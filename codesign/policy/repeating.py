"""Rounds that repeat the last one without a look at the batch, where looks have gained less.

A look takes the host's time: one before each draft forward, one at the end. Of the first forward it
says what the last round's said. What it may find beside that is a further forward, siblings, or
nodes that are worth no row. A round of looks is compared with one without: one forward, each
request's likeliest child. Where that has been better lately, with so many requests, it is repeated
until looks are their share of the time (resting.py), and longer each time that a look finds the
same, as long as it is usually better than plain decoding. It ends before if it is longer than an
SLO allows, if there are more requests than before, so that drafting may pay no more, or if looks at
so many have gained.

Requests come and go meanwhile. Of one that comes the draft runs the prompt if drafting for it saves
``needed_return`` times what that takes: what it adds to drafting for the others, as long as an
average request repays its prompt by its share.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import numpy as np

from codesign.policy.batch_round import LEAST, BatchRound
from codesign.policy.cost import Calibration
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Progress, context_rows
from codesign.policy.lately import Lately
from codesign.policy.resting import LEARNED, LONGEST_REST, Resting, rounds_until_look
from codesign.policy.traffic import COLD, Traffic
from codesign.policy.tree import DraftTree

_MEMORY = 0.1  # weight of a look in what looks gain
_SHARE_MEMORY = 0.02  # weight of a round in the share of those with a look


class Repeating(Resting):
    """A policy that says when it repeats a round.

    Attributes:
        traffic: What the policy has seen of the requests.
        looking: Share of the rounds begun that have looks, lately; but for those after a rest.
    """

    traffic: Traffic

    def __init__(
        self, goodput: Goodput, calibration: Calibration | None = None, *, fanout: int = 1
    ) -> None:
        super().__init__(calibration)
        self.fanout = fanout
        self._goodput = goodput.drafting(self.drafting)
        self._round = BatchRound(self._goodput)
        self.looking = 1.0
        self._left = 0  # rounds that repeat the last one
        self._num_same = 0  # looks one after another that have gained nothing
        self._others = 0  # requests beside them that are not drafted for
        self._newcomer_saves = 0.0  # seconds per token that drafting for one more request saves
        self._largest = 0  # requests that the last look was made at: of more, fewer may draft
        self._seconds = 0.0  # of a round that repeats that one
        self._saved_lately = Lately()  # by drafting for all, per token of each request
        self._gains: dict[int, float] = {}  # share of goodput that looks gain, by requests
        self._verified: tuple[Sequence[DraftTree], float, int] | None = None  # not weighed yet

    @property
    def mean_confidence(self) -> float:
        """Mean chance of a request's likeliest token, lately."""
        raise NotImplementedError

    def _allows(
        self, seconds: float, trees: Sequence[DraftTree], progress: Sequence[Progress]
    ) -> bool:
        """Whether a round with draft tokens may take so long; asked in every one that repeats."""
        return True

    def _begin_looks(self, trees: Sequence[DraftTree], num_confidences: int) -> tuple[int, int]:
        """Begin a round that looks at the trees; its requests and KV rows, those beside counted."""
        num_beside, rows_beside = self.beside
        batch, context = len(trees) + num_beside, context_rows(trees) + rows_beside
        self.traffic.observe(trees, self.now, self.sharing)
        self._round.begin(
            batch,
            context,
            traffic=self.traffic,
            sharing=self.sharing,
            looking=self.looking if num_confidences > LEARNED else 0.0,
        )
        return batch, context

    def _begins_repeat(self, trees: Sequence[DraftTree], progress: Sequence[Progress]) -> bool:
        """Whether the round that starts repeats the last one."""
        prompt_rows, _ = self.sharing
        num_beside = self.beside[0]
        batch = len(trees) + num_beside
        may = self._left > 0 and not prompt_rows and num_beside == self._others
        may = may and batch <= self._largest and self._gains.get(batch, 0.0) < 0.0
        self.repeats = may and self._allows(self._seconds, trees, progress)
        self._left -= 1
        if not self.rests:
            self.looking += _SHARE_MEMORY * ((not self.repeats) - self.looking)
        return self.repeats

    def settle(self) -> None:
        """See ``Speculation``."""
        if self._verified is not None:
            self.reads_prompts = not self.rests and self._is_worth_reading()
            self._weigh_looks(*self._verified)
            self._verified = None

    def _is_worth_reading(self) -> bool:
        """Whether a prompt that begins now is worth running, at what this round saves."""
        raise NotImplementedError

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
        chances = [exp(tree.log_weights[i]) for tree in trees for i in likeliest_child(tree)]
        # It drafts for those, too, whose leaf was not worth a row.
        num = max(sum([tree.missing < COLD for tree in trees]), len(chances))
        accepted = sum(chances) + (num - len(chances)) * self.mean_confidence
        first = this.first + this.draft.at(num) - this.draft.at(len(chances))
        blind = first + this.target.of(this.num_base + num, this.context) + beside
        looks = look * (1 + this.num_forwards)
        gain = tokens / (seconds + looks) / ((this.roots + accepted) / blind) - 1.0
        mean = self._gains.get(this.batch, 0.0)
        self._gains[this.batch] = mean = mean + _MEMORY * (gain - mean)
        self._num_same = self._num_same + 1 if gain < 0.0 else 0
        # Not before confidences are learned, nor where plain decoding is better.
        if mean < 0.0 and this.look and self._saved_blindly(num) > 0.0:
            rounds = max(self._num_same, 1) * rounds_until_look(looks, blind - this.stall)
            self._left = min(rounds, LONGEST_REST) - 1
            self._others, self._largest = self.beside[0], this.batch
            self._seconds = blind - this.stall
            every, others = self._saved_blindly(len(trees)), self._saved_blindly(len(trees) - 1)
            self._newcomer_saves = self._saved_by_newcomer(every, others)

    # Prompts that the draft runs or leaves.

    def _saved_blindly(self, num: int) -> float:
        """Seconds per token of each request that repeated rounds save which draft for ``num``."""
        this, accepted = self._round, num * self.mean_confidence  # their tokens then are behind
        seconds = this.overhead - this.look + this.stall
        seconds += this.draft.of(num + accepted, this.context)
        seconds += this.target.of(this.num_base + num, this.context)
        return this.saved(seconds / (this.roots + accepted))

    def _saved_by_newcomer(self, every: float, others: float) -> float:
        """Seconds per token that drafting for a request saves, where most others are drafted for.

        What it adds, as long as an average request repays its prompt by its share; else its share.
        Others for whom drafting does not pay would decode plainly, and lose nothing.

        Args:
            every: Seconds per token of each request that drafting for all saves.
            others: The same of all but one.
        """
        share = every / self._round.batch
        goes_on = self.traffic.repays_prompts(share, is_drafting=True)
        return every - max(others, 0.0) if goes_on else share

    def _lasting(self, saved: float) -> float:
        """Share of what drafting saves now that counts for a prompt: as much as it saved lately.

        A prompt is repaid by a whole answer. Where a step takes as long for 17 rows as for 32,
        drafting for 17 requests saves much, for 16 and for 32 nothing: a growing batch is soon
        past what it saves in passing. Rounds count in which this is asked: batch trees ask where
        drafting promises more than none.

        Args:
            saved: Seconds per token of each request that drafting for all saves.
        """
        saved = max(saved, 0.0)
        this = self._round
        horizon = max(self.traffic.left_at_first * (this.plain_seconds - this.stall), LEAST)
        lately = self._saved_lately.take_in(saved, self.now, horizon)
        return lately / saved if lately < saved else 1.0

    def _costly(self, trees: Sequence[DraftTree], cold: Sequence[int], saved: float) -> list[int]:
        """Of cold requests those for which running what they missed does not save enough.

        That is ``needed_return`` times what it takes.

        Args:
            trees: Of the batch.
            cold: Whom it is about.
            saved: Seconds per token that drafting for one of them saves.
        """
        left = self.traffic.expected_left(np.array([trees[i].emitted for i in cold]))
        num_paying = len(trees) + self.beside[0] + self.sharing[1]
        saving = left * (saved / needed_return(num_paying))
        pays = self._goodput.paying_prompts([trees[i].missing for i in cold], saving)
        return [i for i, is_paid in zip(cold, pays.tolist(), strict=True) if not is_paid]

    def _likeliest_leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        """Of each request that is drafted for its likeliest leaf, in the first forward alone."""
        if done:
            return [[] for _ in trees]
        leaves = [tree.leaves(1) for tree in trees]
        cold = [i for i, tree in enumerate(trees) if tree.missing >= COLD]
        for i in self._costly(trees, cold, self._newcomer_saves) if cold else ():
            leaves[i] = []
        return leaves


def needed_return(num: int) -> float:
    """Times its price that a draft's prompt must save, where so many requests pay it.

    All of them pay it at once, and some are gone when it has saved as much. Each gains while both
    itself and the request of the prompt are here. Of two answers that may end at any token alike
    the shorter has half as many, on average: of the saving on a whole answer, those who pay have
    (num + 1) / (2 num). That is all of it for a request alone, and half in a large batch, where the
    others' part is of requests that come later. Those may come to a batch for which drafting does
    not pay, so that their part does not count. Who waits for a place pays and gains the whole.

    Args:
        num: Requests of the batch, and those who are about to join it.
    """
    return 2.0 * num / (num + 1.0)


def likeliest_children(trees: Sequence[DraftTree]) -> list[list[int]]:
    """The root of each tree and its likeliest child, if there is any."""
    return [[0, *likeliest_child(tree)] for tree in trees]


def likeliest_child(tree: DraftTree) -> list[int]:
    """Of the root; none if there is none."""
    return list(tree.children[0][:1])
