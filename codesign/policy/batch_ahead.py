"""What further draft forwards of a batch would be worth, before they are made.

Foreseen is one leaf for each request and forward, its likeliest. The *gain* of a leaf is the chance
that it is reached and that its likeliest child is accepted; further down the request's mean
confidence is taken again and again. These children compete for rows with all nodes that are there:
where a step costs the same up to some number of rows, they take the place of the least of those
that fill it.

Letters in shapes: B requests, N nodes, D draft forwards.

Must not import torch or read a clock.
"""

from __future__ import annotations

import numpy as np

from codesign.policy.batch_round import LEAST, BatchRound, Floats

_MOST_NODES = 256  # that are foreseen: of large batches few forwards ever pay


def next_forward(
    this: BatchRound, worth: Floats, gains: Floats, rate: float
) -> tuple[float, float]:
    """What one more forward promises; ``best_forwards`` finds the same, but takes longer.

    Args:
        this: The round.
        worth: (N,) chances of the nodes that are drafted, descending.
        gains: (B,) gain of each request's likeliest leaf.
        rate: Tokens that a second is worth, by the best choice without it.

    Returns:
        Value of the round with it, 0 where no leaf is worth its row, and the least gain of a leaf
        that is.
    """
    num = len(gains)
    worth = np.concatenate((worth, gains))
    worth.sort()
    worth = worth[::-1]
    draft, target = this.draft(num), this.target(len(worth))[1:]
    tokens = this.roots + worth.cumsum()
    fixed = this.awaited + this.overhead
    best = int(this.value(tokens, target + (fixed + draft[num])).argmax())
    level = max(float(worth[best]), LEAST)
    rows = int((gains >= level).sum())
    # Only leaves whose children are verified would run.
    seconds = float(target[best] + draft[rows]) + fixed
    value = float(this.value(float(tokens[best]), seconds)) if rows else 0.0
    return value, least_gain(this, worth, best + 1, num, rate)


def best_forwards(
    this: BatchRound, worth: Floats, gains: Floats, confidence: Floats, most: int, rate: float
) -> tuple[float, float, float]:
    """What 1 to ``most`` more forwards promise, whichever number is best.

    Args:
        this: The round.
        worth: (N,) chances of the nodes that are drafted, descending.
        gains: (B,) gain of each request's likeliest leaf.
        confidence: (B,) each request's mean confidence.
        most: Forwards.
        rate: Tokens that a second is worth, by the best choice without them.

    Returns:
        As of ``next_forward``, the leaves being those of the first of these forwards; and the
        seconds per token of each request that such rounds save (``BatchRound.saved``).
    """
    num = len(gains)
    most = min(most, max(_MOST_NODES // max(num, 1), 1))
    gains_DB = gains_ahead(gains, confidence, most)
    worth_N = np.concatenate((worth, gains_DB.ravel()))
    made_by_N = np.repeat(np.arange(most + 1), [len(worth), *[num] * most])
    order_N = worth_N.argsort()[::-1]
    worth_N, made_by_N = worth_N[order_N], made_by_N[order_N]
    # Row d of what follows is of d + 1 forwards; nodes of later ones are not there.
    forwards_D = np.arange(1, most + 1)
    is_there_DN = made_by_N <= forwards_D[:, None]
    tokens_DN = this.roots + (is_there_DN * worth_N).cumsum(axis=1)
    target_DN = this.target(len(worth_N))[is_there_DN.cumsum(axis=1)]
    draft = this.draft(max(num, 1))
    fixed = this.awaited + this.overhead
    all_D = fixed + forwards_D * draft[num]
    best_D = this.value(tokens_DN, target_DN + all_D[:, None]).argmax(axis=1)
    # Only leaves whose children are verified would run.
    level_D = np.maximum(worth_N[best_D], LEAST)
    rows_DD = (gains_DB >= level_D[:, None, None]).sum(axis=2)
    drafting_D = np.where(np.tri(most, dtype=bool), draft[rows_DD], 0.0).sum(axis=1)
    tokens_D = tokens_DN[forwards_D - 1, best_D]
    seconds_D = fixed + drafting_D + target_DN[forwards_D - 1, best_D]
    values_D = np.where(rows_DD[:, 0] > 0, this.value(tokens_D, seconds_D), 0.0)
    best = int(values_D.argmax())
    is_there, last = is_there_DN[best], int(best_D[best])
    level = least_gain(this, worth_N[is_there], int(is_there[: last + 1].sum()), num, rate)
    return float(values_D[best]), level, this.saved(float((seconds_D / tokens_D).min()))


def least_gain(this: BatchRound, worth: Floats, count: int, num: int, rate: float) -> float:
    """Least gain of a leaf that is worth its row in the next draft forward.

    Without it the target's row goes to the best of the nodes that are left out, or is saved.

    Args:
        this: The round.
        worth: (N,) of all nodes, descending, with those that the forward is to make.
        count: How many of them would be verified.
        num: Requests.
        rate: Tokens that a second is worth.
    """
    target = this.target(count)
    saved = float(target[count] - target[count - 1]) * rate
    other = float(worth[count]) if count < len(worth) else 0.0
    return max(float(worth[count - 1]), max(other, saved) + this.draft_row(num, rate), LEAST)


def beats_plain(this: BatchRound, confidence: Floats, most: int, margin: float) -> bool:
    """Whether trees that cost nothing would beat plain decoding by this share of its value.

    They are drafted beside a verification that is over: as deep as would have fitted there.

    Args:
        this: The round.
        confidence: (B,) each request's mean confidence.
        most: Draft forwards.
        margin: Share.
    """
    depth = max(int(this.verification / max(this.draft.of(len(confidence), 0), LEAST)), 1)
    gains_DB = gains_ahead(confidence, confidence, min(depth, most))
    worth = -np.sort(-gains_DB.ravel())
    tokens = this.roots + np.concatenate(([0.0], worth.cumsum()))
    values = this.value(tokens, this.target(len(worth)) + this.overhead)
    return bool(values[1:].max(initial=0.0) > this.plain.value * (1.0 + margin))


def gains_ahead(gains: Floats, confidence: Floats, depth: int) -> Floats:
    """(D, B) gains of a request's next leaves, one below another."""
    gains_DB = np.empty((depth, len(gains)))
    gains_DB[0], gains_DB[1:] = gains, confidence
    return np.multiply.accumulate(gains_DB, axis=0, out=gains_DB)
