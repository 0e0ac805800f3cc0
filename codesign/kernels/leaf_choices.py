"""The next rows of a draft tree, chosen on the device: the heaviest of the leaves that are left.

A draft that runs ahead of its host chooses as ``policy.tree.DraftTree.leaves`` does: the children
of the rows that were run last join a pool of leaves, and its heaviest, of equal ones the oldest,
are the next rows. The host chooses too and compares; nothing but time depends on this one.

The pool is in order of age: leaves that were there, heaviest first, then children row by row. Its
memory is one buffer that the host fills (``PoolWords``) and the op goes on with.

Letters in shapes: T rows of a step, K choices of a row, P leaves of a pool, S slots of a tree, Q
longest path.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codesign.kernels.step_rows import StepRows

POOL = 512  # leaves, those that were taken included
ROWS = 32  # of a step, at most
SLOTS = 128  # expanded nodes of a tree, at most
CHILDREN = 1024  # of a step's rows, at most
LOWEST = -1e30  # log weight; below are leaves that were taken or may not grow
# Words of the scalars, ROWS of them.
NUM_LEAVES, NUM_ROWS, FIRST_ROW, NEXT_SLOT, WIDTH, FANOUT, PREFIX, END, SLAB, TURN = range(10)
# Doubles of the calibration: log chances are those of probabilities within LEAST and MOST.
SLOPE, INTERCEPT, LEAST, MOST = range(4)
_DOUBLES = 4 + ROWS + POOL
POOL_WORDS = 2 * _DOUBLES + ROWS + 3 * POOL + SLOTS


@dataclass(frozen=True, slots=True)
class PoolWords:
    """Views of a buffer of POOL_WORDS int32 words that starts at a multiple of 8 bytes.

    Attributes:
        calibration_4: float64, see SLOPE; a slope of 1 and an intercept of 0 calibrate nothing.
        row_weights_T: float64, log weight of each row that was run last; ROWS of them.
        weights_P: float64, log weights of leaves.
        scalars: int32, see NUM_LEAVES.
        tokens_P: int32, of leaves.
        positions_P: int32, of leaves.
        parents_P: int32, slot of each leaf's parent.
        slot_parents_S: int32, slot of each slot's parent; -1 of the root.
    """

    calibration_4: Tensor
    row_weights_T: Tensor
    weights_P: Tensor
    scalars: Tensor
    tokens_P: Tensor
    positions_P: Tensor
    parents_P: Tensor
    slot_parents_S: Tensor

    @classmethod
    def of(cls, buffer: Tensor) -> PoolWords:
        """The views of a buffer."""
        doubles = buffer[: 2 * _DOUBLES].view(torch.float64).split((4, ROWS, POOL))
        words = buffer[2 * _DOUBLES : POOL_WORDS].split((ROWS, POOL, POOL, POOL, SLOTS))
        return cls(*doubles, *words)


def chosen_words(rows: int) -> int:
    """int32 words that tell of the rows chosen: tokens, slots of parents, how many."""
    return 2 * rows + 1


def fits(rows: int, choices: int) -> bool:
    """Whether a step of so many rows, padding included, can be chosen here."""
    return rows <= ROWS and rows * choices <= CHILDREN


def choose_leaves(words: Tensor, pool: PoolWords, rows: StepRows, chosen: Tensor) -> None:
    """Put the next rows in the place of the last, and go on with the pool.

    Args:
        words: (2 T K,) int32, the draft's answer to the last rows, as ``row_choices.choice_words``.
        pool: Leaves before that answer.
        rows: In and out.
        chosen: (2 T + 1,) int32 out, see ``chosen_words``.
    """
    if words.is_cuda:
        from codesign.kernels import leaf_choices_triton

        leaf_choices_triton.choose_leaves(words, pool, rows, chosen)
        return
    scalars = pool.scalars.tolist()
    end = _add_children(words, pool, rows, scalars)
    count = max(min(scalars[WIDTH], SLOTS - scalars[NEXT_SLOT]), 0)
    order = torch.sort(pool.weights_P[:end], descending=True, stable=True)
    taken = order.indices[:count][order.values[:count] > -torch.inf]
    _write_rows(pool, rows, chosen, taken, scalars)
    pool.row_weights_T[: len(taken)] = pool.weights_P[taken]
    pool.weights_P[taken] = -torch.inf
    pool.scalars[NUM_LEAVES] = end
    pool.scalars[NUM_ROWS], pool.scalars[FIRST_ROW] = len(taken), 0
    pool.scalars[NEXT_SLOT] += len(taken)


def _add_children(words: Tensor, pool: PoolWords, rows: StepRows, scalars: list[int]) -> int:
    """Let the children of the last rows join the pool; leaves that it has then."""
    first, last, fanout = scalars[FIRST_ROW], scalars[NUM_ROWS], scalars[FANOUT]
    num_rows = rows.tokens_T.shape[0]
    tokens_TK, bits_TK = words.view(2, num_rows, -1)[:, first:last, :fanout]
    children = slice(scalars[NUM_LEAVES], scalars[NUM_LEAVES] + tokens_TK.numel())
    log_probs_TK = bits_TK.contiguous().view(torch.float32).double()
    weights_TK = pool.row_weights_T[first:last, None] + _weighed(log_probs_TK, pool.calibration_4)
    positions_T1 = rows.positions_T[first:last, None] + 1
    weights_TK = weights_TK.clamp(min=LOWEST)
    weights_TK = weights_TK.masked_fill(positions_T1 >= scalars[END], -torch.inf)
    slots_T1 = torch.arange(scalars[NEXT_SLOT] - (last - first), scalars[NEXT_SLOT])[:, None]
    pool.weights_P[children] = weights_TK.flatten()
    pool.tokens_P[children] = tokens_TK.flatten()
    pool.positions_P[children] = positions_T1.expand_as(tokens_TK).flatten()
    pool.parents_P[children] = slots_T1.expand_as(tokens_TK).flatten().int()
    return children.stop


def _weighed(log_probs: Tensor, calibration_4: Tensor) -> Tensor:
    """Calibrated log chances, as ``policy.interface.Speculation.weigh`` has them."""
    slope, intercept, least, most = calibration_4.tolist()
    if slope == 1.0 and intercept == 0.0:
        return log_probs
    chances = log_probs.exp().clamp(least, most)
    scores = slope * (chances.log() - torch.log1p(-chances)) + intercept
    return torch.where(scores > -30.0, -torch.log1p(torch.exp(-scores)), scores)


def _write_rows(
    pool: PoolWords, rows: StepRows, chosen: Tensor, taken: Tensor, scalars: list[int]
) -> None:
    """The leaves taken as a step's rows, behind them padding."""
    count, num_rows = len(taken), rows.tokens_T.shape[0]
    prefix, next_slot = scalars[PREFIX], scalars[NEXT_SLOT]
    padding = torch.arange(num_rows, dtype=torch.int32)
    for column in (rows.tokens_T, rows.positions_T, rows.prefixes_T, chosen):
        column.zero_()
    rows.slots_T.fill_(rows.scratch_slot)
    rows.kv_rows_T.copy_(padding)
    rows.path_TQ[:, 0] = padding
    rows.tokens_T[:count] = chosen[:count] = pool.tokens_P[taken]
    rows.positions_T[:count] = pool.positions_P[taken]
    rows.slots_T[:count] = scalars[SLAB]
    rows.prefixes_T[:count] = prefix
    rows.kv_rows_T[:count] = padding[:count] + (prefix + next_slot)
    chosen[num_rows : num_rows + count] = pool.parents_P[taken]
    chosen[-1] = count
    for row, parent in enumerate(pool.parents_P[taken].tolist()):
        pool.slot_parents_S[next_slot + row] = parent
        path = [next_slot + row]
        while parent >= 0:
            path.append(parent)
            parent = int(pool.slot_parents_S[parent])
        rows.path_TQ[row, : len(path)] = torch.tensor(path[::-1], dtype=torch.int32)
