"""From timings of forwards to ``StepTime``: the papers' line, or a form that predicts better.

A shape is (rows, requests, context); its time is the median over repetitions. All forms are
non-negative least squares on relative residuals, with shapes that fit badly weighted down. How
good a form is, is measured by leaving out one shape at a time. The line stays as long as its error
there is at most 5 %; else the form with the smallest error is taken.

A form that has not seen a shape may miss it by far where the shape is the only one of its bucket.
No plan is priced by such a form, so how unsure the chosen one is, is told by residuals: what each
shape is off, corrected for how far it draws the fit to itself.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from codesign.errors import InputError
from codesign.fit.least_squares import Floats
from codesign.fit.prompt_stairs import MIN_PARABOLA_ROWS, fit_prompt_stairs, prompt_shapes
from codesign.fit.step_forms import (
    Shapes,
    fit_line,
    fit_piecewise,
    fit_quadratic,
    fit_stream_stairs,
    fit_table,
    miss,
)
from codesign.policy.cost import StepTime

if TYPE_CHECKING:
    import pandas as pd

Form = Literal["line", "quadratic", "piecewise", "table", "stairs"]
FitForm = Callable[[Shapes], StepTime]

MEASURE = "Measure again: codesign profile --out profile"
MIN_SHAPES = 3  # fewer leave nothing to hold out
MAX_LINE_ERROR = 0.05  # mean held-out error up to which the papers' line stays
MAX_LINE_ERROR_ON_RANKS = 0.01
_THROUGH = 1e-9  # relative error below which a fit goes through a shape


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Relative error on shapes that the fit has not seen: mean, median and largest."""

    mean: float
    median: float
    max: float

    @classmethod
    def of(cls, errors_S: Floats) -> HeldOut:
        """Of the errors at each shape."""
        return cls(*(float(value(errors_S)) for value in (np.mean, np.median, np.max)))


@dataclass(frozen=True, slots=True)
class StepFit:
    """The fitted time of one kind of step, and how far to trust it.

    Attributes:
        time: The chosen form.
        form: Which one that is.
        held_out: Error of each form that was tried.
        num_shapes: Shapes that were measured.
        most_rows: Of a shape; 0 if the file does not say.
        unsure: Relative error of the chosen form, as it is: the median of its residuals, of steps
            of "one" request and of "several", as streams have seconds of their own.
    """

    time: StepTime
    form: Form
    held_out: dict[Form, HeldOut]
    num_shapes: int
    most_rows: int = 0
    unsure: dict[str, float] = field(default_factory=dict)

    def with_more_rows(self, more: int) -> StepFit:
        """The same fit of steps that are told to have so many rows more."""
        rows = tuple([count + more for count in self.time.rows])
        return replace(self, time=replace(self.time, rows=rows), most_rows=self.most_rows + more)

    @property
    def error(self) -> float:
        """Median held-out relative error of the chosen form."""
        return self.held_out[self.form].median


def fit_step(
    steps: pd.DataFrame,
    *,
    is_prefill: bool = False,
    on_ranks: bool = False,
    waits_for_host: bool = False,
) -> StepFit:
    """Fit every form and choose one: the line unless it is off by more than ``MAX_LINE_ERROR``.

    Args:
        steps: One row per timing of one kind of step: rows, requests, context, seconds.
        is_prefill: Whether the rows are prompts: then a parabola, attention within the prompt, is
            tried too, and taken wherever it predicts better than the line; on ranks only if there
            are prompts of ``MIN_PARABOLA_ROWS``.
        on_ranks: Forwards run on rank groups, filled up to a bucket: then stairs are tried too, and
            a line is taken up to ``MAX_LINE_ERROR_ON_RANKS`` only. Beyond that, steps other than
            prompts take stairs: some buckets have one shape, which held-out stairs cannot know, so
            that a line that misses all buckets may have the smaller error. Kernels of prompts
            change with their length, so that a form that misses the very prompts that it was
            fitted to is none.
        waits_for_host: Steps of several requests do, as a draft's: what attention takes more for
            them is not told from it.

    Raises:
        InputError: If there are fewer than ``MIN_SHAPES`` shapes, or a time is not above 0.
        HardwareError: If scipy is not installed.
    """
    shapes = prompt_shapes(steps) if is_prefill and on_ranks else Shapes.of(steps)
    _check(shapes)
    most_rows = int(shapes.rows.max())
    stairs: FitForm | None = None
    if on_ranks:
        of_steps = partial(fit_stream_stairs, waits_for_host=waits_for_host)
        stairs = fit_prompt_stairs if is_prefill else of_steps
    has_parabola = is_prefill and (not on_ranks or most_rows >= MIN_PARABOLA_ROWS)
    forms = _forms(stairs, has_parabola=has_parabola)
    left: dict[Form, Floats] = {name: left_out(shapes, fit) for name, fit in forms.items()}
    errors: dict[Form, HeldOut] = {name: HeldOut.of(errors_S) for name, errors_S in left.items()}
    times: dict[Form, StepTime] = {name: fit(shapes) for name, fit in forms.items()}
    form = _choice(
        errors,
        MAX_LINE_ERROR_ON_RANKS if on_ranks else MAX_LINE_ERROR,
        otherwise="stairs" if on_ranks and not is_prefill else None,
    )
    if is_prefill and on_ranks and miss(times[form], shapes) > MAX_LINE_ERROR:
        form = min(times, key=lambda name: miss(times[name], shapes))
    unsure = _by_requests(shapes, residuals(shapes, times[form], left[form]))
    return StepFit(times[form], form, errors, len(shapes.seconds), most_rows, unsure)


