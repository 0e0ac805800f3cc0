"""Altair charts of a validation, and their SVG, which takes the colours of the page it is in.

Needs the extra ``report`` (altair, vl-convert). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from codesign.errors import HardwareError
from codesign.records import SPANS

if TYPE_CHECKING:
    from codesign.acceptance import AcceptanceProfile
    from codesign.policy.cost import Calibration
    from codesign.validate.comparison import Comparison, RunComparison

# Middle tones that can be told apart on white and on black, and without seeing red or green.
SPAN_COLOURS = {
    "target": "#3f87d6",
    "draft": "#e0892b",
    "reroot": "#8f74c9",
    "link_there": "#3ea58a",
    "link_back": "#c9618a",
}
# Runs are told apart by shape as well as by colour.
RUN_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
_POINT = SPAN_COLOURS["target"]
_INK = "#010203"  # stands for the page's text colour until the SVG is written
_GREY = "#808890"  # can be read on white and on black
_FONT = "system-ui, sans-serif"
_WIDTH, _HEIGHT = 340, 280
_NUM_BINS = 12  # of the calibration


def predicted_against_measured(
    runs: Sequence[RunComparison],
    figure: str,
    *,
    title: str,
    factor: float,
    with_legend: bool = True,
) -> Any:
    """Scatter of one figure, a point per run with the predicted interval, and the identity."""
    rows = [
        _point(run.label, comparison, factor)
        for run in runs
        if (comparison := run.figure(figure)) is not None and not math.isnan(comparison.measured)
    ]
    return _scatter(rows, title, with_names=True, with_legend=with_legend)


def requests_against_measured(
    runs: Sequence[RunComparison], figure: str, *, title: str, factor: float
) -> Any:
    """Scatter of "ttft" or "tpot" with a point per request."""
    rows = [
        {"run": run.label, "predicted": factor * predicted, "measured": factor * measured}
        for run in runs
        for predicted, measured in zip(
            run.requests[f"predicted_{figure}"], run.requests[f"measured_{figure}"], strict=True
        )
        if math.isfinite(predicted) and math.isfinite(measured)
    ]
    return _scatter(rows, title, with_names=False)


def spans_side_by_side(runs: Sequence[RunComparison]) -> Any:
    """Bars of the mean spans of a round, predicted above measured for each run."""
    alt = _altair()
    rows = [
        {"run": run.label, "which": which, "span": span.name, "order": SPANS.index(span.name),
         "ms": 1000.0 * seconds}
        for run in runs
        for span in run.spans
        for which, seconds in (("predicted", span.predicted.value), ("measured", span.measured))
    ]  # fmt: skip
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.85})
        .encode(
            x=alt.X("sum(ms):Q", title="mean time of a round, ms"),
            y=alt.Y("which:N", title=None, sort=["predicted", "measured"]),
            color=alt.Color(
                "span:N",
                title=None,
                scale=alt.Scale(domain=list(SPANS), range=[SPAN_COLOURS[s] for s in SPANS]),
                legend=alt.Legend(orient="top", direction="horizontal"),
            ),
            order=alt.Order("order:O"),
            row=alt.Row(
                "run:N",
                title=None,
                sort=[run.label for run in runs],
                spacing=16,
                header=alt.Header(
                    labelAngle=0,
                    labelAlign="left",
                    labelOrient="top",
                    labelAnchor="start",
                    labelPadding=2,
                ),
            ),
        )
        .properties(width=2 * _WIDTH, height=44)
    )


def calibration(profile: AcceptanceProfile, fitted: Calibration) -> Any:
    """How often the draft model's first choice was right, by its own confidence in it."""
    from codesign.policy.cost import Calibration

    alt = _altair()
    grid = np.linspace(0.02, 0.98, 49)
    curves = [
        {"confidence": float(c), "accepted": _sigmoid(k.slope * _logit(c) + k.intercept), "line": n}
        for n, k in (("fitted", fitted), ("taken at face value", Calibration()))
        for c in grid
    ]
    share = alt.Scale(domain=[0, 1])
    dots = (
        alt.Chart(alt.Data(values=_confidence_bins(profile)))
        .mark_circle(color=_POINT, opacity=0.8)
        .encode(
            x=alt.X("confidence:Q", title="draft model's confidence", scale=share),
            y=alt.Y("accepted:Q", title="share the target agreed with", scale=share),
            size=alt.Size("tokens:Q", title="tokens", legend=None),
        )
    )
    lines = (
        alt.Chart(alt.Data(values=curves))
        .mark_line(color=_INK, strokeWidth=1.5, opacity=0.7)
        .encode(
            x="confidence:Q",
            y="accepted:Q",
            strokeDash=alt.StrokeDash(
                "line:N",
                title=None,
                scale=alt.Scale(domain=["fitted", "taken at face value"], range=[[1, 0], [4, 4]]),
                legend=alt.Legend(orient="top"),
            ),
        )
    )
    return (lines + dots).properties(width=_WIDTH, height=_HEIGHT)


