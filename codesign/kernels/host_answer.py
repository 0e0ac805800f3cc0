"""An answer put where the host reads it: words, then a flag that the host polls.

A kernel's stores to pinned memory arrive sooner than a copy that follows it, and a flag is seen
sooner than an event: 11 us together on an H100 (docs/kernel-ladder.md, "The engine").

Letters in shapes: N words, S slots, W words of a slot.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor


def post_words(words_N: Tensor, slots_SW: Tensor, turn_1: Tensor | None = None) -> None:
    """Store an answer in a slot and then 1 in the slot's last word, which was 0.

    Args:
        words_N: The answer, an integer type; fewer words than a slot has.
        slots_SW: int32, where the host reads; pinned if the words are on a GPU.
        turn_1: Slot of this answer, int32, counted up by one; None for slot 0.
    """
    if words_N.is_cuda:
        from codesign.kernels import host_answer_triton

        host_answer_triton.post_words(words_N, slots_SW, turn_1)
        return
    slot = 0 if turn_1 is None else int(turn_1)
    slots_SW[slot, : len(words_N)] = words_N.to(torch.int32)
    slots_SW[slot, -1] = 1
    if turn_1 is not None:
        turn_1 += 1
