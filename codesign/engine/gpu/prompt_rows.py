"""The message of a prompt or a piece of one, and the same on the device, for a graph to read.

Up to 256 rows wait for the host when they are launched kernel by kernel, so they run as graphs,
padded to a bucket. The buckets are where the maps of prompts change their cut
(``kernels.many_rows``): a row of padding costs next to nothing.

Layout: header, then the tokens. Followers of a rank group get it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from codesign.engine.gpu.step_rows import HEADER, KIND, PIECE, PROMPT, Words
from codesign.kernels.many_rows import DENSE_ROWS

START_WORD, SLOT_WORD, COUNT_WORD, LOW_WORD, HIGH_WORD, WRITTEN_WORD = range(2, 8)
PROMPT_BUCKETS = (16, 32, 64, 128, DENSE_ROWS)


def buckets_up_to(longest: int) -> tuple[int, ...]:
    """Buckets that prompts of at most ``longest`` rows can take."""
    smaller = sum(bucket < longest for bucket in PROMPT_BUCKETS)
    return PROMPT_BUCKETS[: smaller + 1]


def prompt_message(
    tokens: Sequence[int],
    slot: int,
    noise_key: int,
    *,
    start: int = 0,
    first_written: int = 0,
    is_last: bool = True,
) -> Words:
    """Message for ``ModelRank``: run a prompt, or a piece of one, into a slab.

    Args:
        tokens: Of the rows.
        slot: The slab.
        noise_key: Of the request.
        start: Slab row of the first token; those before it are there.
        first_written: Rows below are there, too, and stay as they are.
        is_last: The target answers with the token after the last row.
    """
    message = np.zeros(HEADER + len(tokens), np.int32)
    message[KIND] = PROMPT if is_last else PIECE
    message[SLOT_WORD], message[COUNT_WORD] = slot, len(tokens)
    message[START_WORD], message[WRITTEN_WORD] = start, first_written
    message[LOW_WORD : HIGH_WORD + 1] = np.array([noise_key], np.uint64).view(np.int32)
    message[HEADER:] = tokens
    return message


@dataclass(frozen=True, slots=True)
class DevicePrompt:
    """A prompt's message on the device, as views of the buffer that every message is copied to.

    Letters: T rows of the bucket; what is behind the first ``count`` is padding.
    """

    tokens_T: Tensor
    start_1: Tensor
    slot_1: Tensor
    count_1: Tensor
    key_low_1: Tensor
    key_high_1: Tensor
    first_written_1: Tensor

    @classmethod
    def of(cls, buffer: Tensor, bucket: int) -> DevicePrompt:
        """Views of an int32 buffer that holds a message for at most ``bucket`` rows."""
        words = buffer[START_WORD : WRITTEN_WORD + 1].split(1)
        return cls(buffer[HEADER : HEADER + bucket], *words)
