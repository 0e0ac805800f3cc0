"""Predictions in words: tiles with a range and an origin each, and one sentence of verdict.

Must not import streamlit or torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codesign.dashboard.records_frames import BOTH

if TYPE_CHECKING:
    from codesign.candidate import Interval, ScoredCandidate
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


def tiles(prediction: Prediction, slo: SLO) -> list[Tile]:
    """Every figure of a prediction."""
    scored, percent = prediction.scored, f"p{slo.percentile:g}"
    origin = scored.origin
    tokens = tokens_origin(prediction.acceptance_origin)
    shown = [
        _tile(scored, "ttft_slo", f"TTFT {percent}", 1000.0, "ms", origin,
              "Arrival to first token, at the SLO's percentile."),
        _tile(scored, "tpot_slo", f"TPOT {percent}", 1000.0, "ms", origin,
              "Time per later token, at the SLO's percentile."),
        _tile(scored, "tpot_mean", "TPOT mean", 1000.0, "ms", origin,
              "Time per later token, the mean over requests."),
        _tile(scored, "latency_mean", "Latency mean", 1.0, "s", origin,
              "Arrival to last token, the mean over requests."),
        _tile(scored, "slo_attainment", "In SLO", 100.0, "%", origin,
              "Share of requests that finish and meet every target."),
        _tile(scored, "goodput", "Goodput", 1.0, "req/s", origin,
              "Requests per second that meet every target."),
        _tile(scored, "throughput", "Output", 1.0, "tokens/s", origin,
              "Output tokens per second of the run."),
        _tile(scored, "acceptance_length", "Accepted", 1.0, "tokens", tokens,
              "Acceptance length: tokens emitted per request and round, bonus token included. "
              f"Acceptance {prediction.acceptance_origin}."),
        _tile(scored, "mean_batch", "Running", 1.0, "requests", origin,
              "Requests in a round of a replica, on average."),
    ]  # fmt: skip
    names = {"target": "Target busy", "draft": "Draft busy", BOTH: "GPUs busy"}
    shown += [
        Tile(names[name] + ", %", _plain(100 * share.value), _range(share, 100.0), origin,
             "Share of the run in which these workers compute anything. One request keeps them as "
             "busy as a hundred: what room is left, Load says.")
        for name, share in prediction.busy.items()
    ]  # fmt: skip
    shown.append(
        Tile("Load, %", _plain(100 * prediction.load.value), _range(prediction.load, 100.0),
             "rough",
             "Demand over capacity, by the planner's arithmetic without a simulation. Above 100 % "
             "the queue grows for as long as requests come.")
    )  # fmt: skip
    return [tile for tile in shown if tile is not None]


def verdict(prediction: Prediction, slo: SLO) -> str:
    """Whether the SLO is met, by figure."""
    parts = []
    for name, target in (("ttft", slo.ttft), ("tpot", slo.tpot)):
        if target is None:
            continue
        figure = prediction.scored.predicted.get(f"{name}_slo")
        shown = "never" if figure is None else f"{_plain(1000 * figure.value)} ms"
        parts.append(f"{name.upper()} p{slo.percentile:g} {shown} of {_plain(1000 * target)} ms")
    if not parts:
        return "No SLO set."
    word = "Meets the SLO" if prediction.scored.is_feasible else "Misses the SLO"
    load = {"backlogged": "; a queue builds up and goes away", "overloaded": "; the queue keeps "
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
        parts.append(
            f"{title} {_plain(factor * ours.value)} instead of {_plain(factor * theirs.value)} "
            f"{unit} ({change:+.0%})"
        )
    return f"Against {prediction.plain.label}: {'; '.join(parts)}." if parts else ""


def scope(prediction: Prediction) -> str:
    """How much was simulated, and what stands behind the figures."""
    number = f"{prediction.num_requests:,} of {prediction.num_in_trace:,} requests"
    if prediction.is_whole:
        number = f"all {prediction.num_requests:,} requests"
    times = {"roofline": "from data sheets, not measured", "fitted": "fitted to measurements"}
    return (
        f"Simulated: {number}. Step times {times.get(prediction.scored.origin, '')} "
        f"({prediction.scored.origin}); acceptance {prediction.acceptance_origin}. A range "
        "is where nine of ten runs are expected, luck and the fit's error together. Shaded in the "
        "charts: the same for latencies; over time, what the seeds span."
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


def _tile(
    scored: ScoredCandidate,
    figure: str,
    label: str,
    factor: float,
    unit: str,
    origin: str,
    explanation: str,
) -> Tile | None:
    interval = scored.predicted.get(figure)
    if interval is None:
        return None
    if unit == "ms" and interval.value >= _LONG:
        factor, unit = 1.0, "s"
    value = _plain(factor * interval.value)
    return Tile(f"{label}, {unit}", value, _range(interval, factor), origin, explanation)


def _range(interval: Interval, factor: float) -> str:
    low, high = (_plain(factor * end) for end in (interval.low, interval.high))
    return f"{low} to {high}"


def _plain(value: float) -> str:
    if not math.isfinite(value):
        return "no end"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
