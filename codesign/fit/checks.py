"""What no fit and no timing can be: said when a file is read, not by what comes of it.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from codesign.artifacts.fields import checked
from codesign.config import parse_deployment
from codesign.errors import InputError
from codesign.fit.round_costs import FORWARDS
from codesign.fit.steps import MEASURE
from codesign.policy.cost import StepTime
from codesign.policy.walk import Sampling

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

_MOST = 2**40  # rows, or seconds, of a step: far more than there can be
_MOST_SLOPE, _MOST_INTERCEPT = 20.0, 100.0  # of a calibration, by far


def sound(fit: Fit) -> Fit:
    """The same, if every field holds what it says it does, and no time or error is absurd.

    Raises:
        ValueError: If one does not.
        InputError: If tokens cannot be sampled so.
    """
    checked(fit)
    Sampling(fit.temperature, fit.top_k, fit.top_p)
    for label, cost in fit.costs.items():
        parse_deployment(label)
        steps = {name: getattr(cost, name) for name in FORWARDS}
        for name, value in {**asdict(cost), **steps}.items():
            wrong = [number for number in _numbers(value) if not 0 <= number < _MOST]
            if wrong:
                raise ValueError(f"{name} of {label} cannot be {wrong[0]}")
    spreads = (*fit.host_spread.items(), *fit.visit_spread.items())
    for name, error in (*fit.errors.items(), *spreads):
        if not 0 <= error < inf:
            raise ValueError(f"the error of {name} cannot be {error}")
    slope, intercept = fit.calibration.slope, fit.calibration.intercept
    if not (0 <= slope <= _MOST_SLOPE and -_MOST_INTERCEPT <= intercept <= _MOST_INTERCEPT):
        raise ValueError(f"the calibration cannot be {slope:g}, {intercept:g}")
    num_parts = len(fit.parts_covariance)
    for part, row in enumerate(fit.parts_covariance):
        if len(row) != num_parts or row[part] < 0:
            raise ValueError(f"row {part} of parts_covariance cannot be {row}")
    return fit


def _numbers(value: StepTime | float | None) -> Iterable[float]:
    """Those of a cost that are never below 0; ``alone``, what a step takes more or less, may be."""
    if isinstance(value, StepTime):
        several = (value.each, value.tile, value.doubling, value.ahead, value.ahead_each)
        return (value.alpha, *value.rows, *value.seconds, value.gamma, value.cross, *several)
    return () if value is None else (value,)


def check_steps(steps: pd.DataFrame, directory: Path) -> None:
    """Refuse what no timing can be, before it is in a fit."""
    names, numbers = ["deployment", "op"], ["rows", "requests", "context", "seconds"]
    are_texts = all(isinstance(text, str) for name in names for text in steps[name].unique())
    are_numbers = all(steps[name].dtype.kind in "iuf" for name in numbers)
    if not are_numbers or not are_texts or steps["beside"].dtype != bool:
        raise InputError(f"profile {directory} holds timings of another type. {MEASURE}")
    if not (steps.loc[steps["op"].isin(FORWARDS), "seconds"] > 0).all():
        raise InputError(f"profile {directory} holds a time that is not above 0 seconds. {MEASURE}")
    values = steps[numbers].to_numpy(np.float64)
    if not ((values >= 0) & (values < _MOST)).all():
        raise InputError(f"profile {directory} holds a number that no timing has. {MEASURE}")
