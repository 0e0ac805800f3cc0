"""A draft model on a rank group, as ``ModelDrafter`` is one on a CPU.

The draft's worker (draft_worker.py) and the policy do not know the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np

from codesign.engine.blocks import block_ids
from codesign.engine.drafter import Choices, Grow
from codesign.engine.gpu.paging import PageTable, Paging
from codesign.engine.gpu.prompt_rows import prompt_message
from codesign.engine.gpu.rank_group import GroupLeader, nothing, see_to_pages
from codesign.engine.gpu.request_rows import RequestRows, rows_to_expand, split_steps
from codesign.engine.gpu.run_ahead import RunAhead
from codesign.engine.gpu.step_rows import MAX_PATH, Move, Words, bucket_of, pack_step
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.policy.protocol import ExpansionRows, KVMove, PromptRows

_IN_ORDER = tuple(range(MAX_PATH))


class GroupDrafter:
    """A draft model on a rank group; see ``Drafter``.

    Moves of slab rows wait for the next forward and travel with it: a re-root costs no launch.
    Ranks run ahead by the forwards that are sure to follow one of a single request.

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
        self._ahead = RunAhead(leader, choices)
        self.meanwhile = nothing

    def forward(self, expansion: Sequence[ExpansionRows], fanout: int) -> list[Choices]:
        """See ``Drafter.forward``."""
        assert fanout <= self._choices, f"{fanout} choices wanted, ranks answer {self._choices}"
        answer = self._ahead.confirmed(expansion)
        if answer is not None:
            num_rows = len(expansion[0].tokens)
            return [self._row_choices(answer, bucket_of(num_rows), num_rows, fanout)]
        requests = [self._request_rows(rows) for rows in expansion]
        if rows_needed := self._ahead.rows_needed(expansion):
            self._slots.grow(expansion[0].request_id, rows_needed)
        see_to_pages(self._leader, self._slots, {})
        tokens: list[list[int]] = []
        log_probs: list[list[float]] = []
        for part in split_steps(requests):
            num_rows = sum([len(r.tokens) for r in part])
            bucket = bucket_of(num_rows)
            scratch = self._leader.scratch_slot
            message = pack_step(part, bucket=bucket, scratch_slot=scratch, moves=self._take_moves())
            if rows_needed:
                answer = self._ahead.ask(message, expansion[0], part[0])
            else:
                answer = self._leader.ask(message, self.meanwhile)
            found = self._row_choices(answer, bucket, num_rows, fanout)
            tokens += found[0]
            log_probs += found[1]
        choices: list[Choices] = []
        end = 0
        for rows, request in zip(expansion, requests, strict=True):
            end += len(request.tokens)
            nodes = slice(end - len(rows.nodes), end)
            choices.append((tokens[nodes], log_probs[nodes]))
        return choices

    def _row_choices(self, answer: Words, bucket: int, num_rows: int, fanout: int) -> Choices:
        """Tokens and log probabilities of a step's rows."""
        words = answer[: 2 * bucket * self._choices].reshape(2, bucket, self._choices)
        words = words[:, :num_rows, :fanout]
        return words[0].tolist(), words[1].view(np.float32).tolist()

    def expect(self, steps: int, *, width: int, fanout: int, grow: Grow) -> None:
        """See ``AheadDrafter.expect``."""
        self._ahead.expect(steps, width=width, fanout=fanout, grow=grow)

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
        self._ahead.drop()
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
            see_to_pages(self._leader, self._slots, {request_id: len(tokens)})
            slot = self._slots[request_id]
            self._leader.ask(prompt_message(tokens[start:], slot, 0, start=start, is_last=False))
            self._done[request_id] = len(tokens)

    def move(self, moves: Sequence[KVMove]) -> None:
        """See ``Drafter.move``."""
        self._ahead.drop()
        for move in moves:
            request_id, base = move.request_id, move.base
            if request_id not in self._slots:
                continue
            pending = self._pending.get(request_id)
            if pending is not None:
                rows = [base + row for row in move.rows]
                self._pending[request_id] = pending.then(base, rows)
            elif move.rows != _IN_ORDER[: len(move.rows)]:  # others stay where they are
                self._pending[request_id] = PendingMove(base, [base + row for row in move.rows])

    def release(self, request_ids: Sequence[int]) -> None:
        """See ``Drafter.release``."""
        self._ahead.drop()
        for request_id in request_ids:
            self._slots.free(request_id, self._done.pop(request_id, None))
            self._blocks.pop(request_id, None)
            self._prompts.pop(request_id, None)
            self._pending.pop(request_id, None)

    def _take_moves(self) -> Sequence[Move]:
        if not self._pending:
            return ()
        moves = [
            Move(self._slots[request_id], source, target)
            for request_id, pending in self._pending.items()
            for source, target in pending.pairs()
        ]
        self._pending.clear()
        return moves


class PendingMove:
    """Rows of a slab from ``base`` on, in their new order, while the slab has the old one."""

    def __init__(self, base: int, rows: list[int]) -> None:
        self.base = base
        self.rows = rows

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
