"""Where 80 % of measurements lie around a prediction. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.campaign.alone import rounds_per_token
from benchmarks.campaign.prompt_luck import PromptLuck, prompt_luck
from benchmarks.campaign.questions import as_served, recorded_questions
from benchmarks.campaign.requests import alike, tokens_of
from benchmarks.campaign.units import Workload
from codesign.fit import Fit
from codesign.plan import Plan
from codesign.planner.student_t import student_t_quantile
from codesign.sim.batches import hears_early, policy_of
from codesign.validate import RunComparison

TAIL, SIGMAS = 0.1, 1.2816  # of an 80 % interval, on each side
NO_LUCK = PromptLuck(0.0, 0.0)


def times_sigma(run: RunComparison, fit: Fit, *, waits_for_prompts: bool) -> float:
    """Relative standard error of a time that is left where the tokens of a round are known.

    Errors of the steps, and of prompts where they are in it, by their share; and what machines do
    between a profile and its runs.
    """
    spans = {c.name: c.predicted.value for c in (*run.spans, *run.rounds)}
    label, batch = run.candidate.deployment.unit.label, run.candidate.max_batch
    parts = [
        (spans.get(op, 0.0), fit.standard_error(f"{label}/{op}", requests=requests))
        for op, requests in (("target", batch), ("draft", batch), ("prefill", 1))
        if f"{label}/{op}" in fit.errors and (waits_for_prompts or op != "prefill")
    ]
    total = sum(seconds for seconds, _ in parts)
    squares = sum((seconds * error) ** 2 for seconds, error in parts)
    if not total:
        return 0.0
    return math.hypot(math.sqrt(squares) / total, fit.drift(label, total, requests=batch))


def luck_of(
    run: RunComparison, plan: Plan, fit: Fit, workload: Workload, *, seed: int
) -> PromptLuck:
    """Of tokens per round: the questions of all requests are recorded, their words are others.

    Args:
        run: Which.
        plan: It is one of.
        fit: That predicts it.
        workload: What it serves.
        seed: Of its requests.
    """
    candidate = run.candidate
    if candidate.family == "plain":
        return NO_LUCK
    served = plan.requests().iloc[run.requests["request_id"].to_numpy()]
    cost = fit.costs[candidate.deployment.unit.label]
    recorded = as_served(fit.acceptance, tokens_of(workload))
    rounds = rounds_per_token(
        policy_of(candidate.speculation, fit, cost, plan.slo, plan.serving),
        recorded,
        hears_early=hears_early(candidate, plan.serving),
    )
    return prompt_luck(
        recorded,
        Counter(served["category"]),
        questions=recorded_questions(recorded),
        in_turn=not workload.seconds,
        rounds=rounds,
        alike=alike(served, fit.target, workload, seed=seed),
    )


@dataclass(frozen=True, slots=True)
class Likely:
    """Where 80 % of measurements lie, and why: half widths that add up by their squares.

    Attributes:
        mean: Of the simulations.
        simulations: There are only so many.
        served: Luck of the requests that are served, and who waits for whom among them.
        recorded: Luck of the prompts whose acceptance was recorded.
        steps: Errors of the steps' times.
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


def likely(
    values: Sequence[float],
    times: float,
    luck: PromptLuck = NO_LUCK,
    lengths: Sequence[float] = (),
) -> Likely:
    """Where 80 % of measurements lie.

    Args:
        values: By seed.
        times: Relative standard error of seconds.
        luck: Of the prompts.
        lengths: Tokens of a round by seed, which luck is of: a figure has as much luck as it goes
            with them. What else simulations differ by is left to chance.
    """
    mean = float(np.mean(values))
    with_lengths, left = _going_with(lengths, values)
    return Likely(
        mean,
        simulations=_one_more(values) / math.sqrt(len(values)),
        served=math.hypot(SIGMAS * luck.served * with_lengths, _one_more(left)),
        recorded=SIGMAS * luck.recorded * with_lengths,
        steps=SIGMAS * times * mean,
    )


def likely_replay(
    draws: Sequence[float],
    values: Sequence[float],
    luck: PromptLuck,
    lengths: Sequence[float],
) -> Likely:
    """The same of a replay, whose steps' errors are simulated: queues make more of them, or less.

    Args:
        draws: With steps as unsure as the fit's.
        values: By seed, with the fit's own.
        luck: Of the prompts.
        lengths: As for ``likely``.
    """
    one = _one_more(draws)
    alone = likely(values, 0.0, luck, lengths)
    return Likely(
        float(np.mean(draws)),
        simulations=one / math.sqrt(len(draws)),
        served=alone.served,
        recorded=alone.recorded,
        steps=math.sqrt(max(one**2 - _one_more(values) ** 2, 0.0)),
    )


def _going_with(lengths: Sequence[float], values: Sequence[float]) -> tuple[float, Sequence[float]]:
    """By how much values change as lengths grow by all of themselves, and what is left of them."""
    if not len(lengths) or not np.ptp(lengths):
        return 0.0, values
    relative = np.asarray(lengths) / np.mean(lengths) - 1.0
    slope = float(relative @ np.asarray(values) / (relative @ relative))
    return abs(slope), list(np.asarray(values) - slope * relative)


def _one_more(values: Sequence[float]) -> float:
    """How far from the mean another value is, at most, in 80 % of cases."""
    return student_t_quantile(len(values) - 1, 1.0 - TAIL) * float(np.std(values, ddof=1))
