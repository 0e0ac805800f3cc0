"""From recorded agreement to ``Calibration``: what a draft's confidence is worth.

P(accept) = sigmoid(slope * logit(confidence) + intercept), fitted to whether the target chose the
draft's likeliest token. Kinds of prompt with few tokens are drawn to the overall fit.

Must not import torch.

Source:
    Platt scaling (Platt 1999) with the confidence's logit as the score; expected calibration error
    as in Guo et al., arXiv:1706.04599.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import ABSENT_LOG_PROB, AcceptanceProfile, Recording
from codesign.policy.cost import Calibration

Floats = NDArray[np.float64]

_EDGE = 1e-6  # confidences are clipped to [1e-6, 1 - 1e-6], as the policies do
_PRIOR = 1.0  # pull of the identity: only counts when every answer is the same
_CATEGORY_PRIOR = 15.0  # pull of the overall fit: as much as about 100 tokens
_FOLDS = 5
_BINS = 10


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """Calibrations with their worth.

    Attributes:
        overall: Of all prompts.
        by_category: Of each kind of prompt.
        error_before: Expected calibration error of the confidences as they are.
        error_after: The same for calibrated ones, on requests that were not fitted to; None when
            only one request was recorded.
        num_tokens: Positions at which the drafter named a token.
    """

    overall: Calibration
    by_category: dict[str, Calibration]
    error_before: float
    error_after: float | None
    num_tokens: int


def fit_calibration(profile: AcceptanceProfile) -> CalibrationFit:
    """Fit the calibration of an acceptance profile, overall and by category."""
    from scipy.special import expit  # scipy takes 0.5 s to import; whoever reads a fit needs none

    requests = [r for group in profile.recordings.values() for r in group]
    score_N, agreed_N = _observations(requests)
    overall = _fit(score_N, agreed_N, Calibration(), _PRIOR)
    by_category = {
        category: _fit(*_observations(group), overall, _CATEGORY_PRIOR)
        for category, group in profile.recordings.items()
    }
    return CalibrationFit(
        overall=overall,
        by_category=by_category,
        error_before=calibration_error(expit(score_N), agreed_N),
        error_after=_held_out_error(requests),
        num_tokens=len(score_N),
    )


def calibration_error(chance_N: Floats, agreed_N: Floats) -> float:
    """Expected calibration error: mean distance of chance and frequency over ten equal bins."""
    if len(chance_N) == 0:
        return 0.0
    bin_N = np.minimum((chance_N * _BINS).astype(np.int64), _BINS - 1)
    gap_N = np.bincount(bin_N, weights=chance_N - agreed_N, minlength=_BINS)
    return float(np.abs(gap_N).sum() / len(chance_N))


def _observations(requests: list[Recording] | tuple[Recording, ...]) -> tuple[Floats, Floats]:
    """Logit of the likeliest token's chance and whether the target chose it, per position."""
    log_prob_N = np.concatenate([r.log_probs[:, 0] for r in requests])
    agreed_N = np.concatenate([r.ranks == 0 for r in requests]).astype(np.float64)
    named = log_prob_N > ABSENT_LOG_PROB
    chance_N = np.clip(np.exp(log_prob_N[named]), _EDGE, 1.0 - _EDGE)
    return np.log(chance_N) - np.log1p(-chance_N), agreed_N[named]


def _fit(score_N: Floats, agreed_N: Floats, prior: Calibration, strength: float) -> Calibration:
    """Most likely slope (at least 0) and intercept, with a normal prior around ``prior``."""
    from scipy.optimize import minimize
    from scipy.special import expit

    centre = np.array([prior.slope, prior.intercept])

    def loss(coefficients: Floats) -> tuple[float, Floats]:
        logit_N = coefficients[0] * score_N + coefficients[1]
        away = coefficients - centre
        value = np.logaddexp(0.0, logit_N).sum() - agreed_N @ logit_N
        residual_N = expit(logit_N) - agreed_N
        gradient = np.array([residual_N @ score_N, residual_N.sum()]) + strength * away
        return float(value + 0.5 * strength * away @ away), gradient

    found = minimize(loss, centre, jac=True, method="L-BFGS-B", bounds=[(0.0, None), (None, None)])
    slope, intercept = found.x.tolist()
    return Calibration(slope, intercept)


def _held_out_error(requests: list[Recording]) -> float | None:
    """Calibration error when each request's chances come from a fit to the others."""
    from scipy.special import expit

    folds = min(_FOLDS, len(requests))
    if folds < 2:
        return None
    chances, answers = [], []
    for fold in range(folds):
        calibration = _fit(
            *_observations([r for i, r in enumerate(requests) if i % folds != fold]),
            Calibration(),
            _PRIOR,
        )
        score_N, agreed_N = _observations(requests[fold::folds])
        chances.append(expit(calibration.slope * score_N + calibration.intercept))
        answers.append(agreed_N)
    return calibration_error(np.concatenate(chances), np.concatenate(answers))
