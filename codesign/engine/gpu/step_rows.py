"""The rows of one forward as a flat int32 message: written on the host, read by the graph.

One layout per row bucket. The leader of a rank group fills it, its followers get a copy, and every
rank copies it into the same device buffer: nothing in a captured graph changes between replays.

Layout: header, ``COLUMNS`` of T words each, paths (T x MAX_PATH), moves (3 words each). What a row
sees is given in order of position: slab rows [0, prefix), then ``prefix + path``. So a row of a
tree reads its keys in the very order in which plain decoding does, and rounds as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from codesign.engine.gpu.mailbox import Words
from codesign.kernels.attention_shares import SPAN, Crowd
from codesign.kernels.step_rows import StepRows
from codesign.policy.speculation import MAX_TREE_ROWS
from codesign.policy.step_time import BUCKETS, filled_up

if TYPE_CHECKING:
    from codesign.engine.gpu.request_rows import RequestRows

MAX_PATH = MAX_TREE_ROWS + 8
HEADER = 8
MODEL, KIND, BUCKET, NUM_MOVES, FOLLOWED, ROWS, REQUESTS, SPANS = range(HEADER)  # of the header
STEP, PROMPT, PIECE, PAGES, SAMPLING, END, AHEAD, NEXT = range(8)  # kinds of message
COLUMNS = (
    "tokens",
    "positions",
    "slots",  # slab of the row's request
    "kv_rows",  # slab row that the row's key and value go to
    "prefixes",  # slab rows that every row of the request sees
    "parents",  # row of the parent, -1 for a root
    "firsts",  # row of the request's root
    "key_low",  # the request's noise key
    "key_high",
)
TOKEN, POSITION, SLOT, KV_ROW, PREFIX, PARENT, FIRST, KEY_LOW, KEY_HIGH = range(len(COLUMNS))


def bucket_of(num_rows: int, smallest: int = BUCKETS[0]) -> int:
    """The smallest bucket that holds ``num_rows`` rows and is not below ``smallest``.

    Raises:
        ValueError: If there are more rows than the largest bucket has.
    """
    bucket = filled_up(max(num_rows, smallest))
    if bucket > BUCKETS[-1]:
        raise ValueError(f"{num_rows} rows in one forward; the largest bucket has {BUCKETS[-1]}")
    return bucket


def step_words(bucket: int, num_moves: int = 0) -> int:
    """int32 words of a step's message."""
    return HEADER + bucket * (len(COLUMNS) + MAX_PATH) + 3 * num_moves


def max_step_words(max_moves: int) -> int:
    """Words of the largest message."""
    return step_words(BUCKETS[-1], max_moves)


class Move(NamedTuple):
    """A slab row that goes to another place: ``source`` to ``target`` of one slab."""

    slot: int
    source: int
    target: int


