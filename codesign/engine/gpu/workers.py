"""Target and drafter on a rank group, behind the signatures of the CPU engine's.

``GroupTarget`` is a ``TargetWorker`` and ``GroupDrafter`` a ``Drafter`` for the rest of the engine:
the loop (serve.py), the draft's worker (draft_worker.py) and the policy do not know the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from codesign.engine.blocks import block_ids
from codesign.engine.drafter import Choices
from codesign.engine.gpu.model_rank import pages_message, sampling_message
from codesign.engine.gpu.paging import PageTable, Paging
from codesign.engine.gpu.prompt_rows import prompt_message
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.step_rows import (
    BUCKETS,
    Move,
    RequestRows,
    bucket_of,
    pack_step,
    rows_to_expand,
    rows_to_verify,
)
from codesign.engine.schedule import PromptPiece
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.policy.protocol import (
    Admission,
    Candidates,
    ExpansionRows,
    KVMove,
    PromptRows,
    RequestVerdict,
    TargetSide,
    VerifyRows,
)
from codesign.policy.stop_text import Push
from codesign.policy.walk import Sampling, request_key


class GroupTarget:
    """Drives ``TargetSide`` with the target model on a rank group.

    Args:
        leader: Of the target's group.
        num_slots: Requests that fit at once.
        sampling: Its seed keys the noise; the ranks sample with the same.
        stop_tokens: Tokens that end a request.
        new_text: Makes what turns tokens into text, for requests with stop strings.
        smallest_bucket: Fewest rows of a forward, padding included. Plain decoding and speculation
            round alike when both run at the same number of rows.
        paging: Pages of the ranks' slabs; None for whole slabs.
        samples_by_row: The ranks have ``RowTargetHead``.
    """

    def __init__(
        self,
        leader: GroupLeader,
        *,
        num_slots: int,
        sampling: Sampling,
        stop_tokens: frozenset[int] = frozenset(),
        new_text: Callable[[], Push] | None = None,
        smallest_bucket: int = BUCKETS[0],
        paging: Paging | None = None,
        samples_by_row: bool = False,
    ) -> None:
        self.side = TargetSide(new_text)
        self._leader = leader
        self._slots = PageTable(num_slots, paging)
        self._keys: dict[int, int] = {}
        self._done: dict[int, int] = {}  # rows of prompts that have been run
        self._sampling = sampling
        self._samples_by_row = samples_by_row
        self._stop_tokens = stop_tokens
        self._smallest_bucket = smallest_bucket

    def open_prompt(self, admission: Admission, blocks: Sequence[int]) -> int:
        """See ``serve.Target.open_prompt``."""
        request_id = admission.request_id
        num_cached = self._slots.take(request_id, blocks)
        sampling = admission.options.sampling or self._sampling
        self._keys[request_id] = request_key(sampling.seed, request_id)
        self._done[request_id] = num_cached
        if self._samples_by_row:
            self._leader.ask(sampling_message(self._slots[request_id], sampling))
        return num_cached

    def run_pieces(self, pieces: Sequence[PromptPiece]) -> list[RequestVerdict]:
        """Run each piece by itself, and commit the token after each prompt that is complete."""
        verdicts = []
        for piece in pieces:
            token = self._run_emitted(piece) if piece.is_emitted else self._run_piece(piece)
            self._done[piece.request_id] = piece.end
            if piece.is_last:
                self.side.admit(piece.admission, self._stop_tokens)
                verdicts.append(self.side.commit_first(piece.request_id, token))
        self._release_finished(verdicts)
        return verdicts

    def _run_piece(self, piece: PromptPiece) -> int:
        """The token after a piece of a prompt; 0 if more of it follows."""
        request_id = piece.request_id
        self._see_to_pages({request_id: piece.end})
        message = prompt_message(
            piece.tokens,
            self._slots[request_id],
            self._keys[request_id],
            start=piece.start,
            first_written=self._slots.shared_rows(request_id),
            is_last=piece.is_last,
        )
        answer = self._leader.ask(message)
        return int(answer[0]) if piece.is_last else 0

    def _run_emitted(self, piece: PromptPiece) -> int:
        """The token after tokens that were emitted before: run as a chain, as they were decoded."""
        rows = VerifyRows(
            piece.request_id,
            piece.tokens,
            tuple(range(-1, piece.count - 1)),
            tuple(range(piece.start, piece.end)),
            piece.start,
        )
        return self._sampled([rows])[-1]

    def evict(self, request_id: int) -> None:
        """See ``serve.Target.evict``."""
        if request_id in self.side.request_ids:
            self.side.evict(request_id)
        self._free(request_id)

    def verify(
        self, candidates: Candidates | None
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """Run every request's tree (or last token), and commit what the walk yields.

        The ranks walk, too, to move their accepted rows: both walks see the same samples.
        """
        rows = self.side.verify_rows(candidates)
        sampled = self._sampled(rows)
        verdicts = []
        first = 0
        for request in rows:
            tokens = sampled[first : first + len(request.tokens)]
            verdicts.append(self.side.judge(request, tokens.__getitem__)[0])
            first += len(request.tokens)
        self._release_finished(verdicts)
        return rows, verdicts

    def _sampled(self, rows: Sequence[VerifyRows]) -> list[int]:
        """The token that the target emits after each row, request after request."""
        self._see_to_pages({r.request_id: r.context + len(r.tokens) for r in rows})
        requests = [
            rows_to_verify(r, self._slots[r.request_id], self._keys[r.request_id]) for r in rows
        ]
        sampled: list[int] = []
        for part in _split(requests):
            num_rows = sum(len(r.tokens) for r in part)
            bucket = bucket_of(num_rows, self._smallest_bucket)
            message = pack_step(part, bucket=bucket, scratch_slot=self._leader.scratch_slot)
            sampled += self._leader.ask(message)[:num_rows].tolist()
        return sampled

    def _see_to_pages(self, num_rows: Mapping[int, int]) -> None:
        _see_to_pages(self._leader, self._slots, num_rows)

    def _release_finished(self, verdicts: Sequence[RequestVerdict]) -> None:
        for verdict in verdicts:
            if verdict.is_finished:
                self._free(verdict.request_id)

    def _free(self, request_id: int) -> None:
        self._slots.free(request_id, self._done.pop(request_id, None))
        self._keys.pop(request_id, None)


class GroupDrafter:
    """A draft model on a rank group; see ``Drafter``.

    Moves of slab rows wait for the next forward and travel with it: a re-root costs no launch.

    Args:
        leader: Of the draft's group.
        num_slots: Requests that fit at once.
        choices: Tokens per row in an answer.
        paging: Pages of the ranks' slabs; None for whole slabs.
        keeps_prefixes: Prompt blocks stay for later requests.
    """

    def __init__(
        self,
        leader: GroupLeader,
        *,
        num_slots: int,
        choices: int,
        paging: Paging | None = None,
        keeps_prefixes: bool = False,
    ) -> None:
        self._leader = leader
        self._slots = PageTable(num_slots, paging)
        self._choices = choices
        self._keeps = keeps_prefixes
        self._prompts: dict[int, tuple[int, ...]] = {}  # that run in parts
        self._done: dict[int, int] = {}  # rows of prompts that have been run
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._pending: dict[int, PendingMove] = {}

    def forward(self, expansion: Sequence[ExpansionRows], fanout: int) -> list[Choices]:
        """See ``Drafter.forward``."""
        assert fanout <= self._choices, f"{fanout} choices wanted, ranks answer {self._choices}"
        requests = [self._request_rows(rows) for rows in expansion]
        _see_to_pages(self._leader, self._slots, {})
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
        """A request's rows; what is missing of a new request's prompt is run first."""
        request_id = rows.request_id
        if request_id not in self._slots:
            self._open(request_id, rows.tokens)
        skip = 0
        if request_id in self._done:  # its first expansion: its prompt comes with it
            skip = len(rows.tokens) - len(rows.nodes)
            self._run_prompt(request_id, rows.tokens[:skip])
            del self._done[request_id]
        self._slots.grow(request_id, rows.context + len(rows.tokens))
        return rows_to_expand(rows, self._slots[request_id], skip=skip)

    def run_prompts(self, prompts: Sequence[PromptRows]) -> None:
        """See ``Drafter.run_prompts``."""
        for part in prompts:
            if part.tokens:
                self._prompts[part.request_id] = part.tokens
                self._open(part.request_id, part.tokens)
            self._run_prompt(part.request_id, self._prompts[part.request_id][: part.end])

    def _open(self, request_id: int, prompt: tuple[int, ...]) -> None:
        """Give a request a slot, with the blocks of its prompt that are there."""
        # Not the block of the last token, whose row is written with the first expansion.
        blocks = block_ids(prompt[:-1]) if self._keeps else ()
        # Nor any that another request has taken and not run yet: it may come after this one.
        ahead = {
            b for n, done in self._done.items() for b in self._blocks[n][done // PREFIX_BLOCK :]
        }
        blocks = tuple(takewhile(lambda block: block not in ahead, blocks))
        self._blocks[request_id] = blocks
        self._done[request_id] = self._slots.take(request_id, blocks)

    def _run_prompt(self, request_id: int, tokens: tuple[int, ...]) -> None:
        """Run those of a prompt's leading tokens that have not been run."""
        start = self._done[request_id]
        if start < len(tokens):
            _see_to_pages(self._leader, self._slots, {request_id: len(tokens)})
            slot = self._slots[request_id]
            self._leader.ask(prompt_message(tokens[start:], slot, 0, start=start, is_last=False))
            self._done[request_id] = len(tokens)

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
            self._slots.free(request_id, self._done.pop(request_id, None))
            self._blocks.pop(request_id, None)
            self._prompts.pop(request_id, None)
            self._pending.pop(request_id, None)

    def _take_moves(self) -> list[Move]:
        moves = [
            Move(self._slots[request_id], source, target)
            for request_id, pending in self._pending.items()
            for source, target in pending.pairs()
        ]
        self._pending.clear()
        return moves


def _see_to_pages(leader: GroupLeader, slots: PageTable, num_rows: Mapping[int, int]) -> None:
    """Tell the ranks of the pages that requests need for so many rows."""
    for request_id, rows in num_rows.items():
        slots.grow(request_id, rows)
    entries = slots.take_entries()
    if entries:
        leader.ask(pages_message(entries))


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
    for request in (piece for whole in requests for piece in _pieces(whole)):
        if len(request.tokens) > room:
            yield part
            part, room = [], BUCKETS[-1]
        part.append(request)
        room -= len(request.tokens)
    if part:
        yield part


def _pieces(request: RequestRows) -> Iterator[RequestRows]:
    """A request's rows, none more than a forward has: one that was not drafted for has many."""
    for start in range(0, len(request.tokens), BUCKETS[-1]):
        rows = slice(start, start + BUCKETS[-1])
        yield replace(
            request,
            tokens=request.tokens[rows],
            positions=request.positions[rows],
            context=request.context + start,
            prefixes=request.prefixes[rows],
            paths=request.paths[rows],
            parents=request.parents[rows],
        )