def _check(shapes: Shapes) -> None:
    if len(shapes.seconds) < MIN_SHAPES:
        raise InputError(
            f"{len(shapes.seconds)} shapes were measured, a fit needs {MIN_SHAPES}. {MEASURE}"
        )
    if not (np.isfinite(shapes.seconds).all() and shapes.seconds.min() > 0):
        raise InputError(f"a measured time is not above 0 seconds. {MEASURE}")


def _forms(stairs: FitForm | None, *, has_parabola: bool) -> dict[Form, FitForm]:
    """The forms that are tried."""
    forms: dict[Form, FitForm] = {"line": fit_line, "piecewise": fit_piecewise, "table": fit_table}
    if has_parabola:
        forms["quadratic"] = fit_quadratic
    if stairs is not None:
        forms["stairs"] = stairs
    return forms


def _by_requests(shapes: Shapes, residuals_S: Floats) -> dict[str, float]:
    """Median residual of steps of one request and of several, as far as there are any."""
    parts = {"one": shapes.requests <= 1, "several": shapes.requests > 1}
    known = {name: residuals_S[part & np.isfinite(residuals_S)] for name, part in parts.items()}
    return {name: float(np.median(found)) for name, found in known.items() if len(found)}


def residuals(shapes: Shapes, time: StepTime, left_S: Floats) -> Floats:
    """(S,) sizes of the relative errors at each shape of a fit that has seen all of them.

    ``left_S`` are those of fits without the shape (``left_out``).
    A shape draws the fit to itself. If it takes the share h of the weight there, what is left of
    an error is 1 - h of what it is to a fit without the shape, and the error's own size is the
    geometric mean of both. NaN where the fit goes through a shape, whatever its time.
    """
    own_S = _errors(shapes, time)
    return np.where(own_S > _THROUGH, np.sqrt(own_S * left_S), np.nan)


def _choice(errors: dict[Form, HeldOut], most: float, otherwise: Form | None) -> Form:
    """A smooth form where its error is at most ``most``, else ``otherwise`` or the best of all."""
    smooth: list[Form] = [form for form in errors if form in ("line", "quadratic")]
    form = min(smooth, key=lambda name: errors[name].mean)
    if errors[form].mean > most:
        form = otherwise or min(errors, key=lambda name: errors[name].mean)
    return form


def left_out(shapes: Shapes, fit: Callable[[Shapes], StepTime]) -> Floats:
    """(S,) sizes of the relative errors at each shape of a fit to the others."""
    numbers = np.arange(len(shapes.seconds))
    parts = [_errors(shapes.only(numbers == n), fit(shapes.without(int(n)))) for n in numbers]
    return np.concatenate(parts)


def _errors(shapes: Shapes, time: StepTime) -> Floats:
    """(S,) sizes of its relative errors."""
    seconds_S = time.of_arrays(shapes.rows, shapes.context, shapes.requests)
    return np.abs(seconds_S / shapes.seconds - 1.0)
