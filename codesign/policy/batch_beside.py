"""Which leaves of a batch run beside the verification, and which requests' prompts with them.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from codesign.policy.batch_round import LEAST, BatchRound, Floats
from codesign.policy.batch_rows import leaves_above, no_leaves
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.goodput import Goodput
from codesign.policy.traffic import COLD, Traffic


def leaves_beside(
    this: BatchRound,
    goodput: Goodput,
    traffic: Traffic,
    trees: Sequence[BudgetTree],
    confidence: Floats,
    tops: Floats,
    *,
    width: int,
    rate: float,
) -> tuple[list[list[int]], float]:
    """Leaves whose children may be worth a row, and seconds of the prompts run with them.

    Args:
        this: The round.
        goodput: What prompts of the draft take.
        traffic: How long answers are.
        trees: B of them.
        confidence: (B,) each request's mean confidence.
        tops: (B,) log chance of its likeliest leaf.
        width: Most leaves of a tree.
        rate: Tokens that a second is worth.
    """
    level = this.draft_row(len(trees), rate)
    bounds = np.minimum(np.log(level / np.maximum(confidence, LEAST)), 0.0)
    leaves = no_leaves(trees)
    prompts = 0.0
    paying = (tops >= bounds).nonzero()[0]
    for i, bound in zip(paying.tolist(), bounds[paying].tolist(), strict=True):
        tree = trees[i]
        # A new request's prompt runs while the target runs it, too.
        if tree.missing >= COLD and tree.emitted:
            seconds = prompts + goodput.draft_prompt_seconds(tree.missing)
            seconds -= goodput.draft_prompts_once if prompts else 0.0
            gain, late = float(confidence[i]), this.beside + seconds - this.verification
            # What drafting for it will yield, against what running what it missed delays all.
            rounds = float(traffic.expected_left(tree.emitted)) / (1.0 + gain)
            if gain * rounds <= rate * late:
                continue
            prompts = seconds
        leaves[i] = leaves_above(tree, width, bound)
    return leaves, prompts
