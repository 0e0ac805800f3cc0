"""An answer put where the host reads it: words that say themselves whether they are there.

A kernel's stores to pinned memory arrive sooner than a copy that follows it, and a word is seen
sooner than an event. Word and flag are one store of 8 bytes, so that nothing has to be in order.

Letters in shapes: W words, S slots.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor


def post_words(
    words_W: Tensor,
    slots_SW2: Tensor,
    turn_1: Tensor | None = None,
    kept_W: Tensor | None = None,
) -> None:
    """Store an answer's words in a slot, each with a 1 behind it, where a 0 was.

    Args:
        words_W: The answer, an integer type.
        slots_SW2: int32, where the host reads; pinned if the words are on a GPU.
        turn_1: Slot of this answer, int32, counted up by one, from the last slot to the first;
            None for slot 0.
        kept_W: int32, where the words stay on the device, too, for a step that begins with them.
    """
    assert words_W.shape[0] == slots_SW2.shape[1], "an answer fills its slot"
    if words_W.is_cuda:
        from codesign.kernels import host_answer_triton

        host_answer_triton.post_words(words_W, slots_SW2, turn_1, kept_W)
        return
    slot_W2 = slots_SW2[0 if turn_1 is None else int(turn_1)]
    slot_W2[:, 0] = words_W.to(torch.int32)
    slot_W2[:, 1] = 1
    if turn_1 is not None:
        turn_1.copy_((turn_1 + 1) % len(slots_SW2))
    if kept_W is not None:
        kept_W.copy_(words_W)
