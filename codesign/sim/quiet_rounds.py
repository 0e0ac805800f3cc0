"""Rounds between which nobody comes or goes, run together: no event, no queue, no memory lost.

They follow from the ledger of a TapedBatch alone. Many are arithmetic on arrays, a few one short
loop; both give to the last digit what one round after another gives.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from codesign.records import RoundLog, RoundRecord
from codesign.sim.tape_batch import LedgerRows, TapedBatch
from codesign.sim.timing import Floats, TogetherTiming

_COLUMNS = {field.name: number for number, field in enumerate(fields(RoundRecord))}
_MOST = 1024  # rounds at once
_FEWEST_ARRAYS = 16  # rounds from which arrays are faster than the loop


class RunAhead:
    """Runs rounds of one replica.

    Args:
        batch: Its requests.
        timing: What a round costs.
        rounds: Where rounds are written.
        replica: Its number.
    """

    def __init__(
        self, batch: TapedBatch, timing: TogetherTiming, rounds: RoundLog, replica: int
    ) -> None:
        self._batch = batch
        self._timing = timing
        self._rounds = rounds
        self._replica = replica
        self._last_seconds = 0.01  # of a round, about: only how far it is worth looking

    def run(self, number: int, now: float, until: float, room: int | None) -> tuple[int, float]:
        """Run rounds that end before ``until`` and in which no request finishes.

        Args:
            number: Of the next round.
            now: When it starts.
            until: When something from outside happens.
            room: KV rows that the batch may need; None if it may need any.

        Returns:
            How many rounds were run, 0 if none can be; and when the next one starts.
        """
        most = min((until - now) / self._last_seconds + 1.0, _MOST)
        ahead = self._batch.ahead(int(most))
        if ahead is None:
            return 0, now
        run = self._run_many if len(ahead.table) >= _FEWEST_ARRAYS else self._run_few
        count, end = run(ahead, number, now, until, room)
        if count:
            self._batch.skip(count)
            self._last_seconds = max((end - now) / count, 1e-9)
        return count, end

    def _run_few(
        self, ahead: LedgerRows, number: int, now: float, until: float, room: int | None
    ) -> tuple[int, float]:
        write, of_sums, batch = self._rounds.append_values, self._timing.of_sums, ahead.batch
        count = 0
        for rows, emitted, trees, nodes, context, kv_tokens, *forwards in ahead.table.tolist():
            if room is not None and kv_tokens > room:
                break
            target, draft, reroot = of_sums(rows, context, forwards, batch, (trees, nodes))
            end = now + (target + reroot + draft)
            if end >= until:
                break
            taken = [f for f in forwards[::2] if f]
            self._rounds.most_draft_rows = max(self._rounds.most_draft_rows, *taken, 0)
            drafted, accepted = rows - batch, emitted - batch
            write((number + count, now, batch, rows, context, len(taken), sum(taken), drafted,
                   accepted, emitted, 0.0, 0, target, 0.0, 0.0, reroot, draft,
                   self._replica, batch))  # fmt: skip
            count += 1
            now = end
        return count, now

    def _run_many(
        self, ahead: LedgerRows, number: int, now: float, until: float, room: int | None
    ) -> tuple[int, float]:
        target, draft, reroot = self._timing.spans_ahead(ahead)
        starts = np.cumsum(np.concatenate(([now], target + reroot + draft)))
        count = int(np.searchsorted(starts[1:], until))
        if room is not None:
            count = min(count, int(np.searchsorted(ahead.kv_tokens, room, side="right")))
        if count:
            self._write(ahead, number, starts[:count], target, draft, reroot)
        return count, float(starts[count])

    def _write(
        self,
        ahead: LedgerRows,
        number: int,
        starts: Floats,
        target: Floats,
        draft: Floats,
        reroot: Floats,
    ) -> None:
        count = len(starts)
        rows, emitted = ahead.rows[:count], ahead.emitted[:count]
        forwards = ahead.forward_rows[:count]
        most = int(forwards.max(initial=0))
        self._rounds.most_draft_rows = max(self._rounds.most_draft_rows, most)
        table = np.zeros((count, len(_COLUMNS)))
        columns = {
            "round": np.arange(number, number + count),
            "start": starts,
            "batch": ahead.batch,
            "rows": rows,
            "context": ahead.context[:count],
            "num_expansions": np.count_nonzero(forwards, axis=1),
            "draft_rows": forwards.sum(axis=1),
            "num_draft_tokens": rows - ahead.batch,
            "num_accepted_tokens": emitted - ahead.batch,
            "num_emitted_tokens": emitted,
            "target": target[:count],
            "reroot": reroot[:count],
            "draft": draft[:count],
            "replica": self._replica,
            "running": ahead.batch,
        }
        for name, values in columns.items():
            table[:, _COLUMNS[name]] = values
        self._rounds.append_rows(table)
