"""From recorded agreement to ``Calibration``: what a draft's confidence is worth.

P(accept) = sigmoid(slope * logit(confidence) + intercept), fitted to whether the target chose the
draft's likeliest token. One for all kinds of prompt: on the recordings that ship with the package a
calibration per kind made SpecServe 0.4 % faster and trees not at all, and it would have every
request carry its kind to the draft side.

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
from codesign.calibration_log import NUM_BINS
from codesign.policy.cost import Calibration

Floats = NDArray[np.float64]

_EDGE = 1e-6  # confidences are clipped to [1e-6, 1 - 1e-6], as the policies do
_PRIOR = 1.0  # pull of the identity: only counts when every answer is the same
_MAX_STEPS = 50  # of Newton's method, which needs about six
_EXACT = 1e-10  # coefficients that move by less are found
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """A calibration with its worth.

    Attributes:
        calibration: Of all prompts.
        error_before: Expected calibration error of the confidences as they are.
        error_after: The same for calibrated ones, on requests that were not fitted to; None when
            only one request was recorded.
        num_tokens: Positions at which the drafter named a token.
    """

    calibration: Calibration
    error_before: float
    error_after: float | None
    num_tokens: int


def fit_calibration(profile: AcceptanceProfile) -> CalibrationFit:
    """Fit the calibration of an acceptance profile."""
    requests = [r for group in profile.recordings.values() for r in group]
    score_N, agreed_N = _observations(requests)
    return CalibrationFit(
        calibration=_fit(score_N, agreed_N),
        error_before=calibration_error(_sigmoid(score_N), agreed_N),
        error_after=_held_out_error(profile),
        num_tokens=len(score_N),
    )


def calibration_error(chance_N: Floats, agreed_N: Floats) -> float:
    """Expected calibration error: mean distance of chance and frequency over ten equal bins."""
    if len(chance_N) == 0:
        return 0.0
    bin_N = np.minimum((chance_N * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gap_N = np.bincount(bin_N, weights=chance_N - agreed_N, minlength=NUM_BINS)
    return float(np.abs(gap_N).sum() / len(chance_N))


def _observations(requests: list[Recording] | tuple[Recording, ...]) -> tuple[Floats, Floats]:
    """Logit of the likeliest token's chance and whether the target chose it, per position."""
    log_prob_N = np.concatenate([r.log_probs[:, 0] for r in requests])
    agreed_N = np.concatenate([r.ranks == 0 for r in requests]).astype(np.float64)
    named = log_prob_N > ABSENT_LOG_PROB
    chance_N = np.clip(np.exp(log_prob_N[named]), _EDGE, 1.0 - _EDGE)
    return np.log(chance_N) - np.log1p(-chance_N), agreed_N[named]


def _fit(score_N: Floats, agreed_N: Floats) -> Calibration:
    """Most likely slope (at least 0) and intercept, with a normal prior around the identity."""
    identity = Calibration()
    ones_N = np.ones_like(score_N)
    slope, intercept = _regress(
        np.column_stack([score_N, ones_N]), agreed_N, np.array([identity.slope, identity.intercept])
    ).tolist()
    if slope < 0.0:  # the loss is convex, so that the best slope that may be is the nearest
        slope = 0.0
        intercept = _regress(ones_N[:, None], agreed_N, np.array([identity.intercept])).item()
    return Calibration(slope, intercept)


def _regress(design_NP: Floats, agreed_N: Floats, centre_P: Floats) -> Floats:
    """(P,) coefficients of the logit, pulled to ``centre_P``: Newton's method, steps halved."""

    def loss(found_P: Floats) -> float:
        logit_N, away_P = design_NP @ found_P, found_P - centre_P
        likelihood = agreed_N @ logit_N - np.logaddexp(0.0, logit_N).sum()
        return float(0.5 * _PRIOR * away_P @ away_P - likelihood)

    found_P = centre_P
    for _ in range(_MAX_STEPS):
        chance_N = _sigmoid(design_NP @ found_P)
        slope_P = design_NP.T @ (chance_N - agreed_N) + _PRIOR * (found_P - centre_P)
        curvature_PP = (design_NP.T * (chance_N * (1.0 - chance_N))) @ design_NP
        step_P = np.linalg.solve(curvature_PP + _PRIOR * np.eye(len(centre_P)), slope_P)
        now = loss(found_P)
        while np.abs(step_P).max() > _EXACT and loss(found_P - step_P) > now:
            step_P = step_P / 2.0
        if np.abs(step_P).max() <= _EXACT:
            break
        found_P = found_P - step_P
    return found_P


def _sigmoid(logit_N: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(0.5 * logit_N)  # in this form nothing overflows


def held_out_chances(profile: AcceptanceProfile) -> dict[str, list[tuple[Floats, Floats]]]:
    """By kind of prompt and request: (N,) chances fitted to other requests, and what came of them.

    Empty if only one request was recorded.
    """
    kinds = [(kind, r) for kind, group in profile.recordings.items() for r in group]
    folds = min(_FOLDS, len(kinds))
    found: dict[str, list[tuple[Floats, Floats]]] = {}
    for fold in range(folds if folds > 1 else 0):
        calibration = _fit(
            *_observations([r for i, (_, r) in enumerate(kinds) if i % folds != fold])
        )
        for kind, recording in kinds[fold::folds]:
            score_N, agreed_N = _observations([recording])
            chance_N = _sigmoid(calibration.slope * score_N + calibration.intercept)
            found.setdefault(kind, []).append((chance_N, agreed_N))
    return found


def _held_out_error(profile: AcceptanceProfile) -> float | None:
    """Calibration error when each request's chances come from a fit to the others."""
    pairs = [pair for group in held_out_chances(profile).values() for pair in group]
    if not pairs:
        return None
    return calibration_error(*(np.concatenate([pair[i] for pair in pairs]) for i in range(2)))
