"""How far a predicted figure may be off: by the errors of the fit, and by the luck of the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from codesign.answer_parts import tokens_of_parts
from codesign.candidate import SIGMAS, Candidate, Interval
from codesign.fit import MEDIAN_ERROR, ROOFLINE
from codesign.planner.student_t import student_t_quantile

if TYPE_CHECKING:
    from codesign.fit import Fit
    from codesign.records import RequestRecord

_MANY = 1000  # degrees of freedom of a spread that many seeds were averaged for
_TAIL = 0.05  # chance of another run to lie beyond an interval, on each side


def step_error(fit: Fit, candidate: Candidate, spans: Mapping[str, float]) -> float:
    """Half width of an interval for a round's time, relative: of the fit, and of the machine.

    The fit's are the errors of target and draft forwards on measurements that it has not seen,
    weighted by their share of the round. Half of the errors are larger than the median that is
    kept of each, and those of target and draft have nothing to do with each other. The errors of
    data sheets have: they are the most that both should be off, a half width already.

    Args:
        fit: Held-out errors by step, and the machine's drift.
        candidate: Whose.
        spans: Mean seconds of a round's spans, by name.
    """
    label = candidate.deployment.unit.label
    parts = [
        (spans.get(op, 0.0), fit.errors[f"{label}/{op}"])
        for op in ("target", "draft")
        if f"{label}/{op}" in fit.errors
    ]
    total = sum(seconds for seconds, _ in parts)
    if not total:
        return 0.0
    if fit.origin == ROOFLINE:
        return sum(seconds * error for seconds, error in parts) / total
    of_fit = math.hypot(*[seconds * error for seconds, error in parts]) / MEDIAN_ERROR / total
    drift = fit.drift(label, total, requests=candidate.max_batch)
    return SIGMAS * math.hypot(of_fit, drift)


def tokens_error(fit: Fit, output_tokens: ArrayLike) -> float:
    """Relative error of the tokens of a round with a draft, over answers of such lengths.

    A standard error of recordings of the pair; of any other acceptance the most that it should be
    off (``Fit.errors``). The errors of an answer's parts are weighed by the tokens in them. Tokens
    of late parts take fewer rounds, so this is up to 7 % of itself too large for the fits that
    ship. Assumed: tokens beyond the recorded ones have the error of the last part; without errors
    of parts (answers recorded whole, acceptance from elsewhere, older fits) answers of all lengths
    have the same error.

    Args:
        fit: Its recordings' errors.
        output_tokens: (R,) of each request.
    """
    num_parts = len(fit.parts_covariance)
    if not num_parts:
        return fit.errors.get("acceptance", 0.0)
    tokens_P = tokens_of_parts(np.asarray(output_tokens, np.int64), num_parts).sum(axis=0)
    shares_P = tokens_P / max(tokens_P.sum(), 1)
    return math.sqrt(max(float(shares_P @ np.array(fit.parts_covariance) @ shares_P), 0.0))


def acceptance_error(fit: Fit, candidate: Candidate, output_tokens: ArrayLike) -> float:
    """Half width of an interval for ``tokens_error`` of a candidate; plain decoding has none."""
    if candidate.family == "plain":
        return 0.0
    sigmas = SIGMAS if fit.has_own_recordings else 1.0
    return sigmas * tokens_error(fit, output_tokens)


def time_error(
    fit: Fit, candidate: Candidate, spans: Mapping[str, float], output_tokens: ArrayLike
) -> float:
    """Half width of an interval for the time per token: of a round's time and of its tokens.

    Args:
        fit: Held-out errors of steps and of acceptance.
        candidate: Whose.
        spans: Mean seconds of a round's spans, by name; weights of the steps' errors.
        output_tokens: (R,) of each request.
    """
    tokens = acceptance_error(fit, candidate, output_tokens)
    return math.hypot(step_error(fit, candidate, spans), tokens)


def offered(requests: Sequence[RequestRecord]) -> dict[str, float]:
    """Rates that no plan exceeds: a run lasts until the last request has come, at least.

    Returns:
        "seconds_least", "throughput_most" and "goodput_most"; nothing if all came at once.
    """
    last = max([request.arrival for request in requests], default=0.0)
    if last <= 0:
        return {}
    tokens = sum([request.output_tokens for request in requests])
    rates = {"throughput_most": tokens / last, "goodput_most": len(requests) / last}
    return {"seconds_least": last, **rates}


def bounds_of(
    outcomes: Sequence[Mapping[str, float]], max_batch: int
) -> dict[str, tuple[float, float]]:
    """Least and most that figures can be, of those that have such limits.

    Args:
        outcomes: Figures of each simulation, ``offered`` among them.
        max_batch: Batch limit.
    """
    least = max([figures.get("seconds_least", 0.0) for figures in outcomes])
    most = min([figures.get("throughput_most", math.inf) for figures in outcomes])
    return {
        "acceptance_length": (1.0, math.inf),  # every round emits a token of each of its requests
        "acceptance_rate": (0.0, 1.0),
        "mean_batch": (1.0, max_batch),  # steps in which no request decodes do not count
        "mean_running": (1.0, max_batch),
        "seconds": (least, math.inf),
        "throughput": (0.0, most),
    }


def interval_over_seeds(
    values: Sequence[float],
    error: float,
    spread: float = 0.0,
    *,
    bounds: tuple[float, float] = (0.0, math.inf),
    is_rate: bool = False,
) -> Interval:
    """Mean, and where further runs lie; see ``predict.score``.

    Args:
        values: One per seed.
        error: Relative error of the fit.
        spread: Relative standard deviation over seeds, for when there is a single one.
        bounds: Least and most that the figure can be.
        is_rate: The error is of the time that it takes: a rate is divided by 1 + error at worst.
    """
    value, num = float(np.mean(values)), len(values)
    if num > 1:
        deviation, freedom = float(np.std(values, ddof=1)), num - 1
    else:
        deviation, freedom = abs(value) * spread, _MANY
    quantile = student_t_quantile(freedom, 1.0 - _TAIL) if deviation else 0.0
    luck = quantile * deviation * math.sqrt(1.0 + 1.0 / num)
    below = math.hypot(luck, abs(value) * (error / (1.0 + error) if is_rate else error))
    above = math.hypot(luck, abs(value) * error)
    least, most = bounds
    return Interval(value, max(value - below, least), min(value + above, most))


def hull(interval: Interval, values: Sequence[float], top: float) -> Interval:
    """The interval, made to hold ``values`` too; nothing is below 0 or above ``top``."""
    low, high = min([interval.low, *values]), max([interval.high, *values])
    return Interval(interval.value, max(low, 0.0), min(high, top))
