"""Which requests run, whose prompt comes next, and who has to give its KV rows back.

The batch is ``policy.batching.Batcher``'s, as in the simulator (codesign/sim/replica.py), which
counts KV rows alike. What is here is what the engine knows besides: the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from codesign.config import Serving
from codesign.engine.blocks import block_ids
from codesign.engine.pieces import PieceSizes, PromptPiece
from codesign.policy.batching import Batcher, BatchLimits, QueuedRequest
from codesign.policy.kv_memory import PREFIX_BLOCK, PrefixCache
from codesign.policy.on_time import OnTime
from codesign.policy.protocol import Admission
from codesign.prompts import BoundRequest


@dataclass(slots=True, eq=False)
class _Entry:
    """A request, its blocks and how far it is.

    Attributes:
        request: As it came.
        blocks: Ids of its prompt's whole blocks; none without a prefix cache.
        emitted: What it has emitted so far.
        admission: As it joined; None while it waits.
        done: Rows that have been run, None before its first piece.
        decodes: Its prompt is complete.
    """

    request: BoundRequest
    blocks: tuple[int, ...]
    emitted: list[int] = field(default_factory=list)
    admission: Admission | None = None
    done: int | None = None
    decodes: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.emitted)

    @property
    def num_left(self) -> int:
        return self.request.max_new_tokens - len(self.emitted)


class Schedule:
    """The queue, the batch and the prompts of one run.

    Args:
        requests: To serve.
        limits: Of the batch.
        serving: How memory and steps are shared.
        round_rows: Most KV rows of a request in a round.
        on_time: Who joins next; None for first come, first served.
        emitted_rows: Rows of a forward that computes emitted tokens again.
        max_waiting: Requests that may wait; those that come later are refused. None for any.
        is_fed: Requests wait only after ``arrive`` has been called for them.
    """

    def __init__(
        self,
        requests: Sequence[BoundRequest],
        limits: BatchLimits,
        serving: Serving,
        *,
        round_rows: int,
        on_time: OnTime | None = None,
        emitted_rows: int = 8,
        max_waiting: int | None = None,
        is_fed: bool = False,
    ) -> None:
        self.chunk = serving.prefill_chunk
        self._sizes = PieceSizes.of(serving, emitted=emitted_rows)
        self._round_rows = round_rows
        self._takes_rows = serving.preemption
        self._max_waiting = max_waiting
        keeps = serving.prefix_cache
        self._entries = {
            r.request_id: _Entry(r, block_ids(r.prompt_ids) if keeps else ()) for r in requests
        }
        self._prompts: deque[_Entry] = deque()
        queue = () if is_fed else map(self._queued, self._entries.values())
        self.batcher = Batcher(queue, limits, PrefixCache() if keeps else None, on_time)

    def arrive(self, request_id: int) -> None:
        """A request has come, after all that wait."""
        self.batcher.add(self._queued(self._entries[request_id]))

    @property
    def is_done(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return self.batcher.is_done

    def output(self, request_id: int) -> list[int]:
        """What a request has emitted so far, and will; empty for one that is not served."""
        entry = self._entries.get(request_id)
        return entry.emitted if entry is not None else []

    @property
    def kv_in_use(self) -> int:
        """KV rows of the running requests in the next round, prefix blocks not counted."""
        return sum(
            entry.num_tokens - entry.decodes + self._round_rows - PREFIX_BLOCK * len(entry.blocks)
            for entry in self._running
        )

    @property
    def _running(self) -> Iterator[_Entry]:
        return (self._entries[number] for number in self.batcher.running)

    def rows_of(self, request_ids: Collection[int]) -> tuple[int, int]:
        """How many of these requests are in the round that comes, and their KV rows before it.

        Whole prompts run before it, so that those who join are in it.
        """
        entries = [
            self._entries[number] for number in self.batcher.running if number in request_ids
        ]
        contexts = [
            entry.num_tokens - entry.decodes
            for entry in entries
            if entry.decodes or (self.chunk is None and entry.num_left > 1)
        ]
        return len(contexts), sum(contexts)

    def _queued(self, entry: _Entry) -> QueuedRequest:
        answer = 0 if self._takes_rows else entry.num_left
        kv_tokens = entry.num_tokens + answer + self._round_rows
        request = entry.request
        return QueuedRequest(
            request.request_id,
            request.arrival,
            kv_tokens,
            entry.blocks,
            entry.num_tokens,
            request.slo_tpot,
        )

    def admit(self, now: float) -> list[int]:
        """Requests that join the batch at ``now``; their prompts queue up."""
        kv_in_use = self.kv_in_use if self._takes_rows else None
        admitted = self.batcher.admit(now, kv_in_use=kv_in_use)
        self._prompts += [self._entries[number] for number in admitted]
        return admitted

    def refuse(self, now: float) -> list[int]:
        """Requests that have come at ``now`` and found the queue full; they are gone."""
        return [] if self._max_waiting is None else self.batcher.refuse(now, self._max_waiting)

    def goes_on(self, now: float) -> bool:
        """Whether the next round will have the requests of the one that runs, as seen at ``now``.

        That is so of those that do not end with it, if there are any, nobody joins or is refused,
        and nobody must go.
        """
        batcher, stay = self.batcher, [entry.num_left > 1 for entry in self._running]
        arrival = batcher.next_arrival
        someone_waits = arrival is not None and arrival <= now
        if not any(stay) or (someone_waits and not all(stay)):
            return False
        if self._max_waiting is not None and batcher.late(now, self._max_waiting):
            return False
        if not self._takes_rows:
            return not batcher.admits(now)
        kv_in_use = self.kv_in_use + batcher.num_running  # with the tokens of this round
        return not (batcher.would_be_over(kv_in_use) or batcher.admits(now, kv_in_use=kv_in_use))

    def make_room(self) -> list[int]:
        """Requests that lose their KV rows, so that the others' next round fits; the youngest."""
        evicted = []
        # Also for one request alone, before which idle prefix blocks go.
        while self._takes_rows and self.batcher.is_over(self.kv_in_use):
            if self.batcher.num_running <= 1:
                break
            evicted.append(self.batcher.youngest)
            self._put_back(self._entries[self.batcher.youngest])
        return evicted

    def _put_back(self, entry: _Entry) -> None:
        done = None if entry.decodes else entry.done or 0
        if not entry.decodes:
            self._prompts.remove(entry)
        entry.admission, entry.done, entry.decodes = None, None, False
        self.batcher.put_back(self._queued(entry), computed_tokens=done)

    def admission(self, request_id: int) -> Admission:
        """A request as it joins now: with what it has emitted behind its prompt."""
        entry = self._entries[request_id]
        if entry.admission is None:
            request = entry.request
            tokens = (*request.prompt_ids, *entry.emitted)
            entry.admission = Admission(
                request_id, tokens, entry.num_left, request.slo_tpot, request.options
            )
        return entry.admission

    def pieces(self, open_prompt: Callable[[Admission, Sequence[int]], int]) -> list[PromptPiece]:
        """Pieces of prompts for this step, in order: all there are, or up to the chunk.

        Args:
            open_prompt: Called with a request and its prompt's blocks before its first piece; rows
                that are there already.
        """
        pieces: list[PromptPiece] = []
        room = self.chunk
        while self._prompts:
            entry = self._prompts[0]
            admission = self.admission(entry.request.request_id)
            if entry.done is None:
                num_cached = open_prompt(admission, entry.blocks)
                entry.done = self._sizes.start(num_cached, entry.num_tokens)
            for piece in self._pieces_of(entry, admission):
                if room is not None:
                    room -= piece.count
                    if room < 0:
                        return pieces
                pieces.append(piece)
                entry.done = piece.end
            self._prompts.popleft()
        return pieces

    def _pieces_of(self, entry: _Entry, admission: Admission) -> Iterator[PromptPiece]:
        prompt_tokens, start = len(entry.request.prompt_ids), entry.done or 0
        while start < entry.num_tokens:
            end = self._sizes.end(start, prompt_tokens, entry.num_tokens)
            yield PromptPiece(admission, start, end - start, is_emitted=start >= prompt_tokens)
            start = end

    def emit(
        self, request_id: int, tokens: Sequence[int], *, now: float, is_finished: bool
    ) -> None:
        """A request has emitted tokens, at ``now``; it decodes from then on, or is over."""
        entry = self._entries[request_id]
        entry.emitted += tokens
        if not entry.decodes:
            entry.decodes = True
            self.batcher.began(request_id, now)
        if is_finished:
            self.batcher.finish(request_id)
