"""Rounds that a policy has made on the recordings, to be played back for the requests of a trace.

A *stretch* is a run of recorded tokens; which tokens it holds does not depend on the policy. A
*tape* is what one policy, played by its own objects for one request alone, does on a stretch: one
row per round. A simulated request plays stretches one after another, the same ones under every
policy, so that plans are compared on the same luck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import AcceptanceProfile
from codesign.policy.protocol import DraftSide
from codesign.policy.speculation import Speculation
from codesign.sim.acceptance import SyntheticDrafter
from codesign.sim.played import PlayedBatch
from codesign.sim.stretches import STRETCH_TOKENS, Stretches
from codesign.sim.work import Entering, Work

_MARGIN = 160  # tokens beyond a stretch, so that no tree is cut short by the end of the request
FORWARDS = 4  # column of the first forward
Rounds = NDArray[np.int64]
Round = tuple[Work, int]  # and the tokens that it emits


@dataclass(frozen=True, slots=True, eq=False)
class Tapes:
    """All stretches of one kind of prompt under one policy.

    Attributes:
        rounds: (N, 4 + 3 * (drafting + overlapped)) rounds, stretch after stretch: rows verified,
            tokens emitted, whether the re-root kept more than the root (0 or 1), nodes that it
            kept, then per draft forward its rows, whether the request takes part (0 or 1), and its
            KV rows less the target's. First the forwards before the candidates.
        ends: (stretches + 1,) row at which each stretch begins, and N.
        num_drafting: Most forwards before the candidates.
        num_overlapped: Most forwards beside the verification.
        warm_up: Rounds at the start of a stretch that only a request's start has.
        is_chain: One child per node and nothing overlapped: near its end a request verifies fewer
            rows, exactly one less per missing token.
        last_forwards: Most draft forwards of a round before which one, two, ... tokens are left.
    """

    rounds: Rounds
    ends: NDArray[np.int64]
    num_drafting: int
    num_overlapped: int
    warm_up: int
    is_chain: bool
    last_forwards: tuple[int, ...] = ()

    def play(self, stretches: Sequence[int], num_tokens: int) -> Rounds:
        """Rounds that emit ``num_tokens`` tokens; a copy, cut where the request ends.

        Args:
            stretches: At least one; played again from the first if they do not suffice.
            num_tokens: Tokens after the first one; at least 1.
        """
        parts, left = [], num_tokens
        for number, stretch in enumerate(cycle(stretches)):
            first, end = self.ends[stretch], self.ends[stretch + 1]
            part = self.rounds[first + (self.warm_up if number else 0) : end]
            emitted = np.cumsum(part[:, 1])
            if emitted[-1] < left:
                parts.append(part)
                left -= int(emitted[-1])
                continue
            count = int(np.searchsorted(emitted, left)) + 1
            parts.append(part[:count])
            break
        rounds = np.concatenate(parts)
        self._cut(rounds, num_tokens)
        return rounds

    def _cut(self, rounds: Rounds, num_tokens: int) -> None:
        """No request emits, or drafts, more than it may."""
        last = len(rounds) - 1
        left = num_tokens - int(rounds[:last, 1].sum())  # before the last round
        rounds[last, 1] = left
        for number in range(last, -1, -1):
            if left > len(self.last_forwards):
                return
            row = rounds[number]
            if self.is_chain or left == 1:
                row[0] = min(row[0], left)
            row[FORWARDS + 3 * self.last_forwards[left - 1] :] = 0
            left += int(rounds[number - 1, 1])


def make_tapes(
    policy: Speculation | None,
    profile: AcceptanceProfile,
    stretches: Stretches,
    *,
    hears_early: bool,
) -> Tapes:
    """Play a policy on every stretch.

    Args:
        policy: None for plain decoding. It must not be batch-coupled.
        profile: What was recorded.
        stretches: Runs of it.
        hears_early: As for PlayedBatch.
    """
    if policy is None:
        ends = np.arange(len(stretches) + 1) * STRETCH_TOKENS
        plain = np.tile(np.array([1, 1, 0, 0]), (int(ends[-1]), 1))
        return Tapes(plain, ends, 0, 0, 0, is_chain=True)

    drafter = SyntheticDrafter(profile, 0, stretches.path)
    rounds: list[Round] = []
    ends = [0]
    for stretch in range(len(stretches)):
        batch = PlayedBatch(DraftSide(policy), drafter, hears_early=hears_early)
        rounds += _play_stretch(batch, stretch, stretches.category(stretch))
        ends.append(len(rounds))
    num_drafting = max(len(work.drafting) for work, _ in rounds)
    num_overlapped = max(len(work.overlapped) for work, _ in rounds)
    is_chain = policy.fanout == 1 and not num_overlapped
    table = _table(rounds, num_drafting, num_overlapped)
    return Tapes(
        table,
        np.array(ends),
        num_drafting,
        num_overlapped,
        warm_up=0 if is_chain else 2 if hears_early else 1,
        is_chain=is_chain,
        last_forwards=last_forwards(
            policy.fanout,
            num_drafting,
            num_overlapped,
            width=int(table[:, FORWARDS + 3].max()) if num_drafting > 1 else 1,
        ),
    )


def last_forwards(
    fanout: int, num_drafting: int, num_overlapped: int, *, width: int
) -> tuple[int, ...]:
    """See ``Tapes``: no node lies deeper than the tokens that are left, but for the first one.

    With two left the root alone is run on, with three its children, too, as many at once as in
    other rounds. A tree that is kept from round to round has most of its nodes already.

    Args:
        fanout: Children of a row.
        num_drafting: Most forwards before the candidates.
        num_overlapped: Most forwards beside the verification.
        width: Most rows of the second forward.
    """
    if num_overlapped:
        return (0,)
    if fanout == 1:
        return tuple(range(num_drafting))
    return tuple([n for n in (0, 1, 1 + -(-fanout // width)) if n < num_drafting])


def _play_stretch(batch: PlayedBatch, stretch: int, category: str) -> list[Round]:
    """The rounds until the tokens of a stretch are emitted."""
    request = Entering(stretch, category, 1, 1 + STRETCH_TOKENS + _MARGIN)
    rounds: list[Round] = []
    num_emitted = 0
    for work, emitted in play_alone(batch, request):
        rounds.append((work, emitted))
        num_emitted += emitted
        if num_emitted >= STRETCH_TOKENS:
            break
    return rounds


def _table(rounds: Sequence[Round], num_drafting: int, num_overlapped: int) -> Rounds:
    """A row for each round; see ``Tapes.rounds``."""
    table = np.zeros((len(rounds), FORWARDS + 3 * (num_drafting + num_overlapped)), np.int64)
    for row, (work, emitted) in zip(table, rounds, strict=True):
        row[:FORWARDS] = work.rows, emitted, work.kept_trees, work.kept_nodes
        for first, forwards in ((0, work.drafting), (num_drafting, work.overlapped)):
            for j, (num_rows, context) in enumerate(forwards, start=first):
                at = FORWARDS + 3 * j
                row[at : at + 3] = num_rows, 1, context - work.context
    return table


def play_alone(batch: PlayedBatch, request: Entering) -> Iterator[Round]:
    """The rounds of one request that is alone in its batch, as they are made."""
    entering = [request]
    while entering or batch.num_requests:
        work = batch.begin(entering, 0.0)
        emitted, _ = batch.end()
        entering = []
        yield work, emitted
