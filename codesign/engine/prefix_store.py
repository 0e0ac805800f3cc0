"""Prompt blocks that outlive their request on a CPU: copies of slab rows, found by block id.

A slab is one piece here, so a block that several requests share is copied into each one's slab,
which is cheap compared to computing it; the copy that is kept is never written to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from codesign.engine.kv_cache import KVCache
from codesign.policy.kv_memory import PREFIX_BLOCK


class PrefixStore:
    """Keys and values of blocks, the least recently used evicted first, of a prompt the last.

    Args:
        max_tokens: Rows to keep.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // PREFIX_BLOCK
        self._blocks: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()

    def restore(
        self, cache: KVCache, slot: int, blocks: Sequence[int], tokens: Sequence[int]
    ) -> int:
        """Fill an empty slab with the leading ``blocks`` that are kept; return their rows.

        Args:
            cache: Where the slab is.
            slot: Number of the slab.
            blocks: Names of the prompt's whole blocks.
            tokens: Of the prompt; noted beside the rows where the cache checks itself.
        """
        end = 0
        for block in blocks:
            kept = self._blocks.get(block)
            if kept is None:
                break
            cache.put_rows(slot, *kept, tokens[end : end + PREFIX_BLOCK])
            end += PREFIX_BLOCK
        return end

    def keep(self, cache: KVCache, slot: int, blocks: Sequence[int], num_rows: int) -> None:
        """Copy those ``blocks`` of a slab that its first ``num_rows`` rows hold.

        Args:
            cache: Where the slab is.
            slot: Number of the slab.
            blocks: Names of the prompt's whole blocks.
            num_rows: Rows of the prompt that have been run.
        """
        # Backwards: a block is of no use without those before it, so they are used after it.
        for number in range(min(num_rows // PREFIX_BLOCK, len(blocks)) - 1, -1, -1):
            if blocks[number] not in self._blocks:
                start = number * PREFIX_BLOCK
                self._blocks[blocks[number]] = cache.copy_rows(slot, start, start + PREFIX_BLOCK)
            self._blocks.move_to_end(blocks[number])
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
