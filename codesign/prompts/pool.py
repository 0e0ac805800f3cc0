"""The prompts of a pool as tokens, and how one is made longer with the text of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codesign.prompts.blocks import BlockText

if TYPE_CHECKING:
    from codesign.prompts import Prompt

EncodeChat = Callable[[str], Sequence[int]]
"""From the text of a user's turn to the ids of the whole prompt, chat template included."""


@dataclass(frozen=True, slots=True)
class EncodedPool:
    """The prompts of a pool.

    Attributes:
        ids: Of each prompt, chat template included.
        fillers: Of each prompt, its text and a blank line, without the template.
        num_head: Tokens of the template before the user's text.
    """

    ids: tuple[tuple[int, ...], ...]
    fillers: tuple[tuple[int, ...], ...]
    num_head: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt], encode_chat: EncodeChat) -> EncodedPool:
        """Encode all prompts."""
        # Two texts without a common token show where the template ends and the user begins.
        one, other = encode_chat("Yes"), encode_chat("No")
        num_head = _num_common(one, other)
        num_tail = _num_common(one[::-1], other[::-1])
        ids, fillers = [], []
        for prompt in prompts:
            ids.append(tuple(encode_chat(prompt.text)))
            filler = encode_chat(prompt.text + "\n\n")
            fillers.append(tuple(filler[num_head : len(filler) - num_tail]))
        return cls(tuple(ids), tuple(fillers), num_head)

    def block_text(self) -> BlockText:
        """What the prefix blocks of a trace say."""
        return BlockText(self.num_head, [token for filler in self.fillers for token in filler])

    def lengthened(
        self, chosen: int, *, first_filler: int, num_tokens: int, start: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Return the ids of a prompt with earlier material in front, so long if it can be.

        Args:
            chosen: Place of the prompt in the pool.
            first_filler: Place of the prompt that the material begins with, modulo the pool's size.
            num_tokens: Wanted, chat template included; a longer prompt is kept whole.
            start: Tokens that the user's turn begins with; never cut.
        """
        ids, size = self.ids[chosen], len(self.ids)
        missing = num_tokens - len(ids) - len(start)
        material: list[int] = []
        index = first_filler
        while len(material) < missing:
            # The question itself is no material for itself, unless there is nothing else.
            if index % size != chosen or size == 1:
                material.extend(self.fillers[index % size])
            index += 1
        # Cut at the beginning, so that the question follows a whole text and a blank line.
        kept = material[len(material) - max(missing, 0) :]
        return (*ids[: self.num_head], *start, *kept, *ids[self.num_head :])


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
