"""Prediction against measurement as tables and charts, for any folder of runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd

from codesign import Progress
from codesign.artifacts import sha256
from codesign.dashboard.chart_parts import COLOURS, GREY, named
from codesign.dashboard.choices import file_time
from codesign.dashboard.files import RUN_FILE
from codesign.dashboard.kept import Kept
from codesign.fit import Fit
from codesign.plan import Plan
from codesign.validate import Validation, validate
from codesign.validate.charts import RUN_SHAPES
from codesign.validate.words import (
    SHOWN,
    cause,
    error_text,
    figure_text,
    figure_title,
    shown_comparisons,
)

if TYPE_CHECKING:
    from codesign.validate import RunComparison

RESIDUALS = (
    "acceptance_length", "tpot_mean", "tpot_p90", "throughput", "ttft_p50", "mean_batch",
)  # fmt: skip
_validations: Kept[Validation] = Kept(8)
_MOST_POINTS = 3000  # requests in a chart; of more, evenly spread ones are drawn


def compared(
    plan_file: str,
    runs: Sequence[str],
    *,
    progress: Progress | None,
) -> Validation:
    """As ``codesign.validate.validate``; files that have not changed are compared once.

    Args:
        plan_file: The plan that the runs served.
        runs: Their folders.
        progress: Called with ("simulate", done, total), if anything must be simulated.

    Raises:
        InputError: If a file is missing or broken, or a run served other requests.
    """
    files = (plan_file, *[f"{run}/{RUN_FILE}" for run in runs])
    question = tuple((file, file_time(file)) for file in files)
    known = _validations.get(question)
    if known is not None:
        return known
    plan = Plan.load(plan_file)
    fit = Fit.load(plan.fit.check())
    folders = [Path(run) for run in runs]
    found = validate(plan, fit, folders, plan_hash=sha256(plan_file), progress=progress)
    return _validations.put(question, found)


def cause_of(validation: Validation, plan_file: str, tolerance: float) -> str:
    """As ``codesign.validate.words.cause``, of the fit that a plan names."""
    file = Plan.load(plan_file).fit.check()
    return cause(validation, Fit.load(file), file, tolerance)


def residual_table(runs: Sequence[RunComparison]) -> pd.DataFrame:
    """One row per run and figure: error and predicted interval, both relative to the measurement.

    Returns:
        Columns run, figure, error, low, high (shares), inside (whether the interval holds the
        measurement), predicted, measured (texts).
    """
    rows = [
        {
            "run": run.label,
            "figure": SHOWN[name][0],
            "error": found.error,
            "low": found.predicted.low / found.measured - 1.0,
            "high": found.predicted.high / found.measured - 1.0,
            "inside": "inside" if found.is_inside else "outside",
            "predicted": f"{figure_text(name, found.predicted.value)} {SHOWN[name][1]}",
            "measured": f"{figure_text(name, found.measured)} {SHOWN[name][1]}",
        }
        for run in runs
        for name in RESIDUALS
        if (found := run.figure(name)) is not None and found.error is not None
    ]
    return pd.DataFrame(rows)


def residual_chart(runs: Sequence[RunComparison], *, tolerance: float) -> Any:
    """Errors by figure, a mark per run on its predicted interval; the tolerance is shaded."""
    table = residual_table(runs)
    figures = [SHOWN[name][0] for name in RESIDUALS if SHOWN[name][0] in set(table["figure"])]
    labels = list(dict.fromkeys(table["run"]))
    offset = alt.YOffset("run:N", sort=labels)
    y = alt.Y("figure:N", sort=figures, title=None, axis=alt.Axis(labelLimit=160, grid=True))
    across: Any = {"title": "predicted, relative to measured", "axis": alt.Axis(format="+%")}
    base = alt.Chart(table).encode(y=y, yOffset=offset)
    colour, shape = _by_run(labels)
    bars = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", **across), x2="high:Q", color=colour
    )
    dots = base.mark_point(size=70, filled=True, opacity=1.0).encode(
        x=alt.X("error:Q", **across),
        color=colour,
        shape=shape,
        tooltip=_tooltip(table),
    )
    band = alt.Chart(pd.DataFrame([{"low": -tolerance, "high": tolerance}]))
    shade = band.mark_rect(color=GREY, opacity=0.15).encode(x=alt.X("low:Q", **across), x2="high:Q")
    zero = alt.Chart(pd.DataFrame([{"at": 0.0}])).mark_rule(color=GREY, strokeDash=[4, 4])
    height = (10 + 11 * len(labels)) * len(figures) + 24 * len(labels) + 60
    return (shade + zero.encode(x=alt.X("at:Q", **across)) + bars + dots).properties(height=height)


def request_table(runs: Sequence[RunComparison], figure: str) -> pd.DataFrame:
    """Single requests with both values of "ttft" or "tpot", thinned out evenly if they are many.

    Returns:
        Columns run, request, category, predicted, measured (milliseconds), error (share).
    """
    parts = []
    for run in runs:
        both = run.requests[["request_id", "category"]].assign(
            run=run.label,
            predicted=1e3 * run.requests[f"predicted_{figure}"],
            measured=1e3 * run.requests[f"measured_{figure}"],
        )
        both = both[np.isfinite(both["predicted"]) & (both["measured"] > 0)]
        both = both.assign(error=both["predicted"] / both["measured"] - 1.0)
        parts.append(both.iloc[:: max(len(both) * len(runs) // _MOST_POINTS, 1)])
    return pd.concat(parts, ignore_index=True).rename(columns={"request_id": "request"})


def request_chart(runs: Sequence[RunComparison], figure: str) -> Any:
    """Error of each request's "ttft" or "tpot" by its measured value, a colour and shape a run."""
    table = request_table(runs, figure)
    labels = list(dict.fromkeys(run.label for run in runs))
    colour, shape = _by_run(labels)
    dots = (
        alt.Chart(table)
        .mark_point(size=36, filled=True, opacity=0.7)
        .encode(
            x=alt.X(
                "measured:Q", title=f"measured {figure.upper()}, ms", scale=alt.Scale(zero=False)
            ),
            y=alt.Y("error:Q", title="error of the prediction", axis=alt.Axis(format="+%")),
            color=colour,
            shape=shape,
            tooltip=[
                "run:N",
                "request:Q",
                alt.Tooltip("predicted:Q", title="predicted, ms", format=".4~g"),
                alt.Tooltip("measured:Q", title="measured, ms", format=".4~g"),
                alt.Tooltip("error:Q", format="+.1%"),
            ],
        )
        .interactive()
    )
    zero = alt.Chart(pd.DataFrame([{"at": 0.0}])).mark_rule(color=GREY, strokeDash=[4, 4])
    return (dots + zero.encode(y="at:Q")).properties(height=300 + 24 * len(labels))


