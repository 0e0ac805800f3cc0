"""Plain decoding of all requests at once and by turns, beside each other.

    python -m benchmarks.bench_turns [--shapes llama-3-70b ...] [--ranks 1 2 4] [--out FOLDER]

Random int4 weights in a published shape, so nothing is downloaded. First rounds of ``KNOTS``
requests at once are timed, with the host in the chain and with ranks that run ahead of it: these
are the step times by which requests take turns (codesign/policy/turns.py). Then ``SIZES`` requests
that are all there at once are served in both ways in turn. Told are the tokens a second of the
rounds, and what the step times had said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plain_ranks import AskedTarget, PlainRanks, measure_shapes, plain_ranks
from codesign.engine.gpu.group_target import GroupTarget
from codesign.policy.step_time import StepTime
from codesign.policy.turns import TurnPrices, Turns

KNOTS = (1, 8, 9, 16, 17, 32, 33, 48)
SIZES = (9, 17, 20, 24, 28, 33, 36, 40, 44)
RUNS, WARM_UP = 2, 10
CONTEXT = 128  # KV rows of a request, about: prompts have 64 and answers 128


def step_time(running: PlainRanks) -> StepTime:
    """Seconds of rounds of all requests, by how many they are."""
    seconds = {
        kind: [float(np.median(running.served(n, kind)[0][WARM_UP:])) for n in KNOTS]
        for kind in (AskedTarget, GroupTarget)
    }
    asked, ahead = (np.array(seconds[kind]) for kind in (AskedTarget, GroupTarget))
    less = max(float(np.median(asked - ahead)), 0.0)
    return StepTime(0.0, KNOTS, tuple(asked.tolist()), ahead=less)


def measure(shape: str, ranks: int, model: Path) -> list[dict[str, Any]]:
    """Rows of the table of one shape on so many GPUs."""
    rows = []
    with plain_ranks(ranks, model, max(*KNOTS, *SIZES)) as running:
        step = step_time(running)
        print({n: round(1e3 * s, 3) for n, s in zip(KNOTS, step.seconds, strict=True)}, flush=True)
        for size in SIZES:
            rows.append({"shape": shape, "ranks": ranks, **_row(running, step, size)})
            print(rows[-1], flush=True)
    return rows


def _row(running: PlainRanks, step: StepTime, size: int) -> dict[str, Any]:
    prices = TurnPrices(step)
    at_once = prices.count(size, CONTEXT * size)
    whole = step(size, CONTEXT * size, size)
    found: dict[str, list[float]] = {"all": [], "turns": []}
    outputs = []
    for _ in range(RUNS):
        for way, seconds in found.items():
            turns = Turns(prices) if way == "turns" else None
            rounds, told, _ = running.served(size, turns=turns)
            seconds.append(float(rounds.sum()))
            outputs.append(told)
    tokens = sum([len(output) - 1 for output in outputs[0].values()])
    rates = {way: tokens / min(seconds) for way, seconds in found.items()}
    return {
        "requests": size,
        "at_once": at_once,
        "all_tokens_s": round(rates["all"], 1),
        "turns_tokens_s": round(rates["turns"], 1),
        "faster": round(rates["turns"] / rates["all"], 3),
        "predicted": round(whole / (whole - prices.saved(size, CONTEXT * size)), 3),
        "runs_that_differ": sum(told != outputs[0] for told in outputs),
    }


def main() -> None:
    """Measure, print and keep the rows."""
    measure_shapes("turns", __doc__, measure, f"the quicker of {RUNS} runs of each in turn")


if __name__ == "__main__":
    main()
