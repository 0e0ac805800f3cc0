# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernel of ``host_answer``: one block, whose words are all in the host before its flag."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WARP_WORDS = 128  # of an answer that one warp stores


def post_words(words_N: Tensor, slots_SW: Tensor, turn_1: Tensor | None) -> None:
    """``host_answer.post_words`` on a GPU."""
    count, room = words_N.shape[0], slots_SW.shape[1]
    assert count < room, f"{count} words for a slot of {room} with its flag"
    _post[(1,)](
        words_N,
        slots_SW,
        slots_SW if turn_1 is None else turn_1,
        count,
        room,
        IN_TURN=turn_1 is not None,
        BLOCK=1 << max(count - 1, 0).bit_length(),
        num_warps=1 if count <= _WARP_WORDS else 4,
    )


@triton.jit
def _post(words, slots, turn, count, room, IN_TURN: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN202
    slot = slots
    if IN_TURN:
        now = tl.load(turn)
        slot += now * room
        tl.store(turn, now + 1)
    places = tl.arange(0, BLOCK)
    there = places < count
    tl.store(slot + places, tl.load(words + places, mask=there).to(tl.int32), mask=there)
    tl.debug_barrier()  # every thread's words are before the flag, which releases them
    tl.atomic_xchg(slot + room - 1, 1, sem="release", scope="sys")