def _confidence_bins(profile: AcceptanceProfile) -> list[dict[str, float]]:
    recordings = [r for group in profile.recordings.values() for r in group]
    confidence = np.exp(np.concatenate([r.log_probs[:, 0] for r in recordings]))
    is_right = np.concatenate([r.ranks == 0 for r in recordings])
    which = np.minimum((confidence * _NUM_BINS).astype(int), _NUM_BINS - 1)
    return [
        {
            "confidence": float(confidence[which == i].mean()),
            "accepted": float(is_right[which == i].mean()),
            "tokens": int((which == i).sum()),
        }
        for i in range(_NUM_BINS)
        if (which == i).any()
    ]


def svg(chart: Any) -> str:
    """The chart as an SVG element without background, text in the colour of the page."""
    import vl_convert

    config = {
        "background": None,
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": _INK, "titleColor": _INK, "domainColor": _INK, "tickColor": _INK,
            "gridColor": _INK, "gridOpacity": 0.12, "titleFontWeight": "normal",
            "labelFontSize": 11, "titleFontSize": 12,
        },
        "legend": {"labelColor": _INK, "titleColor": _INK, "labelFontSize": 11},
        "header": {"labelColor": _INK, "titleColor": _INK, "labelFontSize": 12},
        "title": {"color": _INK, "fontSize": 13, "anchor": "start", "fontWeight": "normal"},
    }  # fmt: skip
    spec = chart.to_dict()
    spec["config"] = config
    text = vl_convert.vegalite_to_svg(spec)
    return text.replace(_INK, "currentColor").replace("rgb(1, 2, 3)", "currentColor")


def on_page(chart: Any) -> Any:
    """The chart for a page that may be light or dark: what takes the text's colour is grey."""
    return _altair().Chart.from_json(chart.to_json().replace(_INK, _GREY))


def available() -> bool:
    """Whether the packages that charts need are installed."""
    from importlib.util import find_spec

    return find_spec("altair") is not None and find_spec("vl_convert") is not None


def _point(label: str, comparison: Comparison, factor: float) -> dict[str, Any]:
    return {
        "run": label,
        "predicted": factor * comparison.predicted.value,
        "low": factor * comparison.predicted.low,
        "high": factor * comparison.predicted.high,
        "measured": factor * comparison.measured,
    }


def _scatter(
    rows: Sequence[dict[str, Any]], title: str, *, with_names: bool, with_legend: bool = True
) -> Any:
    alt = _altair()
    ends = [value for row in rows for key, value in row.items() if key != "run"]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    span = [max(low - margin, 0.0), high + margin]
    scale = alt.Scale(domain=span, nice=False, zero=False)
    identity = (
        alt.Chart(alt.Data(values=[{"at": span[0]}, {"at": span[1]}]))
        .mark_line(color=_INK, strokeDash=[4, 4], opacity=0.45)
        .encode(x=alt.X("at:Q", scale=scale, title="predicted"), y=alt.Y("at:Q", scale=scale))
    )
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X("predicted:Q", scale=scale, title="predicted"),
        y=alt.Y("measured:Q", scale=scale, title="measured"),
    )
    legend = _run_legend(alt, rows) if with_legend else None
    colour = alt.Color("run:N", title=None, legend=legend, scale=_run_scale(alt))
    shape = alt.Shape("run:N", title=None, legend=legend, scale=alt.Scale(range=RUN_SHAPES))
    if not with_names:
        dots = base.mark_point(size=28, opacity=0.6, filled=True).encode(color=colour, shape=shape)
        return (identity + dots).properties(width=_WIDTH, height=_HEIGHT, title=title)
    bars = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", scale=scale), x2="high:Q", color=colour
    )
    dots = base.mark_point(size=70, opacity=1.0, filled=True).encode(color=colour, shape=shape)
    return (identity + bars + dots).properties(width=_WIDTH, height=_HEIGHT, title=title)


def _run_legend(alt: Any, rows: Sequence[dict[str, Any]]) -> Any:
    one_each = len({row["run"] for row in rows}) > 1
    return alt.Legend(orient="bottom", columns=1, labelLimit=0) if one_each else None


def _run_scale(alt: Any) -> Any:
    return alt.Scale(range=[*SPAN_COLOURS.values(), "#7f8c1f", "#b0563a", "#5b8fa8"])


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def _altair() -> Any:
    try:
        import altair
    except ImportError as err:
        raise HardwareError("charts need altair: pip install 'codesign[report]'") from err
    return altair
