"""What surrounds replicas under SimPy's clock: arrivals, and the pool that runs prompts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable
from typing import Any

import simpy

from codesign.policy.cost import RoundCost
from codesign.policy.kv_memory import PREFIX_BLOCK, PrefixCache
from codesign.sim.requests import SimulatedRequest

Process = Generator[simpy.Event, Any, None]
Give = Callable[[SimulatedRequest], None]


class Arrivals:
    """Hands each request on when it arrives."""

    def __init__(self, env: simpy.Environment, requests: Iterable[SimulatedRequest]) -> None:
        self._env = env
        self._requests = sorted(requests, key=lambda r: (r.record.arrival, r.record.request_id))
        self._times = [request.record.arrival for request in self._requests]
        self._next = 0  # of the requests, which one comes next

    def next_at(self, turn: int = 0, turns: int = 1) -> float:
        """When the next one arrives whose number, modulo ``turns``, is ``turn``; else infinity."""
        number = self._next + (turn - self._next) % turns
        return self._times[number] if number < len(self._times) else math.inf

    def between(self, start: float, end: float) -> int:
        """How many arrive after ``start`` and not after ``end``."""
        return bisect_right(self._times, end) - bisect_right(self._times, start)

    def run(self, give: Give) -> Process:
        """Hand them to ``give``."""
        env = self._env
        for request in self._requests:
            at = request.record.arrival
            while at > env.now:  # the clock may round to just before it
                yield env.timeout(at - env.now)
            give(request)
            self._next += 1


class PromptPool:
    """Workers that only run prompts, one after another, and send the KV rows to a replica.

    The rows stay here until a replica has admitted the request; a prompt waits until there is room
    for its own.

    Args:
        env: The clock.
        cost: Seconds of prompts on these workers.
        transfer: Seconds per prompt token to move its KV rows to a replica.
        cache: Prefix blocks that stay here, if they are kept.
        max_kv_tokens: KV rows that the pool holds.
        on_finish: Called when a request ends with its first token.
    """

    def __init__(
        self,
        env: simpy.Environment,
        cost: RoundCost,
        *,
        transfer: float,
        cache: PrefixCache | None,
        max_kv_tokens: int,
        on_finish: Callable[[], None],
    ) -> None:
        self._env = env
        self._cost = cost
        self._transfer = transfer
        self._cache = cache
        self.max_kv_tokens = max_kv_tokens
        self._on_finish = on_finish
        self._waiting = simpy.Store(env)
        self._kept: dict[int, tuple[int, tuple[int, ...]]] = {}  # own rows and blocks, by request
        self._own_rows = 0
        self._freed: simpy.Event | None = None

    def give(self, request: SimulatedRequest) -> None:
        """A request arrives."""
        self._waiting.put(request)

    def run(self, give: Give) -> Process:
        """Run prompts for ever; ``give`` gets a request once its prompt's rows have moved."""
        while True:
            request: SimulatedRequest = yield self._waiting.get()
            record = request.record
            while self._kept and not self._has_room(request):
                self._freed = self._env.event()
                yield self._freed
            record.admitted = self._env.now
            request.leave_queue(self._env.now)
            cached = self._keep(request)
            record.cached_tokens = cached
            yield self._env.timeout(self._cost.prefill(record.prompt_tokens - cached, cached))
            record.first_token = self._env.now
            request.prompt_left = 0
            if request.output_tokens == 1:
                record.output_tokens = 1
                record.finish = self._env.now
                self._free(record.request_id)
                self._on_finish()
            else:
                self._env.process(self._send(request, give))

    def taken(self, request_id: int, at: float) -> None:
        """A replica has admitted a request at ``at``, now or later: its rows here are free then."""
        self._env.process(self._free_at(request_id, at))

    def _free_at(self, request_id: int, at: float) -> Process:
        yield self._env.timeout(max(at - self._env.now, 0.0))
        self._free(request_id)

    def _free(self, request_id: int) -> None:
        own, blocks = self._kept.pop(request_id)
        self._own_rows -= own
        if self._cache is not None:
            self._cache.release(blocks)
        if self._freed is not None:
            self._freed.succeed()
            self._freed = None

    def _has_room(self, request: SimulatedRequest) -> bool:
        rows = self._own_rows + _own_rows(request)
        if self._cache is not None:
            rows += self._cache.held_tokens + self._cache.to_hold(request.blocks)
        return rows <= self.max_kv_tokens

    def _keep(self, request: SimulatedRequest) -> int:
        """Take rows for a prompt; return how many of its tokens are in the cache."""
        own, blocks = _own_rows(request), request.blocks
        request.blocks = ()  # replicas get rows of their own
        self._kept[request.record.request_id] = own, blocks
        self._own_rows += own
        if self._cache is None:
            return 0
        matched = PREFIX_BLOCK * self._cache.match(blocks)
        self._cache.hold(blocks)
        self._cache.shrink(max(self.max_kv_tokens - self._own_rows - self._cache.held_tokens, 0))
        return min(matched, request.record.prompt_tokens - 1)

    def _send(self, request: SimulatedRequest, give: Give) -> Process:
        yield self._env.timeout(self._transfer * request.record.prompt_tokens)
        request.queued_since = self._env.now
        give(request)


def _own_rows(request: SimulatedRequest) -> int:
    """KV rows of a prompt, prefix blocks not counted."""
    return request.record.prompt_tokens - request.shared_tokens
