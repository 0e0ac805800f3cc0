"""Where 80 % of measurements lie around a prediction. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd

from codesign.fit import Fit
from codesign.fit.prompt_luck import served_error
from codesign.planner.student_t import student_t_quantile
from codesign.validate import RunComparison

TAIL, SIGMAS = 0.1, 1.2816  # of an 80 % interval, on each side
MEDIAN = 0.6745  # of the size of a normal error, in standard deviations


def times_sigma(run: RunComparison, fit: Fit, *, waits_for_prompts: bool) -> float:
    """Relative standard error of a time that is left where the tokens of a round are known.

    Held-out errors of the steps, and of prompts where they are in it, by their share.
    """
    spans = {c.name: c.predicted.value for c in (*run.spans, *run.rounds)}
    label = run.candidate.deployment.unit.label
    parts = [
        (spans.get(op, 0.0), fit.errors[f"{label}/{op}"])
        for op in ("target", "draft", *["prefill"] * waits_for_prompts)
        if f"{label}/{op}" in fit.errors
    ]
    total = sum(seconds for seconds, _ in parts)
    squares = sum((seconds * error / MEDIAN) ** 2 for seconds, error in parts)
    return math.sqrt(squares) / total if total else 0.0


def tokens_sigma(run: RunComparison, fit: Fit, requests: pd.DataFrame) -> float:
    """The same of tokens per round: recorded prompts are a sample, and those served another."""
    if run.candidate.family == "plain":
        return 0.0
    served = requests["category"].iloc[run.requests["request_id"].to_numpy()]
    return served_error(fit.acceptance, Counter(served))


def likely(values: Sequence[float], times: float, tokens: float = 0.0) -> tuple[float, float]:
    """Where 80 % of measurements lie.

    The luck of the prompts is in the seeds, as far as a simulation draws it, and in ``tokens``; the
    larger one counts.

    Args:
        values: By seed.
        times: Relative standard error of seconds.
        tokens: The same of tokens per round.
    """
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    quantile = student_t_quantile(len(values) - 1, 1.0 - TAIL)
    luck = max(quantile * spread * math.sqrt(1 + 1 / len(values)), SIGMAS * tokens * mean)
    half = math.hypot(luck, SIGMAS * times * mean)
    return mean - half, mean + half
