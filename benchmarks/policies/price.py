"""What a policy's decisions take of a round: processor time of its methods over predicted seconds.

    python -m benchmarks.compare_policies price

Decisions before the candidates delay the round; those about forwards beside the verification delay
the draft alone; what is settled while a forward runs delays nothing. Every repetition plays the
same rounds, and the fastest of each round counts: other processes only ever make one slower.
Shares are means over rounds: where a policy rests or repeats rounds, most have no evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.policies.cases import Machine
from benchmarks.policies.figures import SMALL
from codesign.config import SLO, Serving, parse_deployment
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT, shipped_pair
from codesign.policy.protocol import DraftSide
from codesign.policy.speculation import parse_policy
from codesign.prompts import CATEGORIES
from codesign.sim import cost_of
from codesign.sim.acceptance import SyntheticDrafter
from codesign.sim.batches import policy_of
from codesign.sim.played import PlayedBatch
from codesign.sim.stretches import Luck
from codesign.sim.timing import ApartTiming, TogetherTiming
from codesign.sim.work import Entering

BATCHES = (1, 8, 32, 64, 128)
WAYS = ("specserve-8 on 8", "batch-tree-16x2x8 on 8", "async-batch-tree-16x2x8 on 7+1")
CPU_WAYS = ("batch-tree-16x2x8 on 2", "async-batch-tree-16x2x8 on 1+1")
SMALL_WAYS = ("specserve-8 on 1", "batch-tree-16x2x8 on 1")
SMALL_PAIR = "h200", "llama-3.1-8b:int4", "llama-3.2-1b:int4"
ROUNDS, LONG = slice(10, 40), slice(100, 260)  # that count; an 8B rests in many, but not at first
REPEATS, PASSES = 3, 8
_KINDS = {
    "before": ("begin", "leaves", "select"),
    "beside": ("overlap_leaves",),
    "settled": ("settle",),
}


class _Clock:
    """Adds up processor time of calls."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_KINDS, 0.0)

    def wrap(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.seconds[kind] += time.thread_time() - start

        return timed


def measure(store: Any, machine: Machine) -> None:
    """All ways and batch sizes, in turns: a busy spell of the machine spoils a pass, not a row."""
    small = shipped_pair(*SMALL_PAIR)
    assert small is not None, "the package ships this pair"
    fits = (
        (WAYS, BATCHES, machine.fit(), machine.name, ROUNDS),
        (CPU_WAYS, (1, 4, 8), Fit.load(DEFAULT_FIT), "cpu", ROUNDS),
        (SMALL_WAYS, (1, 2, 4, 8), Fit.load(small), SMALL, LONG),
    )
    cases = {
        f"price/{name}/{way}/{batch}": (way, fit, batch, counted)
        for ways, batches, fit, name, counted in fits
        for way in ways
        for batch in batches
    }
    wanted = {key: case for key, case in cases.items() if key not in store.results}
    found: dict[str, dict[str, Any]] = {}
    for key, case in [*wanted.items()] * PASSES:
        price = _price(*case)
        if key not in found or price["before"] < found[key]["before"]:
            found[key] = price
    for key, price in found.items():
        store.get(key, lambda p=price: p)


def _price(way: str, fit: Fit, batch: int, counted: slice) -> dict[str, Any]:
    played = [_played(way, fit, batch, counted.stop) for _ in range(REPEATS)]
    quickest = (np.min(each, axis=0) for each in zip(*played, strict=True))
    before, beside, settled, rounds = (each[counted] for each in quickest)
    return {
        "round": float(rounds.mean()),
        "before": float(before.mean()),
        "beside": float(beside.mean()),
        "settled": float(settled.mean()),
        "share": float(before.mean() / rounds.mean()),
    }


def _played(way: str, fit: Fit, batch: int, num_rounds: int) -> list[list[float]]:
    """Seconds in each round of every kind of deciding, and of the round."""
    policy, _, label = way.partition(" on ")
    deployment = parse_deployment(label)
    cost = cost_of(fit, label)
    built = policy_of(parse_policy(policy), fit, cost, SLO(tpot=0.1), Serving())
    clock = _Clock()
    for kind, names in _KINDS.items():
        for name in names:
            setattr(built, name, clock.wrap(getattr(built, name), kind))
    entering = [Entering(i, CATEGORIES[i % 6], 500, 600) for i in range(batch)]
    outputs = [request.output_tokens for request in entering]
    luck = Luck.of(fit.answers, [request.category for request in entering], outputs, 1)
    drafter = SyntheticDrafter(fit.answers, 1, luck.path)
    played = PlayedBatch(DraftSide(built), drafter, hears_early=deployment.draft_workers > 0)
    is_apart = deployment.draft_workers > 0
    timing = ApartTiming(cost) if is_apart else TogetherTiming(cost, is_plain=False)
    now, found = 0.0, []
    for _ in range(num_rounds):
        clock.seconds = dict.fromkeys(clock.seconds, 0.0)
        seconds = timing.spans(now, 0.0, played.begin(entering, now)).seconds
        played.end()
        entering, now = [], now + seconds
        found.append([*clock.seconds.values(), seconds])
    return [list(each) for each in zip(*found, strict=True)]
