"""Prompt blocks that stay in KV memory after their request, for later requests with the same start.

Blocks are known by the hash ids that a trace or a server gives them: equal ids, equal tokens up to
and including that block. Must not import torch or read a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PREFIX_BLOCK = 512  # prompt tokens per hash id, as in the Mooncake traces


class PrefixCache:
    """Which prefix blocks hold KV rows.

    A block is *held* while a running request uses it and *idle* afterwards; idle blocks are
    evicted, least recently used first, when someone needs their rows.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # block id -> running requests that use it
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def held_tokens(self) -> int:
        """KV rows that cannot be evicted now."""
        return PREFIX_BLOCK * len(self._held)

    @property
    def idle_tokens(self) -> int:
        """KV rows that can be evicted."""
        return PREFIX_BLOCK * len(self._idle)

    def match(self, blocks: Sequence[int]) -> int:
        """Number of leading ``blocks`` that are there."""
        held, idle = self._held, self._idle
        for number, block in enumerate(blocks):
            if block not in held and block not in idle:
                return number
        return len(blocks)

    def to_hold(self, blocks: Sequence[int]) -> int:
        """KV rows that become unevictable if a request with these blocks is admitted."""
        return PREFIX_BLOCK * sum([block not in self._held for block in blocks])

    def hold(self, blocks: Sequence[int]) -> None:
        """A request with these blocks runs; those that are missing are computed with its prompt."""
        for block in blocks:
            self._idle.pop(block, None)
            self._held[block] = self._held.get(block, 0) + 1

    def release(self, blocks: Sequence[int], *, num_computed: int | None = None) -> None:
        """The request is over. Of its blocks the last are evicted first: they are rarer.

        Args:
            blocks: As it was held with.
            num_computed: Leading blocks whose rows are there; the others were never run. All if
                None.
        """
        last = len(blocks) if num_computed is None else num_computed
        for number in range(len(blocks) - 1, -1, -1):
            block = blocks[number]
            count = self._held[block]
            if count > 1:
                self._held[block] = count - 1
            else:
                del self._held[block]
                if number < last:
                    self._idle[block] = None

    def shrink(self, max_idle_tokens: int) -> None:
        """Evict until at most ``max_idle_tokens`` rows are idle."""
        while self._idle and PREFIX_BLOCK * len(self._idle) > max_idle_tokens:
            self._idle.popitem(last=False)
