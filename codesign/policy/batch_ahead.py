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

from bisect import bisect_left, bisect_right
from operator import mul, neg

import numpy as np

from codesign.policy.batch_round import FEW, LEAST, BatchRound, Worth
from codesign.policy.row_prices import Floats, numbers

_MOST_NODES = 256  # that are foreseen: of large batches few forwards ever pay


def with_gains(worth: Worth, gains: list[float]) -> Worth:
    """(1 + N,) roots and drafted nodes as for ``BatchRound.best``, and what leaves gain among them.

    Args:
        worth: Of the roots and the drafted nodes, the roots first.
        gains: (B,) gain of each request's likeliest leaf.
    """
    if isinstance(worth, list) and len(gains) <= FEW:
        return sorted(worth + gains, reverse=True)
    nodes_N = np.concatenate((worth[::-1], numbers(gains)))
    nodes_N.sort(kind="stable")  # merges what is sorted already
    return nodes_N[::-1]


def next_forward(
    this: BatchRound, worth: Worth, nodes: Worth, gains: list[float], rate: float
) -> tuple[float, float]:
    """What one more forward promises.

    ``best_forwards`` finds the same, but takes longer: six times at 64 requests.

    Args:
        this: The round.
        worth: (1 + N,) of the roots and the drafted nodes, as for ``BatchRound.best``.
        nodes: As of ``with_gains``.
        gains: (B,) gain of each request's likeliest leaf.
        rate: Tokens that a second is worth, by the best choice without it.

    Returns:
        Value of the round with it, 0 where no leaf is worth its row, and the least gain of a leaf
        that is.
    """
    num, fixed = len(gains), this.fixed + this.behind
    drafting = fixed + this.draft.at(num)
    # Only leaves whose children are verified would run.
    if isinstance(nodes, list):
        target = this.target.listed(len(nodes) - 1)
        count, tokens, _ = this.best_number(nodes, target, drafting)
        last, before = target[count], target[count - 1]
        least = nodes[count]
    else:
        target_N, tokens_N = this.target(len(nodes) - 1), nodes.cumsum()
        values = this.value(tokens_N, target_N + drafting)
        count = 1 + int(values[1:].argmax())
        tokens, least = tokens_N.item(count), nodes.item(count)
        last, before = target_N.item(count), target_N.item(count - 1)
    level = least if least > LEAST else LEAST
    rows = len([gain for gain in gains if gain >= level])
    seconds = fixed + last + this.draft.at(rows)
    value = this.value(tokens, seconds) if rows else 0.0
    return value, least_gain(this, worth, least, last - before, num, rate)


def best_forwards(
    this: BatchRound,
    worth: Worth,
    gains: list[float],
    confidence: list[float],
    most: int,
    rate: float,
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
    most = min(most, max(_MOST_NODES // num, 1))
    draft, target = this.draft.listed(num), this.target.listed(len(worth) - 1 + most * num)
    nodes, more = worth if isinstance(worth, list) else worth.tolist(), gains
    made: list[list[float]] = []
    best, chosen, fixed, fastest = -1.0, (nodes, 0), this.fixed + this.behind, np.inf
    for number in range(1, most + 1):
        made.append(sorted(more))
        nodes = sorted(nodes + more, reverse=True)
        count, tokens, _ = this.best_number(nodes, target, fixed + number * draft[num])
        level = max(nodes[count], LEAST)
        # Only leaves whose children are verified would run.
        rows = [num - bisect_left(own, level) for own in made]
        seconds = fixed + target[count] + sum([draft[own] for own in rows])
        fastest = min(fastest, seconds / tokens)
        value = this.value(tokens, seconds) if rows[0] else 0.0
        if value > best:
            best, chosen = value, (nodes, count)
        more = list(map(mul, more, confidence))
    nodes, count = chosen
    row = target[count] - target[count - 1]
    return best, least_gain(this, worth, nodes[count], row, num, rate), this.saved(fastest)


def saved_usually(this: BatchRound, num: int, confidence: float, most: int) -> float:
    """Seconds per token of each of ``num`` requests that drafting for all of them usually saves."""
    usual = [confidence] * num
    return best_forwards(this, [this.roots], usual, usual, most, 0.0)[2]


def saved_by_others(
    this: BatchRound,
    worth: Worth,
    gains: list[float],
    confidence: list[float],
    most: int,
    some: list[int],
) -> float:
    """What ``best_forwards`` saves without a gain from some of the requests."""
    left = gains.copy()
    for i in some:
        left[i] = 0.0
    return best_forwards(this, worth, left, confidence, most, 0.0)[2]


def least_gain(
    this: BatchRound, worth: Worth, verified: float, target_row: float, num: int, rate: float
) -> float:
    """Least gain of a leaf that is worth its row in the next draft forward.

    Without it the target's row goes to the best of the drafted nodes that are left out, or is
    saved. Other leaves' children are no such nodes: they need a row of the forward themselves.

    Args:
        this: The round.
        worth: (1 + N,) of the roots and the drafted nodes, as for ``BatchRound.best``.
        verified: What the least of the nodes that would be verified is worth, the ones that the
            forward is to make among them.
        target_row: Seconds of the target's row that is verified last.
        num: Requests.
        rate: Tokens that a second is worth.
    """
    saved, other = target_row * rate, _best_below(worth, verified)
    least = (other if other > saved else saved) + this.draft_row(num, rate)  # more than LEAST
    return least if least > verified else verified


def _best_below(worth: Worth, verified: float) -> float:
    """The best drafted node that is worth less than this; 0 without any."""
    if isinstance(worth, list):
        first = bisect_right(worth, -verified, key=neg)
        return worth[first] if first < len(worth) else 0.0
    below = int(worth[::-1].searchsorted(verified))
    return worth.item(len(worth) - below) if below else 0.0


def beats_plain(this: BatchRound, confidence: list[float], most: int, margin: float) -> bool:
    """Whether trees that cost no forward would beat plain decoding by this share of its value.

    They are drafted beside a verification that is over: as deep as would have fitted there. Each
    node has a row of the draft, which the re-root moves.

    Args:
        this: The round.
        confidence: (B,) each request's mean confidence.
        most: Draft forwards.
        margin: Share.
    """
    depth = max(int(this.verification / max(this.draft.forward(len(confidence), 0), LEAST)), 1)
    chances = np.array(confidence)
    gains_DB = gains_ahead(chances, chances, min(depth, most))
    worth = -np.sort(-gains_DB.ravel())
    tokens = this.roots + worth.cumsum()
    moving = this.draft.each * np.arange(1, len(worth) + 1)
    seconds = this.target(len(worth))[1:] + moving + (this.overhead + this.stall)
    values = this.value(tokens, seconds)
    return bool(values.max(initial=0.0) > this.plain.value * (1.0 + margin))


def gains_ahead(gains: Floats, confidence: Floats, depth: int) -> Floats:
    """(D, B) gains of a request's next leaves, one below another."""
    gains_DB = np.empty((depth, len(gains)))
    gains_DB[0], gains_DB[1:] = gains, confidence
    return np.multiply.accumulate(gains_DB, axis=0, out=gains_DB)
