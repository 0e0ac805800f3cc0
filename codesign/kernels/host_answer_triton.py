# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernel of ``host_answer``: one block, whose stores need no order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARP_WORDS = 128  # of an answer that one warp stores


def post_words(
    words_W: Tensor, slots_SW2: Tensor, turn_1: Tensor | None, kept_W: Tensor | None
) -> None:
    """``host_answer.post_words`` on a GPU."""
    count = words_W.shape[0]
    slots_SW = slots_SW2.view(torch.int64)
    _post[(1,)](
        words_W,
        slots_SW,
        slots_SW if turn_1 is None else turn_1,
        slots_SW if kept_W is None else kept_W,
        count,
        len(slots_SW),
        IN_TURN=turn_1 is not None,
        KEEPS=kept_W is not None,
        BLOCK=1 << (count - 1).bit_length(),
        num_warps=1 if count <= _WARP_WORDS else 4,
    )


@triton.jit
def _post(  # noqa: ANN202
    words,
    slots,
    turn,
    kept,
    count,
    num_slots,
    IN_TURN: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = slots
    if IN_TURN:
        now = tl.load(turn)
        slot += now * count
        tl.debug_barrier()  # every warp has read whose turn it is
        tl.store(turn, (now + 1) % num_slots)
    places = tl.arange(0, BLOCK)
    there = places < count
    word = tl.load(words + places, mask=there, other=0).to(tl.int64) & 0xFFFFFFFF
    if KEEPS:
        tl.store(kept + places, word.to(tl.int32), mask=there)
    # The flag is the upper half. Written through to the host, not kept in the L2 cache.
    tl.store(slot + places, word | (1 << 32), mask=there, cache_modifier=".wt")
