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

from collections.abc import Sequence

import numpy as np

from codesign.policy.batch_round import LEAST, BatchRound, Floats

_MOST_NODES = 256  # that are foreseen: of large batches few forwards ever pay


def next_forward(
    this: BatchRound, worth: Floats, gains: Floats, rate: float
) -> tuple[float, float]:
    """What one more forward promises; ``best_forwards`` finds the same, but takes longer.

    Args:
        this: The round.
        worth: (1 + N,) of the roots and the drafted nodes, as for ``BatchRound.best``.
        gains: (B,) gain of each request's likeliest leaf.
        rate: Tokens that a second is worth, by the best choice without it.

    Returns:
        Value of the round with it, 0 where no leaf is worth its row, and the least gain of a leaf
        that is.
    """
    worth = _with_more(worth, gains)
    value, _, count = _promise(this, worth, [gains])
    return value, least_gain(this, worth, count, len(gains), rate)


def best_forwards(
    this: BatchRound, worth: Floats, gains: Floats, confidence: Floats, most: int, rate: float
) -> tuple[float, float, float]:
    """What 1 to ``most`` more forwards promise, whichever number is best.

    Args:
        this: The round.
        worth: (1 + N,) of the roots and the drafted nodes, as for ``BatchRound.best``.
        gains: (B,) gain of each request's likeliest leaf.
        confidence: (B,) each request's mean confidence.
        most: Forwards.
        rate: Tokens that a second is worth, by the best choice without them.

    Returns:
        As of ``next_forward``, the leaves being those of the first of these forwards; and the
        seconds per token of each request that such rounds save (``BatchRound.saved``).
    """
    num = len(gains)
    made: list[Floats] = []
    best, level, fastest = -1.0, 0.0, np.inf
    for more in gains_ahead(gains, confidence, min(most, max(_MOST_NODES // num, 1))):
        made.append(more)
        worth = _with_more(worth, more)
        value, seconds_per_token, count = _promise(this, worth, made)
        fastest = min(fastest, seconds_per_token)
        if value > best:
            best, level = value, least_gain(this, worth, count, num, rate)
    return best, level, this.saved(fastest)


def _with_more(worth: Floats, gains: Floats) -> Floats:
    """(1 + N + B,) what there is and the nodes of one more forward, descending."""
    worth = np.concatenate((worth, gains))
    worth.sort()
    return worth[::-1]


def _promise(this: BatchRound, worth: Floats, made: Sequence[Floats]) -> tuple[float, float, int]:
    """What a round with so many more forwards promises.

    Args:
        this: The round.
        worth: (1 + N,) with the nodes that these forwards are to make.
        made: (B,) gains of the leaves of each of them.

    Returns:
        Value of the round, 0 where the first forward has no leaf that is worth its row; seconds
        per token; and how many nodes would be verified.
    """
    num = len(made[0])
    draft, target, fixed = this.draft(num), this.target(len(worth) - 1), this.fixed
    tokens = worth.cumsum()
    drafting = len(made) * float(draft[num])
    count = 1 + int(this.value(tokens, target + (fixed + drafting))[1:].argmax())
    level = max(float(worth[count]), LEAST)
    # Only leaves whose children are verified would run.
    rows = [np.count_nonzero(gains >= level) for gains in made]
    seconds = fixed + float(target[count]) + sum([float(draft[own]) for own in rows])
    promised = float(tokens[count])
    value = this.value(promised, seconds) if rows[0] else 0.0
    return value, (seconds - this.stall) / promised, count


def least_gain(this: BatchRound, worth: Floats, count: int, num: int, rate: float) -> float:
    """Least gain of a leaf that is worth its row in the next draft forward.

    Without it the target's row goes to the best of the nodes that are left out, or is saved.

    Args:
        this: The round.
        worth: (1 + N,) with the nodes that the forward is to make.
        count: How many nodes would be verified.
        num: Requests.
        rate: Tokens that a second is worth.
    """
    target = this.target(count)
    saved = float(target[count] - target[count - 1]) * rate
    other = float(worth[count + 1]) if count + 1 < len(worth) else 0.0
    return max(float(worth[count]), max(other, saved) + this.draft_row(num, rate), LEAST)


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
    tokens = this.roots + worth.cumsum()
    values = this.value(tokens, this.target(len(worth))[1:] + (this.overhead + this.stall))
    return bool(values.max(initial=0.0) > this.plain.value * (1.0 + margin))


def gains_ahead(gains: Floats, confidence: Floats, depth: int) -> Floats:
    """(D, B) gains of a request's next leaves, one below another."""
    gains_DB = np.empty((depth, len(gains)))
    gains_DB[0], gains_DB[1:] = gains, confidence
    return np.multiply.accumulate(gains_DB, axis=0, out=gains_DB)
