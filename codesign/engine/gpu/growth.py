"""What a rank chooses the next rows of a draft from, as int32 words of a message.

The host fills the pool of ``kernels.leaf_choices`` with the leaves that are there when a step is
sent; the ranks add what each step finds.
"""

from __future__ import annotations

import numpy as np

from codesign.engine.gpu.step_rows import (
    AHEAD,
    BUCKET,
    HEADER,
    KIND,
    REQUESTS,
    ROWS,
    SPANS,
    Words,
)
from codesign.kernels import leaf_choices as pool
from codesign.kernels.attention_shares import SPAN
from codesign.policy.interface import LEAST_CHANCE, MOST_CHANCE
from codesign.policy.protocol import Growth

NUM_STEPS = 3  # word of the message's header
MOST_RIVALS = 64
MOST_STEPS = 16  # answers that may be under way
AHEAD_WORDS = HEADER + pool.POOL_WORDS


def steps_that_fit(steps: int, *, num_rows: int, width: int, fanout: int) -> int:
    """How many of ``steps`` steps a pool has room for.

    Args:
        steps: That are wanted.
        num_rows: Nodes of the step before them.
        width: Leaves of each.
        fanout: Children of a node.
    """
    steps = min(steps, MOST_STEPS, MOST_RIVALS // width)
    room = pool.POOL - MOST_RIVALS - num_rows * fanout
    return max(min(steps, 1 + room // (width * fanout)), 0) if room >= 0 else 0


def growth_words(growth: Growth, *, slab: int, first_row: int) -> Words:
    """Words of a pool, see ``kernels.leaf_choices.PoolWords``.

    Args:
        growth: What the host knows.
        slab: Of the request.
        first_row: Row of the step's first node; those before it catch up.
    """
    words = np.zeros(pool.POOL_WORDS, np.int32)
    num_rows, num_slots = len(growth.weights), len(growth.slot_parents)
    count = len(growth.rivals)
    assert count <= MOST_RIVALS, f"{count} rivals"
    ends = np.cumsum((4, pool.ROWS, pool.POOL))
    doubles = words[: 2 * ends[-1]].view(np.float64)
    calibration = growth.calibration
    doubles[:2] = calibration.slope, calibration.intercept
    doubles[2:4] = LEAST_CHANCE, MOST_CHANCE
    doubles[4 + first_row : 4 + first_row + num_rows] = growth.weights
    doubles[ends[1] : ends[1] + count] = growth.rival_weights
    ints = words[2 * ends[-1] :]
    ints[pool.NUM_LEAVES], ints[pool.FIRST_ROW] = count, first_row
    ints[pool.NUM_ROWS], ints[pool.NEXT_SLOT] = first_row + num_rows, num_slots
    ints[pool.WIDTH], ints[pool.FANOUT] = growth.width, growth.fanout
    ints[pool.PREFIX], ints[pool.END], ints[pool.SLAB] = growth.prefix, growth.end, slab
    columns = ints[pool.ROWS : pool.ROWS + 3 * pool.POOL].reshape(3, pool.POOL)
    if count:
        columns[:, :count] = np.array(growth.rivals, np.int32).T
    ints[pool.ROWS + 3 * pool.POOL :][:num_slots] = growth.slot_parents
    return words


def ahead_message(growth: Growth, *, bucket: int, slab: int, first_row: int) -> Words:
    """Message for ``ModelRank`` behind a step: run the steps that follow, and choose their rows."""
    message = np.zeros(AHEAD_WORDS, np.int32)
    message[KIND], message[BUCKET], message[NUM_STEPS] = AHEAD, bucket, growth.steps
    # Of the first of these steps. Contexts grow, but by no more than a tree: for all the same.
    context = growth.prefix + len(growth.slot_parents)
    message[ROWS], message[REQUESTS], message[SPANS] = growth.width, 1, context // SPAN + 1
    message[HEADER:] = growth_words(growth, slab=slab, first_row=first_row)
    return message
