"""Target and drafter on a rank group, behind the signatures of the CPU engine's.

``GroupTarget`` is a ``TargetWorker`` and ``GroupDrafter`` a ``Drafter`` for the rest of the engine:
the loop (serve.py), the draft's worker (draft_worker.py) and the policy do not know the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from codesign.engine.drafter import Choices
from codesign.engine.gpu.model_rank import prompt_message
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.slabs import SlotTable
from codesign.engine.gpu.step_rows import (
    BUCKETS,
    Move,
    RequestRows,
    bucket_of,
    pack_step,
    rows_to_expand,
    rows_to_verify,
)
from codesign.policy.protocol import (
    Admission,
    Candidates,
    ExpansionRows,
    KVMove,
    RequestVerdict,
    TargetSide,
    VerifyRows,
)
from codesign.policy.walk import Sampling, request_key


class GroupTarget:
    """Drives ``TargetSide`` with the target model on a rank group.

    Args:
        leader: Of the target's group.
        num_slots: Requests that fit at once.
        sampling: Its seed keys the noise; the ranks sample with the same.
        stop_tokens: Tokens that end a request.
        smallest_bucket: Fewest rows of a forward, padding included. Plain decoding and speculation
            round alike when both run at the same number of rows.
    """

    def __init__(
        self,
        leader: GroupLeader,
        *,
        num_slots: int,
        sampling: Sampling,
        stop_tokens: frozenset[int] = frozenset(),
        smallest_bucket: int = BUCKETS[0],
    ) -> None:
        self.side = TargetSide()
        self._leader = leader
        self._slots = SlotTable(num_slots)
        self._keys: dict[int, int] = {}
        self._seed = sampling.seed
        self._stop_tokens = stop_tokens
        self._smallest_bucket = smallest_bucket

    def prefill(self, admissions: Sequence[Admission]) -> list[RequestVerdict]:
        """Run each prompt by itself, whoever is admitted with it, and commit the token after it."""
        verdicts = []
        for admission in admissions:
            request_id = admission.request_id
            self.side.admit(admission, self._stop_tokens)
            slot = self._slots.take(request_id)
            key = self._keys[request_id] = request_key(self._seed, request_id)
            answer = self._leader.ask(prompt_message(admission.tokens, slot, key))
            verdicts.append(self.side.commit_first(request_id, int(answer[0])))
        self._release_finished(verdicts)
        return verdicts

    def verify(
        self, candidates: Candidates | None
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """Run every request's tree (or last token), and commit what the walk yields.

        The ranks walk, too, to move their accepted rows: both walks see the same samples.
        """
        rows = self.side.verify_rows(candidates)
        requests = [
            rows_to_verify(r, self._slots[r.request_id], self._keys[r.request_id]) for r in rows
        ]
        sampled: list[int] = []
        for part in _split(requests):
            num_rows = sum(len(r.tokens) for r in part)
            bucket = bucket_of(num_rows, self._smallest_bucket)
            message = pack_step(part, bucket=bucket, scratch_slot=self._leader.scratch_slot)
            sampled += self._leader.ask(message)[:num_rows].tolist()
        verdicts = []
        first = 0
        for request in rows:
            tokens = sampled[first : first + len(request.tokens)]
            verdicts.append(self.side.judge(request, tokens.__getitem__)[0])
            first += len(request.tokens)
        self._release_finished(verdicts)
        return rows, verdicts

    def _release_finished(self, verdicts: Sequence[RequestVerdict]) -> None:
        for verdict in verdicts:
            if verdict.is_finished:
                self._slots.free(verdict.request_id)
                del self._keys[verdict.request_id]


class GroupDrafter:
    """A draft model on a rank group; see ``Drafter``.

    Moves of slab rows wait for the next forward and travel with it: a re-root costs no launch.

    Args:
        leader: Of the draft's group.
        num_slots: Requests that fit at once.
        choices: Tokens per row in an answer.
    """

    def __init__(self, leader: GroupLeader, *, num_slots: int, choices: int) -> None:
        self._leader = leader
        self._slots = SlotTable(num_slots)
        self._choices = choices
        self._pending: dict[int, PendingMove] = {}

    def forward(self, expansion: Sequence[ExpansionRows], fanout: int) -> list[Choices]:
        """See ``Drafter.forward``."""
        assert fanout <= self._choices, f"{fanout} choices wanted, ranks answer {self._choices}"
        requests = [self._request_rows(rows) for rows in expansion]
        tokens: list[list[int]] = []
        log_probs: list[list[float]] = []
        for part in _split(requests):
            num_rows = sum(len(r.tokens) for r in part)
            bucket = bucket_of(num_rows)
            message = pack_step(
                part,
                bucket=bucket,
                scratch_slot=self._leader.scratch_slot,
                moves=self._take_moves(),
            )
            answer = self._leader.ask(message).reshape(2, bucket, self._choices)[:, :num_rows]
            tokens += answer[0, :, :fanout].tolist()
            log_probs += answer[1, :, :fanout].view(np.float32).tolist()
        choices: list[Choices] = []
        end = 0
        for rows, request in zip(expansion, requests, strict=True):
            end += len(request.tokens)
            nodes = slice(end - len(rows.nodes), end)
            choices.append((tokens[nodes], log_probs[nodes]))
        return choices

    def _request_rows(self, rows: ExpansionRows) -> RequestRows:
        """A request's rows; a new request's prompt is run first, but for its last token."""
        request_id = rows.request_id
        if request_id in self._slots:
            return rows_to_expand(rows, self._slots[request_id])
        slot = self._slots.take(request_id)
        skip = len(rows.tokens) - len(rows.nodes)
        if skip:
            self._leader.ask(prompt_message(rows.tokens[:skip], slot, 0))
        return rows_to_expand(rows, slot, skip=skip)

    def move(self, moves: Sequence[KVMove]) -> None:
        """See ``Drafter.move``."""
        for move in moves:
            if move.request_id in self._slots:
                pending = self._pending.get(move.request_id)
                rows = [move.base + row for row in move.rows]
                self._pending[move.request_id] = (
                    PendingMove(move.base, rows)
                    if pending is None
                    else pending.then(move.base, rows)
                )

    def release(self, request_ids: Sequence[int]) -> None:
        """See ``Drafter.release``."""
        for request_id in request_ids:
            self._slots.free(request_id)
            self._pending.pop(request_id, None)

    def _take_moves(self) -> list[Move]:
        moves = [
            Move(self._slots[request_id], source, target)
            for request_id, pending in self._pending.items()
            for source, target in pending.pairs()
        ]
        self._pending.clear()
        return moves


class PendingMove:
    """Rows of a slab from ``base`` on, in their new order, while the slab has the old one."""

    def __init__(self, base: int, rows: Sequence[int]) -> None:
        self.base = base
        self.rows = list(rows)

    def then(self, base: int, rows: Sequence[int]) -> PendingMove:
        """This move and then another, whose rows are counted after this one."""
        kept = base - self.base
        assert kept >= 0, "the prefix never shrinks"
        found = [row if row < self.base else self.rows[row - self.base] for row in rows]
        return PendingMove(self.base, self.rows[:kept] + found)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(source, target) of the rows that change place, sources ascending."""
        for target, source in enumerate(self.rows, start=self.base):
            if source != target:
                yield source, target


def _split(requests: Iterable[RequestRows]) -> Iterator[list[RequestRows]]:
    """Requests in as few forwards as the largest bucket allows, in order."""
    part: list[RequestRows] = []
    room = BUCKETS[-1]
    for request in requests:
        if len(request.tokens) > room:
            yield part
            part, room = [], BUCKETS[-1]
        part.append(request)
        room -= len(request.tokens)
    if part:
        yield part
