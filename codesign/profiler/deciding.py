"""What deciding costs on this host: a batch tree's own Python, without any forward.

Profiled steps hold what every policy's trees cost the host, but no decision about a batch. Between
two looks an engine launches a step and waits for it, so that little of what a look needs is in the
caches still: they are filled with other numbers before each look that is timed. Without that a look
took a fourth of what it took in rounds that were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from codesign.policy.batch_tree import BatchTree
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.cost import StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Progress
from codesign.policy.spec import SpeculationSpec

BATCHES = (1, 8, 64)
_ROUNDS, _PROMPT, _LIMIT = 16, 8, 1 << 20
# Steps by which some forwards pay in every round, at any of these batches.
_TARGET = StepTime.linear(alpha=0.0, gamma=5e-5, delta=0.010)
_DRAFT = StepTime.linear(alpha=0.0, gamma=1e-6, delta=0.001)
_OTHERS = 1 << 22  # numbers that fill the caches: 32 MiB
_SPEC = SpeculationSpec(kind="batch-tree", rows=16, width=2, expansions=8)


def deciding_timings() -> pd.DataFrame:
    """Rows of steps.parquet, but for the deployment: seconds of a look at so many requests."""
    rows = [
        {"op": "deciding", "rows": 0, "requests": batch, "context": 0, "beside": False,
         "seconds": look_seconds(batch)}
        for batch in BATCHES
    ]  # fmt: skip
    return pd.DataFrame(rows)


def look_seconds(batch: int) -> float:
    """Seconds of a look at the trees of a batch: one before each draft forward, one at the end."""
    policy = BatchTree(_SPEC, Goodput(_DRAFT, _TARGET))
    trees = [
        BudgetTree(1, base_len=_PROMPT, max_depth=_LIMIT, calibration=policy.calibration)
        for _ in range(batch)
    ]
    draws, others = np.random.default_rng(0), np.zeros(_OTHERS)
    looks = [_round(policy, trees, draws, others, number) for number in range(_ROUNDS)]
    return median(looks)


def _round(
    policy: BatchTree,
    trees: Sequence[BudgetTree],
    draws: np.random.Generator,
    others: NDArray[np.float64],
    number: int,
) -> float:
    """Seconds of a look in one round; trees are drafted and re-rooted beside the clock."""
    policy.now = 0.02 * number
    progress = [Progress()] * len(trees)
    others += 1.0
    start = perf_counter()
    policy.begin(trees, progress)
    leaves = policy.leaves(trees, 0)
    spent, done = perf_counter() - start, 0
    while any(leaves):
        policy.settle()  # beside the draft's forward
        _expand(trees, leaves, draws)
        done += 1
        others += 1.0
        start = perf_counter()
        leaves = policy.leaves(trees, done)
        spent += perf_counter() - start
    start = perf_counter()
    policy.select(trees)
    spent += perf_counter() - start
    policy.settle()  # beside the target's step
    for tree in trees:
        child = tree.child(0, 0)
        tree.reroot((0, 9) if child is not None and draws.random() < tree.confidence else (9,))
    return spent / (done + 1)


def _expand(
    trees: Sequence[BudgetTree], leaves: Sequence[Sequence[int]], draws: np.random.Generator
) -> None:
    for tree, nodes in zip(trees, leaves, strict=True):
        if not nodes:
            continue
        tree.expand(nodes)
        for node in nodes:
            first = float(draws.uniform(0.3, 0.95))
            chances = (first, 0.6 * (1.0 - first), 0.2 * (1.0 - first))
            tree.add_children(node, range(len(chances)), np.log(chances).tolist())