def pack_step(
    requests: Sequence[RequestRows],
    *,
    bucket: int,
    scratch_slot: int,
    moves: Sequence[Move] = (),
) -> Words:
    """The message of one step; rows that fill the bucket live in the scratch slab.

    Args:
        requests: In the order of the answer.
        bucket: Rows of the forward.
        scratch_slot: Slab of padding rows, which no request owns.
        moves: Slab rows to move before the forward, in this order.
    """
    idle = _idle_step(bucket, scratch_slot)
    if moves:
        message = np.empty(len(idle) + 3 * len(moves), np.int32)
        message[: len(idle)] = idle
        message[NUM_MOVES] = len(moves)
    else:
        message = idle.copy()
    into = message.data
    columns = _columns(requests[0]) if len(requests) == 1 else _joined(requests)
    num_rows = len(columns[TOKEN])
    spans = sum([request.context // SPAN + 1 for request in requests])
    packer(3)(into, 4 * ROWS, num_rows, len(requests), spans)
    pack, at = packer(num_rows), 4 * HEADER
    for words in columns:
        pack(into, at, *words)
        at += 4 * bucket
    _pack_paths(into, requests, 4 * (HEADER + bucket * len(COLUMNS)))
    if moves:
        packer(3 * len(moves))(into, 4 * len(idle), *chain.from_iterable(moves))
    return message


def _pack_paths(into: memoryview, requests: Sequence[RequestRows], at: int) -> None:
    """Write the paths of all rows, from byte ``at`` on."""
    flat = into.cast("B")
    for request in requests:
        if request.path_block:
            end = at + len(request.path_block)
            flat[at:end] = request.path_block
            at = end
            continue
        if not request.paths[-1]:  # rows that follow one another
            at += 4 * MAX_PATH * len(request.tokens)
            continue
        for path, position, prefix in zip(
            request.paths, request.positions, request.prefixes, strict=True
        ):
            length = len(path)
            assert length == position + 1 - prefix, f"a row at {position} sees {length} tree rows"
            packer(length)(into, at, *path)
            at += 4 * MAX_PATH


def crowd_of(message: Words) -> Crowd:
    """What a step's message says of how many attend how much."""
    header = message[:HEADER].tolist()  # quicker than by index
    return Crowd(header[BUCKET], header[ROWS], header[REQUESTS], header[SPANS])


@cache
def _idle_step(bucket: int, scratch_slot: int) -> Words:
    """The message of a step of padding alone; not to be written to."""
    message = np.zeros(step_words(bucket), np.int32)
    message[BUCKET] = bucket
    start = HEADER + bucket * len(COLUMNS)
    columns = message[HEADER:start].reshape(len(COLUMNS), bucket)
    columns[SLOT] = scratch_slot
    columns[PARENT] = -1
    columns[KV_ROW] = message[start:].reshape(bucket, MAX_PATH)[:, 0] = np.arange(bucket)
    return message


def _columns(request: RequestRows) -> tuple[Sequence[int], ...]:
    """The words of each of COLUMNS of one request alone."""
    num_rows = len(request.tokens)
    low, high = _halves(request.noise_key)
    return (
        request.tokens,
        request.positions,
        (request.slot,) * num_rows,
        range(request.context, request.context + num_rows),
        request.prefixes,
        request.parents,
        (0,) * num_rows,
        (low,) * num_rows,
        (high,) * num_rows,
    )


def _joined(requests: Sequence[RequestRows]) -> Sequence[Sequence[int]]:
    """The same of several requests, or of none."""
    columns: list[list[int]] = [[] for _ in COLUMNS]
    tokens, positions, slots, kv_rows, prefixes, parents, firsts, lows, highs = columns
    for request in requests:
        first, count, context = len(tokens), len(request.tokens), request.context
        low, high = _halves(request.noise_key)
        tokens += request.tokens
        positions += request.positions
        slots += (request.slot,) * count
        kv_rows += range(context, context + count)
        prefixes += request.prefixes
        if request.parents[-1] < 0:  # rows of a draft have none
            parents += request.parents
        else:
            parents += [first + parent if parent >= 0 else -1 for parent in request.parents]
        firsts += (first,) * count
        lows += (low,) * count
        highs += (high,) * count
    return columns


@lru_cache(maxsize=1024)
def _halves(key: int) -> tuple[int, int]:
    """The two int32 words of a request's key."""
    return _signed(key & 0xFFFFFFFF), _signed(key >> 32)


def _signed(word: int) -> int:
    """The int32 of the same 32 bits."""
    return word - (1 << 32) if word >> 31 else word


@cache
def packer(count: int) -> Callable[..., None]:
    """``packer(count)(into, byte, *words)``: filling a part of an array takes twice as long."""
    return Struct(f"{count}i").pack_into


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A step's message on the device, as views of the buffer that every message is copied to.

    Letters: T rows of the bucket, P = MAX_PATH.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    kv_rows_T: Tensor
    prefixes_T: Tensor
    parents_T: Tensor
    firsts_T: Tensor
    key_low_T: Tensor
    key_high_T: Tensor
    path_TP: Tensor
    num_moves_1: Tensor
    moves: Tensor  # flat, 3 words each

    @classmethod
    def of(cls, buffer: Tensor, bucket: int) -> DeviceRows:
        """Views of an int32 buffer that holds a message for ``bucket`` rows."""
        start = HEADER + bucket * len(COLUMNS)
        end = start + bucket * MAX_PATH
        columns = buffer[HEADER:start].view(len(COLUMNS), bucket)
        return cls(
            *columns.unbind(0),
            path_TP=buffer[start:end].view(bucket, MAX_PATH),
            num_moves_1=buffer[NUM_MOVES : NUM_MOVES + 1],
            moves=buffer[end:],
        )

    def changing(self, scratch_slot: int) -> StepRows:
        """What a step that makes its own rows from the last one's writes.

        Args:
            scratch_slot: Slab of padding rows.
        """
        return StepRows(
            self.tokens_T,
            self.positions_T,
            self.slots_T,
            self.kv_rows_T,
            self.prefixes_T,
            self.path_TP,
            scratch_slot,
        )
