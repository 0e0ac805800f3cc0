"""Predictions in words: tiles with a range and an origin each, and one sentence of verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codesign.dashboard.records_frames import BOTH
from codesign.errors import counted
from codesign.slo_figure import in_slo_text, slo_figure

if TYPE_CHECKING:
    from codesign.candidate import Interval
    from codesign.config import SLO
    from codesign.dashboard.what_if import Prediction

_LONG = 10.0  # seconds from which on milliseconds say too much
_SLIGHT = 0.02  # relative difference that is not worth a word


@dataclass(frozen=True, slots=True)
class Tile:
    """One number.

    Attributes:
        label: What it is.
        value: In the unit that the label names.
        range: Where nine of ten runs are expected.
        origin: Where it comes from.
        explanation: In a sentence.
    """

    label: str
    value: str
    range: str
    origin: str
    explanation: str


# Figure, label, factor, unit, explanation.
_TILES = (
    ("tpot_mean", "TPOT mean", 1000.0, "ms", "Time per later token, mean over requests."),
    ("latency_mean", "Latency mean", 1.0, "s", "Arrival to last token, mean over requests."),
    ("slo_attainment", "In SLO", 100.0, "%", "Share of requests that finish and meet every "
     "target at once."),
    ("goodput", "Goodput", 1.0, "req/s", "Requests per second that meet every target."),
    ("throughput", "Output", 1.0, "tokens/s", "Output tokens per second of the run."),
    ("acceptance_length", "Emitted a round", 1.0, "tokens", "Acceptance length: tokens emitted per "
     "request and round, bonus token included."),
    ("mean_running", "Running", 1.0, "requests", "Requests that decode at once on a replica, on "
     "average."),
)  # fmt: skip
_BUSY = {"target": "Target busy, %", "draft": "Draft busy, %", BOTH: "GPUs busy, %"}


def tiles(prediction: Prediction, slo: SLO) -> list[Tile]:
    """Every figure of a prediction."""
    shown, times = [], prediction.scored.origin
    at_percentile = [
        (f"{name}_slo", told.title, told.factor, told.unit, told.explanation)
        for name in ("ttft", "tpot")
        for told in [slo_figure(name, slo, has_own=prediction.has_own)]
    ]
    for name, label, factor, unit, explanation in (*at_percentile, *_TILES):
        interval = prediction.scored.predicted.get(name)
        if interval is None or (name == "slo_attainment" and not slo.is_set):
            continue
        if unit == "ms" and interval.value >= _LONG:
            factor, unit = 1.0, "s"
        origin = times
        if name == "slo_attainment":
            explanation = f"Share of all requests: {in_slo_text(slo)}."
        if name == "acceptance_length":
            origin = tokens_origin(prediction.acceptance_origin)
            explanation += f" Acceptance {prediction.acceptance_origin}."
        shown.append(_tile(f"{label}, {unit}", interval, factor, origin, explanation))
    shown += [
        _tile(_BUSY[name], share, 100.0, times,
              "Share of the run in which these workers compute anything. One request keeps them as "
              "busy as a hundred; for spare capacity see Load.")
        for name, share in prediction.busy.items()
    ]  # fmt: skip
    shown.append(
        _tile("Load, %", prediction.load, 100.0, "rough",
              "Demand over capacity, estimated without a simulation. Above 100 % the queue grows "
              "as long as requests arrive.")
    )  # fmt: skip
    return shown


def verdict(prediction: Prediction, slo: SLO) -> str:
    """Whether the SLO is met, by figure."""
    parts = []
    for name, target in (("ttft", slo.ttft), ("tpot", slo.tpot)):
        if target is None:
            continue
        figure = prediction.scored.predicted.get(f"{name}_slo")
        if figure is None and f"{name}_mean" not in prediction.scored.predicted:
            parts.append(f"no answer has a {name.upper()}")  # of one token, the TPOT
            continue
        told = slo_figure(name, slo, has_own=prediction.has_own)
        shown = "never" if figure is None else f"{number_text(told.factor * figure.value)}"
        shown += "" if figure is None else f" {told.unit}"
        parts.append(f"{told.title} {shown} of {number_text(told.factor * target)} {told.unit}")
    if not parts:
        return "No SLO set."
    word = "Meets the SLO" if prediction.scored.is_feasible else "Misses the SLO"
    load = {"backlogged": "; a queue builds up for a while", "overloaded": "; the queue keeps "
            "growing: too many requests for this machine"}  # fmt: skip
    return f"{word}: {', '.join(parts)}{load.get(prediction.scored.saturation, '')}."


def against_plain(prediction: Prediction) -> str:
    """What speculation gains over plain decoding on all workers; "" where that is not known."""
    if prediction.plain is None:
        return ""
    parts = []
    for name, title, unit, factor in (
        ("tpot_mean", "mean TPOT", "ms", 1000.0),
        ("goodput", "goodput", "req/s", 1.0),
    ):
        ours = prediction.scored.predicted.get(name)
        theirs = prediction.plain.predicted.get(name)
        if ours is None or theirs is None or theirs.value <= 0:
            continue
        change = ours.value / theirs.value - 1.0
        if abs(change) < _SLIGHT:
            parts.append(f"{title} about the same")
            continue
        here, there = (number_text(factor * each.value) for each in (ours, theirs))
        parts.append(f"{title} {here} instead of {there} {unit} ({change:+.0%})")
    miss = "" if prediction.plain.is_feasible else " (misses the SLO)"
    return f"Against {prediction.plain.label}{miss}: {'; '.join(parts)}." if parts else ""


def scope(prediction: Prediction) -> str:
    """How much was simulated, and where the figures come from."""
    number = f"{prediction.num_requests:,} of {prediction.num_in_trace:,} requests"
    if prediction.is_whole:
        number = f"all {counted(prediction.num_requests, 'request')}"
    return (
        f"Simulated: {number}. Step times {prediction.times_origin}; acceptance "
        f"{prediction.acceptance_origin}. Ranges are 90 % prediction intervals, from the variation "
        "between seeds and the fit's error. Shaded in the charts: the same for latencies; over "
        "time, the span of the seeds."
    )


def hint(message: str) -> str:
    """Where this page has the flag that an error of the library names; "" if it names none."""
    places = {
        "--max-prompt": '"Cut long requests"',
        "--max-kv-tokens": '"KV rows of a replica" under "Serving"',
        "--slo-": '"SLO"',
        "--policies": '"Only these policies"',
    }
    named = [place for flag, place in places.items() if flag in message]
    return f". On this page: {' or '.join(named)}, on the left." if named else ""


def tokens_origin(acceptance_origin: str) -> str:
    """Where counts of tokens come from, in a word; the tile explains the rest."""
    if acceptance_origin.startswith("recorded"):
        return "measured"
    return "made up" if acceptance_origin.startswith("made up") else "imported"


def _tile(label: str, interval: Interval, factor: float, origin: str, explanation: str) -> Tile:
    value = number_text(factor * interval.value)
    return Tile(label, value, interval_text(interval, factor), origin, explanation)


def interval_text(interval: Interval, factor: float) -> str:
    """Both ends of a prediction in the unit that is shown."""
    low, high = (number_text(factor * end) for end in (interval.low, interval.high))
    return f"{low} to {high}"


def number_text(value: float) -> str:
    """Three digits, or whole numbers."""
    if not math.isfinite(value):
        return "no end"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
