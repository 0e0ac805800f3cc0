"""Which requests share a step, within batch and KV limits: first come, first served, or on time.

Must not import torch or read a clock; the caller passes the time in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import attrgetter

from codesign.policy.kv_memory import PREFIX_BLOCK, PrefixCache
from codesign.policy.on_time import OnTime


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of a batch.

    Attributes:
        max_batch: Most requests that run at once.
        max_kv_tokens: Most KV rows of all running requests and of the prefix cache.
    """

    max_batch: int
    max_kv_tokens: int


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request on its way to the batch.

    Attributes:
        request_id: Its number; breaks ties of arrival.
        arrival: Seconds since the start of the run.
        kv_tokens: KV rows that must be free for it to join: at its longest (prompt, output and one
            round's tree), or of its prompt and one round if rows are taken as requests grow.
        blocks: Hash ids of the whole blocks that its prompt begins with; none without a cache.
        prompt_tokens: Rows to run before it decodes, cached ones among them.
        slo_tpot: Its own target of seconds per token; None for the run's.
    """

    request_id: int
    arrival: float
    kv_tokens: int
    blocks: tuple[int, ...] = ()
    prompt_tokens: int = 0
    slo_tpot: float | None = None

    @property
    def shared_tokens(self) -> int:
        """KV rows that belong to the prefix cache, not to the request."""
        return PREFIX_BLOCK * len(self.blocks)


class Batcher:
    """A queue in order of arrival, and the requests that run.

    Args:
        requests: Known from the start, in any order; more may be added.
        limits: Bounds of the batch.
        cache: Prefix blocks, if they are kept.
        on_time: Who joins next; None for first come, first served.
    """

    def __init__(
        self,
        requests: Iterable[QueuedRequest],
        limits: BatchLimits,
        cache: PrefixCache | None = None,
        on_time: OnTime | None = None,
    ) -> None:
        self._waiting = deque(sorted(requests, key=lambda r: (r.arrival, r.request_id)))
        self._running: dict[int, QueuedRequest] = {}
        self._reserved = 0  # rows of the running requests beside the prefix cache's
        self._limits = limits
        self.cache = cache
        self.on_time = on_time
        self._cached: dict[int, int] = {}
        self._put_back: set[int] = set()  # requests that have run before

    @property
    def is_done(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting and not self._running

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers of the requests in the batch, in order of admission."""
        return tuple(self._running)

    @property
    def num_free(self) -> int:
        """Requests that may join before anyone leaves, as far as the batch's size goes."""
        return self._limits.max_batch - len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def next_arrival(self) -> float | None:
        """Arrival of the first request that waits, in seconds since the start of the run."""
        return self._waiting[0].arrival if self._waiting else None

    def add(self, request: QueuedRequest) -> None:
        """A request arrives, after all that wait."""
        self._waiting.append(request)

    def admit(self, now: float, *, kv_in_use: int | None = None) -> list[int]:
        """Requests that join the batch at time ``now``.

        A request alone in the batch is admitted whatever it needs: the caller has checked that it
        fits the machine at all.

        Args:
            now: Seconds since the start of the run.
            kv_in_use: KV rows of the running requests beside the prefix cache's, where these are
                taken as requests grow; None where each request's ``kv_tokens`` are reserved.
        """
        admitted: list[int] = []
        used = self._reserved if kv_in_use is None else kv_in_use
        for request in self._next_ones(now):
            if not self._joins(request, used):
                break
            self._take(request)
            used += request.kv_tokens - request.shared_tokens
            self._start(request)
            if self.on_time is not None:
                self.on_time.joined(request.request_id)
            self.is_over(used)  # idle prefix blocks make room
            admitted.append(request.request_id)
        return admitted

    def admits(self, now: float, *, kv_in_use: int | None = None) -> bool:
        """Whether a request would join the batch at time ``now``; see ``admit``."""
        head = next(self._next_ones(now), None)
        used = self._reserved if kv_in_use is None else kv_in_use
        return head is not None and self._joins(head, used)

    def _next_ones(self, now: float) -> Iterator[QueuedRequest]:
        """Who joins in turn, as far as there is room; each leaves the queue before the next."""
        if self.on_time is None:
            while self._waiting and self._waiting[0].arrival <= now:
                yield self._waiting[0]
        elif self._waiting and self.num_free > 0:
            waiting = list(self._waiting)
            back = list(takewhile(lambda r: r.request_id in self._put_back, waiting))
            end = bisect_right(waiting, now, len(back), key=attrgetter("arrival"))
            yield from self.on_time.choose(waiting[len(back) : end], now, self._found, back)

    def _take(self, request: QueuedRequest) -> None:
        """It leaves the queue."""
        del self._waiting[next(i for i, r in enumerate(self._waiting) if r is request)]

    def _joins(self, request: QueuedRequest, used: int) -> bool:
        if self.num_free <= 0:
            return False
        own = request.kv_tokens - request.shared_tokens
        return not self._running or self._fits(request, used + own)

    def refuse(self, now: float, max_waiting: int) -> list[int]:
        """Requests that have come and find ``max_waiting`` others waiting; they leave the queue.

        Those that ran before and lost their KV rows stay: they stand in front.
        """
        late = self.late(now, max_waiting)
        for request in late:
            self._waiting.remove(request)
            if self.on_time is not None:
                self.on_time.refused(request.request_id)
        return [request.request_id for request in late]

    def late(self, now: float, max_waiting: int) -> list[QueuedRequest]:
        """Requests that ``refuse`` would refuse."""
        arrived = takewhile(lambda request: request.arrival <= now, self._waiting)
        late = islice(arrived, max_waiting, None)
        return [request for request in late if request.request_id not in self._put_back]

    def num_arrived(self, now: float) -> int:
        """Requests in the queue that have come."""
        count = 0
        for request in self._waiting:
            if request.arrival > now:
                break
            count += 1
        return count

    def _fits(self, request: QueuedRequest, used: int) -> bool:
        if self.cache is not None:
            used += self.cache.held_tokens + self.cache.to_hold(request.blocks)
        return used <= self._limits.max_kv_tokens

    def _start(self, request: QueuedRequest) -> None:
        self._running[request.request_id] = request
        self._reserved += request.kv_tokens - request.shared_tokens
        if self.cache is not None:
            self._cached[request.request_id] = self._found(request)
            self.cache.hold(request.blocks)

    def _found(self, request: QueuedRequest) -> int:
        """Prompt tokens that the prefix cache has."""
        return 0 if self.cache is None else PREFIX_BLOCK * self.cache.match(request.blocks)

    def cached_tokens(self, request_id: int) -> int:
        """Prompt tokens that a running request found in the prefix cache when it was admitted."""
        return self._cached.get(request_id, 0)

    def is_over(self, kv_in_use: int) -> bool:
        """Whether running requests need more KV rows than there are; idle blocks make room first.

        Args:
            kv_in_use: As for ``admit``.
        """
        room = self._room(kv_in_use)
        if self.cache is not None and self.cache.idle_tokens > room:
            self.cache.shrink(max(room, 0))
        return room < 0

    def would_be_over(self, kv_in_use: int) -> bool:
        """The same as a question: no idle block goes."""
        return self._room(kv_in_use) < 0

    def _room(self, kv_in_use: int) -> int:
        held = 0 if self.cache is None else self.cache.held_tokens
        return self._limits.max_kv_tokens - kv_in_use - held

    @property
    def idle_room(self) -> int:
        """KV rows that running requests may need before idle prefix blocks have to go."""
        in_cache = 0 if self.cache is None else self.cache.held_tokens + self.cache.idle_tokens
        return self._limits.max_kv_tokens - in_cache

    @property
    def youngest(self) -> int:
        """The running request that was admitted last: the first to lose its rows."""
        return next(reversed(self._running))

    def put_back(self, request: QueuedRequest, *, computed_tokens: int | None) -> None:
        """A running request loses its KV rows and waits again, before all others.

        Args:
            request: As it waits now.
            computed_tokens: Leading tokens of its prompt that have been run; None for all.
        """
        if self.on_time is not None:
            self.on_time.evicted(request.request_id)
        self._leave(request.request_id, computed_tokens)
        self._waiting.appendleft(request)
        self._put_back.add(request.request_id)

    def began(self, request_id: int, now: float) -> None:
        """The prompt of a running request is complete, and its next token there at ``now``."""
        if self.on_time is not None:
            self.on_time.began(self._running[request_id], now)

    def round_over(self, seconds: float, running: int, emitted: int) -> None:
        """A round, without its prompts, is over; see ``OnTime.round_over``."""
        if self.on_time is not None:
            self.on_time.round_over(seconds, running, emitted)

    def finish(self, request_id: int) -> None:
        """A running request is over; its KV rows are free, but for prefix blocks that were run."""
        if self.on_time is not None:
            self.on_time.ended(request_id)
        self._leave(request_id, None)
        self._put_back.discard(request_id)

    def _leave(self, request_id: int, computed_tokens: int | None) -> None:
        request = self._running.pop(request_id)
        self._reserved -= request.kv_tokens - request.shared_tokens
        if self.cache is not None:
            del self._cached[request_id]
            num_computed = None if computed_tokens is None else computed_tokens // PREFIX_BLOCK
            self.cache.release(request.blocks, num_computed=num_computed)
