# pyright: reportCallIssue=false, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: ANN001 (Triton compiles by parameter annotations, and takes launch options)
"""Triton kernel of ``leaf_choices``: one warp, which adds children, chooses and writes the rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from codesign.kernels.leaf_choices import (
    CHILDREN,
    FANOUT,
    FIRST_ROW,
    NEXT_SLOT,
    NUM_LEAVES,
    NUM_ROWS,
    POOL,
    PREFIX,
    ROWS,
    SLAB,
    SLOTS,
    WIDTH,
    PoolWords,
)
from codesign.kernels.leaf_choices import END as END_WORD
from codesign.kernels.leaf_choices import LOWEST as LOWEST_WEIGHT
from codesign.kernels.step_rows import StepRows


def choose_leaves(words: Tensor, pool: PoolWords, rows: StepRows, chosen: Tensor) -> None:
    """``leaf_choices.choose_leaves`` on a GPU."""
    num_rows = rows.tokens_T.shape[0]
    choices = words.shape[0] // (2 * num_rows)
    assert num_rows <= ROWS, f"{num_rows} rows of a step, at most {ROWS}"
    assert num_rows * choices <= CHILDREN, f"{num_rows} rows of {choices} choices"
    _choose_leaves[(1,)](
        words,
        pool.calibration_4,
        pool.row_weights_T,
        pool.weights_P,
        pool.scalars,
        pool.tokens_P,
        pool.positions_P,
        pool.parents_P,
        pool.slot_parents_S,
        rows.tokens_T,
        rows.positions_T,
        rows.slots_T,
        rows.kv_rows_T,
        rows.prefixes_T,
        rows.path_TQ,
        chosen,
        rows.scratch_slot,
        T=num_rows,
        K=choices,
        PADDED=1 << (num_rows * choices - 1).bit_length(),
        PATH=rows.path_TQ.shape[1],
        POOL=POOL,
        SLOTS=SLOTS,
        LOWEST=LOWEST_WEIGHT,
        NUM_LEAVES=NUM_LEAVES,
        NUM_ROWS=NUM_ROWS,
        FIRST_ROW=FIRST_ROW,
        NEXT_SLOT=NEXT_SLOT,
        WIDTH=WIDTH,
        FANOUT=FANOUT,
        PREFIX=PREFIX,
        END=END_WORD,
        SLAB=SLAB,
        num_warps=1,
    )


@triton.jit
def _weighed(log_prob, calibration):  # noqa: ANN202
    slope, intercept = tl.load(calibration), tl.load(calibration + 1)
    least, most = tl.load(calibration + 2), tl.load(calibration + 3)
    chance = tl.minimum(tl.maximum(tl.exp(log_prob), least), most)
    chance = tl.maximum(chance, 1e-30)  # a buffer of zeros, while a graph is captured
    score = slope * (tl.log(chance) - tl.log(1.0 - chance)) + intercept
    weighed = tl.where(score > -30.0, -tl.log(1.0 + tl.exp(-score)), score)
    return tl.where((slope == 1.0) & (intercept == 0.0), log_prob, weighed)


@triton.jit
def _choose_leaves(  # noqa: PLR0915
    words,
    calibration,
    row_weights,
    weights,
    scalars,
    tokens,
    positions,
    parents,
    slot_parents,
    row_tokens,
    row_positions,
    row_slots,
    row_places,
    row_prefixes,
    paths,
    chosen,
    scratch_slot,
    T: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    PATH: tl.constexpr,
    POOL: tl.constexpr,
    SLOTS: tl.constexpr,
    LOWEST: tl.constexpr,
    NUM_LEAVES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    NEXT_SLOT: tl.constexpr,
    WIDTH: tl.constexpr,
    FANOUT: tl.constexpr,
    PREFIX: tl.constexpr,
    END: tl.constexpr,
    SLAB: tl.constexpr,
) -> None:
    num_leaves = tl.load(scalars + NUM_LEAVES)
    num_rows, first = tl.load(scalars + NUM_ROWS), tl.load(scalars + FIRST_ROW)
    next_slot, fanout = tl.load(scalars + NEXT_SLOT), tl.load(scalars + FANOUT)
    prefix, end = tl.load(scalars + PREFIX), tl.load(scalars + END)
    want = tl.minimum(tl.load(scalars + WIDTH), SLOTS - next_slot)
    first_slot = next_slot - (num_rows - first)  # of the rows that were run last
    # Their children, row by row.
    child = tl.arange(0, PADDED)
    of, rank = child // K, child % K
    is_child = (of >= first) & (of < num_rows) & (rank < fanout)
    bits = tl.load(words + T * K + child, mask=is_child, other=0)
    log_prob = bits.to(tl.float32, bitcast=True).to(tl.float64)
    new_token = tl.load(words + child, mask=is_child, other=0)
    new_position = tl.load(row_positions + of, mask=is_child, other=0) + 1
    weight = tl.load(row_weights + of, mask=is_child, other=0.0) + _weighed(log_prob, calibration)
    new = tl.where(is_child & (new_position < end), tl.maximum(weight, LOWEST), float("-inf"))
    leaf = tl.arange(0, POOL)
    old = tl.load(weights + leaf, mask=leaf < num_leaves, other=float("-inf"))
    # The heaviest first, of equal ones the oldest: leaves before children.
    row = tl.arange(0, T)
    token = tl.zeros([T], tl.int32)
    position = tl.zeros([T], tl.int32)
    parent = tl.zeros([T], tl.int32)
    picked = tl.zeros([T], tl.float64)
    count = 0
    for i in range(want):
        best_old, best_new = tl.max(old, axis=0), tl.max(new, axis=0)
        best = tl.maximum(best_old, best_new)
        real = best > float("-inf")
        is_old = real & (best_old >= best_new)
        is_new = real & (best_old < best_new)
        at_old = tl.min(tl.where(old == best, leaf, POOL), axis=0)
        at_new = tl.min(tl.where(new == best, child, PADDED), axis=0)
        its_token = tl.load(tokens + at_old, mask=is_old, other=0)
        its_token += tl.load(words + at_new, mask=is_new, other=0)
        its_position = tl.load(positions + at_old, mask=is_old, other=0)
        its_position += tl.load(row_positions + at_new // K, mask=is_new, other=-1) + 1
        its_parent = tl.load(parents + at_old, mask=is_old, other=0)
        its_parent += tl.where(is_new, first_slot + at_new // K - first, 0)
        here = row == tl.where(real, i, -1)
        token = tl.where(here, its_token, token)
        position = tl.where(here, its_position, position)
        parent = tl.where(here, its_parent, parent)
        picked = tl.where(here, best, picked)
        old = tl.where(leaf == tl.where(is_old, at_old, -1), float("-inf"), old)
        new = tl.where(child == tl.where(is_new, at_new, -1), float("-inf"), new)
        count += real.to(tl.int32)
    tl.debug_barrier()  # all that is overwritten has been read
    valid = row < count
    slot = next_slot + row
    slab = tl.load(scalars + SLAB)
    tl.store(row_tokens + row, token)
    tl.store(row_positions + row, position)
    tl.store(row_slots + row, tl.where(valid, slab, scratch_slot))
    tl.store(row_places + row, tl.where(valid, prefix + slot, row))
    tl.store(row_prefixes + row, tl.where(valid, prefix, 0))
    tl.store(chosen + row, token)
    tl.store(chosen + T + row, parent)
    tl.store(chosen + 2 * T, count)
    # Paths, from their ends.
    depth = tl.where(valid, position - prefix, 0)
    tl.store(paths + row * PATH + depth, tl.where(valid, slot, row))
    at = parent
    for step in range(1, tl.max(depth, axis=0) + 1):
        goes_on = valid & (step <= depth)
        tl.store(paths + row * PATH + depth - step, at, mask=goes_on)
        at = tl.load(slot_parents + at, mask=goes_on & (at >= 0), other=-1)
    # What the next choice begins with.
    age = num_leaves + (of - first) * fanout + rank
    tl.store(weights + leaf, old, mask=leaf < num_leaves)
    tl.store(weights + age, new, mask=is_child)
    tl.store(tokens + age, new_token, mask=is_child)
    tl.store(positions + age, new_position, mask=is_child)
    tl.store(parents + age, first_slot + of - first, mask=is_child)
    tl.store(slot_parents + slot, parent, mask=valid)
    tl.store(row_weights + row, picked)
    tl.debug_barrier()
    tl.store(scalars + NUM_LEAVES, num_leaves + (num_rows - first) * fanout)
    tl.store(scalars + NUM_ROWS, count)
    tl.store(scalars + FIRST_ROW, 0)
    tl.store(scalars + NEXT_SLOT, next_slot + count)