def comparison_table(run: RunComparison, tolerance: float) -> pd.DataFrame:
    """Every figure, span and round mean of one run, as texts for people."""
    rows = []
    for found in (*shown_comparisons(run), *run.rounds):
        low, high = found.predicted.low, found.predicted.high
        rows.append(
            {
                "figure": figure_title(found.name),
                "predicted": figure_text(found.name, found.predicted.value),
                "interval": f"{figure_text(found.name, low)} to {figure_text(found.name, high)}",
                "measured": figure_text(found.name, found.measured),
                "error": error_text(found),
                "in interval": "yes" if found.is_inside else "no",
                "check": "too far" if found.is_too_far(tolerance) else "",
            }
        )
    return pd.DataFrame(rows)


def calibration_sentence(before: float, after: float | None, num_tokens: int) -> str:
    """What calibrating the draft's confidences gains."""
    text = (
        f"Expected calibration error over {num_tokens:,} recorded tokens: {before:.3f} uncalibrated"
    )
    if after is None:
        return text + "; one recorded request is not enough to measure the gain of calibration."
    return text + f", {after:.3f} calibrated, on requests that the calibration was not fitted to."


def _by_run(labels: Sequence[str]) -> tuple[Any, Any]:
    """Colour and shape of each run; of more than there are, some look alike."""
    colours = dict(zip(labels, cycle(COLOURS.values()), strict=False))
    shapes = dict(zip(labels, cycle(RUN_SHAPES), strict=False))
    return named(alt.Color, "run:N", colours), named(alt.Shape, "run:N", shapes)


def _tooltip(table: pd.DataFrame) -> list[Any]:
    return [
        alt.Tooltip(f"{name}:Q", format="+.1%") if name in ("error", "low", "high") else f"{name}:N"
        for name in table.columns
    ]
