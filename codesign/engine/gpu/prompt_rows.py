"""The message of a prompt or a piece of one, and the same on the device, for a graph to read.

Launched kernel by kernel, rows wait for the host, so they run as graphs, padded to a bucket. Up to
256 rows the buckets are where maps change their launches (``kernels.gemm``, ``prompt_linear``): a
row of padding costs next to nothing. Above, a row costs what it multiplies, so there are graphs
as far as the GPU, padding and all, is done before a host would have launched the same.

Layout: header, then the tokens. Followers of a rank group get it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from codesign.engine.gpu.step_rows import HEADER, KIND, PIECE, PROMPT, Words
from codesign.kernels.prompt_linear import DENSE_ROWS

START_WORD, SLOT_WORD, COUNT_WORD, LOW_WORD, HIGH_WORD, WRITTEN_WORD = range(2, 8)
PROMPT_BUCKETS = (16, 32, 64, 128, DENSE_ROWS)
LONG_BUCKETS = (512, 768, 1024, 1536, 2048)
# Seconds of a layer, from prompts of four pairs on one to four H200s: a host launches it in the
# first, and its sums over ranks in the second; a weight takes the third to be unpacked for cuBLAS,
# and the fourth for each row.
_LAUNCHES, _SUMS, _UNPACK, _ROW = 1.0e-3, 0.4e-3, 1.0e-12, 2.5e-15
# Rows and those before them in a long bucket: the attention that reads lengths from device memory
# takes up to four times as long as the flash kernel, by then as long as the maps.
LONG_CONTEXT = 4096


def long_buckets(layer_weights: int, *, adds_ranks: bool) -> tuple[int, ...]:
    """Buckets of long prompts that a graph runs sooner than the host launches them.

    Args:
        layer_weights: Of a layer, on one rank.
        adds_ranks: Each of its two residual maps ends in a sum over ranks.
    """
    host = _LAUNCHES + _SUMS * adds_ranks
    return tuple(b for b in LONG_BUCKETS if layer_weights * (_UNPACK + _ROW * b) <= host)


def buckets_up_to(longest: int, long: Sequence[int] = LONG_BUCKETS) -> tuple[int, ...]:
    """Buckets that prompts of at most ``longest`` rows can take; ``long`` are those above 256."""
    buckets = (*PROMPT_BUCKETS, *long)
    return buckets[: sum(bucket < longest for bucket in buckets) + 1]


def bucket_for(buckets: Iterable[int], count: int, start: int) -> int | None:
    """The smallest bucket for so many rows behind ``start``; None: launch them one by one."""
    found = min((bucket for bucket in buckets if bucket >= count), default=None)
    is_far = found is not None and found > DENSE_ROWS and start + count > LONG_CONTEXT
    return None if is_far else found


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
