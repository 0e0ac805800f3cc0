"""From timings of forwards to ``StepTime``: a line or a table, whichever predicts unseen shapes.

A shape is (rows, requests, context); its time is the median over repetitions. Both forms are
non-negative least squares on relative residuals, with shapes that fit badly weighted down. Which
form is better, and how good it is, is measured by leaving out one shape at a time.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from codesign.errors import InputError
from codesign.policy.cost import StepTime

if TYPE_CHECKING:
    import pandas as pd

Form = Literal["line", "table"]
Floats = NDArray[np.float64]

MIN_SHAPES = 3  # fewer leave nothing to hold out
_HUBER = 1.345  # residuals beyond this many standard deviations weigh less
_REWEIGHTS = 4


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Relative error on shapes that the fit has not seen: mean, median and largest."""

    mean: float
    median: float
    max: float


@dataclass(frozen=True, slots=True)
class StepFit:
    """The fitted time of one kind of step, and how far to trust it.

    Attributes:
        time: The chosen form.
        form: Which one that is.
        line: Held-out error of the papers' form.
        table: Held-out error of the table over rows.
        num_shapes: Shapes that were measured.
    """

    time: StepTime
    form: Form
    line: HeldOut
    table: HeldOut
    num_shapes: int

    @property
    def error(self) -> float:
        """Median held-out relative error of the chosen form."""
        return (self.line if self.form == "line" else self.table).median


@dataclass(frozen=True, slots=True)
class Shapes:
    """Median seconds by shape.

    Attributes:
        rows: (S,) rows of the forward.
        context: (S,) KV rows before it, summed over the requests.
        seconds: (S,) median over repetitions.
    """

    rows: Floats
    context: Floats
    seconds: Floats

    @classmethod
    def of(cls, steps: pd.DataFrame) -> Shapes:
        """Shapes of a table of single timings (see codesign.fit)."""
        medians = steps.groupby(["rows", "requests", "context"])["seconds"].median().reset_index()
        return cls(*(medians[name].to_numpy(np.float64) for name in ("rows", "context", "seconds")))

    def without(self, index: int) -> Shapes:
        """All shapes but one."""
        keep = np.arange(len(self.seconds)) != index
        return Shapes(self.rows[keep], self.context[keep], self.seconds[keep])


def fit_step(steps: pd.DataFrame) -> StepFit:
    """Fit both forms and choose the one with the smaller mean held-out error.

    Args:
        steps: One row per timing of one kind of step: rows, requests, context, seconds.

    Raises:
        InputError: If there are fewer than ``MIN_SHAPES`` shapes, or a time is not above 0.
    """
    shapes = Shapes.of(steps)
    if len(shapes.seconds) < MIN_SHAPES:
        raise InputError(
            f"{len(shapes.seconds)} shapes were measured, a fit needs {MIN_SHAPES}. "
            "Measure again: codesign profile"
        )
    if not (np.isfinite(shapes.seconds).all() and shapes.seconds.min() > 0):
        raise InputError("a measured time is not above 0 seconds. Measure again: codesign profile")
    line, table = held_out(shapes, fit_line), held_out(shapes, fit_table)
    form: Form = "table" if table.mean < line.mean else "line"
    time = fit_table(shapes) if form == "table" else fit_line(shapes)
    return StepFit(time, form, line, table, len(shapes.seconds))


def fit_line(shapes: Shapes) -> StepTime:
    """``alpha * context + gamma * rows + delta``, no coefficient below 0."""
    design = np.column_stack([shapes.context, shapes.rows, np.ones_like(shapes.rows)])
    alpha, gamma, delta = _solve(design, shapes.seconds).tolist()
    return StepTime.linear(alpha=alpha, gamma=gamma, delta=delta)


def fit_table(shapes: Shapes) -> StepTime:
    """``alpha * context + f(rows)`` with a knot at each measured row count, f never falling.

    f is written as a sum of increments; that none is below 0 makes it monotone, so one
    non-negative least squares solves for alpha and an isotonic f at once.
    """
    knots = np.unique(shapes.rows)
    steps = (shapes.rows[:, None] >= knots[None, :]).astype(np.float64)
    alpha, *increments = _solve(np.column_stack([shapes.context, steps]), shapes.seconds).tolist()
    return StepTime(
        alpha=alpha,
        rows=tuple(int(knot) for knot in knots),
        seconds=tuple(np.cumsum(increments).tolist()),
    )


def held_out(shapes: Shapes, fit: Callable[[Shapes], StepTime]) -> HeldOut:
    """Relative error of ``fit`` at each shape when it is made from the others."""
    errors = []
    for index, seconds in enumerate(shapes.seconds):
        time = fit(shapes.without(index))
        errors.append(abs(time(shapes.rows[index], shapes.context[index]) / seconds - 1.0))
    return HeldOut(float(np.mean(errors)), float(np.median(errors)), float(np.max(errors)))


def _solve(design_SP: Floats, seconds_S: Floats) -> Floats:
    """(P,) non-negative coefficients; relative residuals, Huber weights by reweighting."""
    relative_SP = design_SP / seconds_S[:, None]
    scale_P = np.linalg.norm(relative_SP, axis=0)  # columns differ by many powers of ten
    scale_P[scale_P == 0.0] = 1.0
    relative_SP = relative_SP / scale_P
    root_weight_S = np.ones(len(seconds_S))
    solution_P = np.zeros(design_SP.shape[1])
    for _ in range(_REWEIGHTS):
        solution_P, _ = nnls(relative_SP * root_weight_S[:, None], root_weight_S)
        residual_S = np.abs(relative_SP @ solution_P - 1.0)
        spread = 1.4826 * float(np.median(residual_S))  # standard deviation, if it were normal
        if spread < 1e-9:
            break
        bound = _HUBER * spread
        root_weight_S = np.sqrt(np.minimum(1.0, bound / np.maximum(residual_S, bound)))
    return solution_P / scale_P
