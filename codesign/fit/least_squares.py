"""Non-negative least squares of seconds, with relative residuals and few outliers' weight.

Letters in shapes: S shapes that were timed, P coefficients.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from codesign.errors import HardwareError

Floats = NDArray[np.float64]

_HUBER = 1.345  # residuals beyond this many standard deviations weigh less
_REWEIGHTS = 4
_MOST = 2.0  # times what is told: what lasted longer was interrupted


def non_negative_fit(design_SP: Floats, rest_S: Floats, seconds_S: Floats) -> Floats:
    """(P,) coefficients of the least squares of what is left, relative to whole seconds.

    Args:
        design_SP: What each coefficient is multiplied by, at S shapes.
        rest_S: Seconds that are to be explained.
        seconds_S: Seconds of the whole step, by which both are divided.
    """
    relative_SP = design_SP / seconds_S[:, None]
    scale_P = np.linalg.norm(relative_SP, axis=0)
    scale_P[scale_P == 0.0] = 1.0
    return _nnls()(relative_SP / scale_P, rest_S / seconds_S)[0] / scale_P


def robust_fit(design_SP: Floats, seconds_S: Floats) -> Floats:
    """(P,) non-negative coefficients; relative residuals, Huber weights by reweighting."""
    nnls = _nnls()
    relative_SP = design_SP / seconds_S[:, None]
    scale_P = np.linalg.norm(relative_SP, axis=0)  # columns differ by many powers of ten
    scale_P[scale_P == 0.0] = 1.0
    relative_SP = relative_SP / scale_P
    root_weight_S = np.ones(len(seconds_S))
    solution_P = np.zeros(design_SP.shape[1])
    for _ in range(_REWEIGHTS):
        solution_P, _ = nnls(relative_SP * root_weight_S[:, None], root_weight_S)
        found_S = _root_weights(relative_SP @ solution_P - 1.0)
        if found_S is None:
            break
        root_weight_S = found_S
    return solution_P / scale_P


def fit_means(design_SP: Floats, seconds_S: Floats) -> Floats:
    """(P,) as ``robust_fit``, of what scatters: residuals are relative to what is told.

    Relative to what was measured, the smallest of many would count most. Times scatter further up
    than down, and outliers weigh little: so the whole of those that lasted less than ``_MOST``
    times what is told is told as measured.
    """
    solution_P = robust_fit(design_SP, seconds_S)
    for _ in range(2 * _REWEIGHTS):
        told_S = np.maximum(design_SP @ solution_P, 1e-3 * seconds_S.mean())
        root_weight_S = _root_weights(seconds_S / told_S - 1.0)
        if root_weight_S is None:
            break
        solution_P = non_negative_fit(
            design_SP * root_weight_S[:, None], seconds_S * root_weight_S, told_S
        )
    told_S = design_SP @ solution_P
    counts_S = (told_S > 0.0) & (seconds_S < _MOST * told_S)
    if not counts_S.any():
        return solution_P
    return solution_P * (seconds_S[counts_S].sum() / told_S[counts_S].sum())


def _root_weights(residual_S: Floats) -> Floats | None:
    """(S,) roots of Huber's weights; None where nothing is left to weigh."""
    size_S = np.abs(residual_S)
    spread = 1.4826 * _median(size_S)  # standard deviation, if it were normal
    if spread < 1e-9:
        return None
    bound = _HUBER * spread
    return np.sqrt(np.minimum(1.0, bound / np.maximum(size_S, bound)))


def _median(values_S: Floats) -> float:
    """As ``np.median``, which takes a third of a fit for the few values that these are."""
    ascending_S = np.sort(values_S)
    middle = len(ascending_S) // 2
    return float(ascending_S[middle] + ascending_S[~middle]) / 2.0


def _nnls() -> Callable[[Floats, Floats], tuple[Floats, float]]:
    try:
        from scipy.optimize import nnls
    except ImportError as err:
        raise HardwareError(
            "fitting a profile needs scipy, which is not installed. "
            "Install it: pip install 'codesign[fit]'"
        ) from err
    return nnls
