"""Which replica serves a request. Must not import torch or read a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from codesign.config import Routing
from codesign.policy.kv_memory import PrefixCache


class Load(Protocol):
    """What a router knows of a replica; a ``Batcher`` is one.

    Attributes:
        cache: Prefix blocks that it holds, if it keeps them.
    """

    cache: PrefixCache | None

    @property
    def num_requests(self) -> int:
        """Requests that wait or run there."""
        ...


class Router:
    """Decides which replica serves a request.

    "round-robin" takes turns. "least-loaded" takes the replica with the fewest requests.
    "prefix-aware" takes the one that has most of the prompt in its prefix cache, of those that have
    at most a quarter and two requests more than the least loaded one: a system prompt that all
    requests share must not send all of them to one replica.

    Args:
        loads: Of each replica, kept up to date by the caller.
        routing: How to decide.
    """

    def __init__(self, loads: Sequence[Load], routing: Routing) -> None:
        self._loads = loads
        self._routing: Routing = routing
        self._num_routed = 0

    def choose(self, blocks: Sequence[int]) -> int:
        """The replica of the next request.

        Args:
            blocks: Hash ids of the whole blocks that its prompt begins with.
        """
        turn = self._num_routed % len(self._loads)
        self._num_routed += 1
        if self._routing == "round-robin" or len(self._loads) == 1:
            return turn
        counts = [load.num_requests for load in self._loads]
        least = min(counts)
        if self._routing == "prefix-aware":
            matches = [
                -1 if count > 1.25 * least + 2 or load.cache is None else load.cache.match(blocks)
                for load, count in zip(self._loads, counts, strict=True)
            ]
            best = max(matches)
            if best > 0:
                return matches.index(best)
        return counts.index(least)
