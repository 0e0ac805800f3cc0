"""Text for the prefix blocks of a trace: equal ids, equal tokens, and other ids, other tokens.

So the engine, which knows blocks by their tokens, finds in its prefix cache what the simulator
finds by their ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.policy.kv_memory import PREFIX_BLOCK

_STRIDE = 0x9E3779B1  # odd: blocks of neighbouring ids begin far apart in the text
_NAME_TOKENS = 3


class BlockText:
    """What blocks say: a stretch of other text each, and before it what tells it apart.

    Args:
        num_head: Tokens that every prompt begins with.
        text: Tokens of the other text.
    """

    def __init__(self, num_head: int, text: Sequence[int]) -> None:
        self._num_head = num_head
        self._text = list(text)
        self._alphabet = sorted(set(text))

    def behind_head(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The tokens that follow a prompt's head and, with it, are as long as the blocks."""
        tokens = [token for block in blocks for token in self._of_block(block)]
        return tuple(tokens[: max(len(tokens) - self._num_head, 0)])

    def _of_block(self, block: int) -> list[int]:
        block = int(block)  # of a Parquet column: NumPy, which would overflow
        size = len(self._alphabet)
        name = [self._alphabet[block // size**digit % size] for digit in range(_NAME_TOKENS)]
        at = block * _STRIDE % len(self._text)
        stretch = self._text[at : at + PREFIX_BLOCK - _NAME_TOKENS]
        while len(stretch) < PREFIX_BLOCK - _NAME_TOKENS:
            stretch += self._text[: PREFIX_BLOCK - _NAME_TOKENS - len(stretch)]
        return name + stretch
