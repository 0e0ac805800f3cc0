"""Where 80 % of measurements lie around a prediction. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from benchmarks.campaign.requests import recorded_questions
from benchmarks.campaign.units import Workload
from codesign.fit import Fit
from codesign.fit.prompt_luck import PromptLuck, prompt_luck
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


def luck_of(run: RunComparison, fit: Fit, requests: pd.DataFrame, workload: Workload) -> PromptLuck:
    """Of tokens per round: the questions of all requests are recorded, their words are others."""
    if run.candidate.family == "plain":
        return PromptLuck(0.0, 0.0, 0.0)
    served = Counter(requests["category"].iloc[run.requests["request_id"].to_numpy()])
    asked = recorded_questions(fit.acceptance)
    return prompt_luck(fit.acceptance, served, questions=asked, in_turn=not workload.seconds)


@dataclass(frozen=True, slots=True)
class Likely:
    """Where 80 % of measurements lie, and why: half widths that add up by their squares.

    Attributes:
        mean: Of the simulations.
        simulations: There are only so many.
        served: Luck of the requests that are served, as far as simulations draw it.
        recorded: Luck of the prompts whose acceptance was recorded.
        steps: Held-out errors of the steps' times.
    """

    mean: float
    simulations: float
    served: float
    recorded: float
    steps: float

    @property
    def bounds(self) -> tuple[float, float]:
        """Where they lie."""
        half = math.hypot(self.simulations, self.served, self.recorded, self.steps)
        return self.mean - half, self.mean + half

    @property
    def parts(self) -> list[float]:
        """The half widths relative to the mean, in the order above."""
        parts = (self.simulations, self.served, self.recorded, self.steps)
        return [part / self.mean if self.mean else 0.0 for part in parts]


def likely(values: Sequence[float], times: float, luck: PromptLuck | None = None) -> Likely:
    """Where 80 % of measurements lie.

    Args:
        values: By seed.
        times: Relative standard error of seconds.
        luck: Of the prompts; without it what simulations draw is all there is.
    """
    mean, one = float(np.mean(values)), _one_more(values)
    return Likely(
        mean,
        simulations=one / math.sqrt(len(values)),
        served=one if luck is None else one * luck.share,
        recorded=0.0 if luck is None else SIGMAS * luck.recorded * mean,
        steps=SIGMAS * times * mean,
    )


def likely_replay(draws: Sequence[float], values: Sequence[float], luck: PromptLuck) -> Likely:
    """The same of a replay, whose steps' errors are simulated: queues make more of them, or less.

    Args:
        draws: With steps as unsure as the fit's.
        values: By seed, with the fit's own.
        luck: Of the prompts.
    """
    mean, one = float(np.mean(draws)), _one_more(draws)
    alone = min(_one_more(values), one)
    return Likely(
        mean,
        simulations=one / math.sqrt(len(draws)),
        served=alone * luck.share,
        recorded=SIGMAS * luck.recorded * mean,
        steps=math.sqrt(one**2 - alone**2),
    )


def _one_more(values: Sequence[float]) -> float:
    """How far from the mean another value is, at most, in 80 % of cases."""
    return student_t_quantile(len(values) - 1, 1.0 - TAIL) * float(np.std(values, ddof=1))
