"""A batch that plays tapes back: per round a handful of sums, whatever its size.

Each request's rounds are known when it joins. They are added into a ledger that has a row per
round of the batch, so that a round is one look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codesign.sim.stretches import Luck
from codesign.sim.tapes import FORWARDS, Tapes
from codesign.sim.work import Entering, Tally, Work

# Columns of the ledger.
_ROWS, _EMITTED, _TREES, _NODES, _CONTEXT, _KV, _FORWARDS = 0, 1, 2, 3, 4, 5, 6
_LEDGER_ROUNDS = 4096  # at first
_FEWEST_AHEAD = 2  # rounds that are worth looking at together


@dataclass(frozen=True, slots=True, eq=False)
class LedgerRows:
    """Rounds between which nobody comes or goes; letters: N rounds, J draft forwards.

    Attributes:
        table: (N, 6 + 2 J) sums as in the ledger.
        batch: Requests in each round.
    """

    table: NDArray[np.int64]
    batch: int

    @property
    def rows(self) -> NDArray[np.int64]:
        """(N,) rows that the target verifies."""
        return self.table[:, _ROWS]

    @property
    def context(self) -> NDArray[np.int64]:
        """(N,) KV rows before each round."""
        return self.table[:, _CONTEXT]

    @property
    def emitted(self) -> NDArray[np.int64]:
        """(N,) tokens."""
        return self.table[:, _EMITTED]

    @property
    def kv_tokens(self) -> NDArray[np.int64]:
        """(N,) KV rows that each round needs, prefix cache not counted."""
        return self.table[:, _KV]

    @property
    def kept_trees(self) -> NDArray[np.int64]:
        """(N,) trees of which the re-root kept more than the root."""
        return self.table[:, _TREES]

    @property
    def kept_nodes(self) -> NDArray[np.int64]:
        """(N,) nodes that it kept, roots left out."""
        return self.table[:, _NODES]

    @property
    def forward_rows(self) -> NDArray[np.int64]:
        """(N, J) rows of each draft forward."""
        return self.table[:, _FORWARDS::2]

    @property
    def forward_context(self) -> NDArray[np.int64]:
        """(N, J) KV rows before each draft forward."""
        return self.table[:, _FORWARDS + 1 :: 2]


@dataclass(slots=True)
class _Playing:
    """A request in the batch: its part of the ledger, from round ``start`` on."""

    start: int
    rounds: NDArray[np.int64]


class TapedBatch:
    """See Batch.

    Args:
        tapes: What the policy does.
        luck: Which stretches each request plays.
        round_rows: Most KV rows of a request in a round.
        hears_early: As for PlayedBatch.
    """

    def __init__(
        self, tapes: Tapes, luck: Luck, *, round_rows: int, hears_early: bool = False
    ) -> None:
        self._tapes = tapes
        self._luck = luck
        self._round_rows = round_rows
        self._root_rows = 0 if hears_early else 1  # prompt rows of the draft beside the prompt
        num_forwards = tapes.num_drafting + tapes.num_overlapped
        self._num_drafting = tapes.num_drafting
        self._num_forwards = num_forwards
        self._ledger = _Ledger(_FORWARDS + 2 * num_forwards)
        self._round = 0
        self._requests: dict[int, _Playing] = {}
        self._ends: dict[int, list[int]] = {}
        self._tallies: dict[int, Tally] = {}
        self._emitted = 0
        self._known_row: list[int] | None = None

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def rests(self) -> bool:
        """Whether nothing is drafted."""
        return not self._num_forwards

    @property
    def reads_prompts(self) -> bool:
        """The draft runs all prompts."""
        return True

    @property
    def kv_tokens(self) -> int:
        return self._row()[_KV]

    def begin(self, entering: Sequence[Entering], now: float) -> Work:
        drafted = [request for request in entering if self._add(request)]
        row = self._row()
        self._emitted = row[_EMITTED]
        work = Work(len(self._requests), row[_ROWS], row[_CONTEXT])
        work.kept_trees, work.kept_nodes = row[_TREES], row[_NODES]
        if self.rests:
            work.rests = work.rests_on = True
            return work
        forwards = row[_FORWARDS:]
        for j in range(self._num_forwards):
            if forwards[2 * j] or (j == 0 and drafted):
                part = work.drafting if j < self._num_drafting else work.overlapped
                part.append((forwards[2 * j], forwards[2 * j + 1]))
        work.is_prompt_overlapped = not self._num_drafting
        for request in drafted:
            num_rows = request.prompt_tokens + self._root_rows - request.cached_tokens
            work.prompts.append((max(num_rows, 1), request.cached_tokens))
        return work

    def ahead(self, most: int) -> LedgerRows | None:
        """The next rounds, up to ``most`` and none in which a request finishes; None if too few."""
        if most < _FEWEST_AHEAD:
            return None
        count = min(min(self._ends, default=self._round) - self._round, most)
        if count < _FEWEST_AHEAD:
            return None
        return LedgerRows(self._ledger.rows(self._round, count), len(self._requests))

    def skip(self, count: int) -> None:
        """That many of the rounds of ``ahead`` are over."""
        self._round += count
        self._known_row = None

    def end(self) -> tuple[int, list[int]]:
        finished = self._ends.pop(self._round, [])
        self._round += 1
        self._known_row = None
        for request_id in finished:
            self._tallies[request_id] = self._tally(self._requests.pop(request_id))
        return self._emitted, finished

    def drop(self, request_id: int) -> int:
        playing = self._requests.pop(request_id)
        done = self._round - playing.start
        last = playing.start + len(playing.rounds) - 1
        self._ends[last].remove(request_id)
        self._ledger.add(self._round, -playing.rounds[done:])
        self._known_row = None
        playing.rounds = playing.rounds[:done]
        self._tallies[request_id] = self._tally(playing)
        return 1 + int(playing.rounds[:, _EMITTED].sum())

    def tally(self, request_id: int) -> Tally:
        return self._tallies.pop(request_id)

    def _row(self) -> list[int]:
        """Sums of the next round."""
        if self._known_row is None:
            self._known_row = self._ledger.row(self._round)
        return self._known_row

    def _tally(self, playing: _Playing) -> Tally:
        num_rounds = len(playing.rounds)
        rows, emitted = playing.rounds[:, :2].sum(axis=0).tolist()
        return Tally(num_rounds, rows - num_rounds, emitted - num_rounds)

    def _add(self, request: Entering) -> bool:
        """Put a request's rounds into the ledger; whether the draft runs its prompt."""
        tapes = self._tapes
        if request.speculates:
            stretches = self._luck.stretches(request.request_id, request.emitted_before)
            tape = tapes.play(stretches, request.output_tokens - 1)
        else:  # a row and a token a round
            tape = np.zeros((request.output_tokens - 1, tapes.rounds.shape[1]), np.int64)
            tape[:, :2] = 1
        rounds = np.empty((len(tape), _FORWARDS + 2 * self._num_forwards), np.int64)
        emitted = tape[:, 1]
        rounds[:, :FORWARDS] = tape[:, :FORWARDS]
        context = rounds[:, _CONTEXT]
        np.cumsum(emitted, out=context)
        context += request.prompt_tokens - emitted
        rounds[:, _KV] = context + (self._round_rows - request.shared_tokens)
        if self._num_forwards:
            rows, takes_part, more = (tape[:, FORWARDS + i :: 3] for i in range(3))
            rounds[:, _FORWARDS::2] = rows
            rounds[:, _FORWARDS + 1 :: 2] = takes_part * context[:, None] + more
        # The first forward, before the candidates or (PEARL, PipeInfer) beside the verification.
        is_drafted = self._num_forwards > 0 and tape[0, FORWARDS + 1] > 0
        if is_drafted:
            rounds[0, _FORWARDS : _FORWARDS + 2] = 0  # it runs with the prompt, priced apart
        self._ledger.add(self._round, rounds)
        self._known_row = None
        self._ends.setdefault(self._round + len(rounds) - 1, []).append(request.request_id)
        self._requests[request.request_id] = _Playing(self._round, rounds)
        return is_drafted


class _Ledger:
    """Sums by round; rounds before the last one read may be forgotten."""

    def __init__(self, width: int) -> None:
        self._sums = np.zeros((_LEDGER_ROUNDS, width), np.int64)
        self._first = 0  # round of the first row

    def add(self, start: int, rounds: NDArray[np.int64]) -> None:
        """Add rounds that begin with round ``start``."""
        end = start - self._first + len(rounds)
        if end > len(self._sums):
            self._make_room(start, len(rounds))
            end = start - self._first + len(rounds)
        self._sums[end - len(rounds) : end] += rounds

    def row(self, number: int) -> list[int]:
        """Sums of one round."""
        at = number - self._first
        return self._sums[at].tolist() if at < len(self._sums) else [0] * self._sums.shape[1]

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """(N, width) sums of rounds, ``count`` or as many as are known."""
        at = first - self._first
        return self._sums[at : at + count]

    def _make_room(self, start: int, count: int) -> None:
        kept = self._sums[start - self._first :]
        size = max(len(self._sums), 2 * (len(kept) + count))
        sums = np.zeros((size, self._sums.shape[1]), np.int64)
        sums[: len(kept)] = kept
        self._sums, self._first = sums, start
