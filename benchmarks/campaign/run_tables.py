"""Tables of docs/validation-runs.md: runs, spans of their rounds, intervals, confidence.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.campaign.goals import (
    HIGH,
    KNOWN,
    LOW,
    MEASURED,
    PREDICTED,
    REPLAYED,
    Result,
    error_of,
    is_inside,
    judged_names,
    percent,
    signed,
    speed_error,
    table,
)
from codesign.records import SPANS


def runs_table(result: Result) -> str:
    """Every run of a pair."""
    rows = []
    for run in sorted(result.runs("stream"), key=lambda r: r["figures"]["tpot_mean"][MEASURED]):
        tpot, length = run["figures"]["tpot_mean"], run["figures"].get("acceptance_length")
        speed = [1.0 / max(tpot[place], 1e-9) for place in (PREDICTED, HIGH, LOW, MEASURED)]
        batch = next((r for r in result.runs("batch") if _twin(r, run)), None)
        rows.append(
            [
                run["label"].removesuffix(", batch 1"),
                f"{speed[0]:.0f} [{speed[1]:.0f}, {speed[2]:.0f}]",
                f"{speed[3]:.0f}",
                signed(speed_error(error_of(tpot) or 0.0)),
                _known_speed(tpot),
                "" if length is None else f"{length[PREDICTED]:.2f} / {length[MEASURED]:.2f}",
                *_throughput(batch),
            ]
        )
    heads = ["plan", "tokens/s predicted", "measured", "error", "acceptance known",
             "tokens per round", "batch: tokens/s", "error"]  # fmt: skip
    text = f"## {result.name}\n\n{table(heads, rows)}"
    return text + "".join(f"\n{part}" for part in (replays_table(result),) if part)


def replays_table(result: Result) -> str:
    """Latencies of every replay in milliseconds, and the share of its requests that met the SLO."""
    rows = [
        [run["label"], *(_pair(run, name, 1e3) for name in REPLAYED), *_of_slo(run)]
        for run in result.runs("segment")
    ]
    heads = ["replay, ms predicted / measured", *(n.replace("_", " ").upper() for n in REPLAYED)]
    return table([*heads, "SLO attainment, %", "goodput, requests/s"], rows) if rows else ""


def _of_slo(run: dict[str, Any]) -> list[str]:
    return [_pair(run, "slo_attainment", 100.0), _pair(run, "goodput", 1.0, digits=2)]


def _pair(run: dict[str, Any], name: str, scale: float, digits: int = 1) -> str:
    figure = run["figures"].get(name)
    if figure is None:
        return ""
    predicted, measured = (figure[place] * scale for place in (PREDICTED, MEASURED))
    return f"{predicted:.{digits}f} / {measured:.{digits}f}"


def _twin(run: dict[str, Any], other: dict[str, Any]) -> bool:
    return run["label"].rpartition(",")[0] == other["label"].rpartition(",")[0]


def _known_speed(tpot: Sequence[float]) -> str:
    error = error_of(tpot, KNOWN)
    return "" if error is None else signed(speed_error(error))


def _throughput(run: dict[str, Any] | None) -> list[str]:
    if run is None:
        return ["", ""]
    figure = run["figures"]["throughput"]
    shown = f"{figure[PREDICTED]:.0f} / {figure[MEASURED]:.0f}"
    return [shown, signed(error_of(figure) or 0.0)]


def spans_table(results: Sequence[Result]) -> str:
    """Mean spans of a round of one stream by pair and deployment."""
    rows = []
    for result in results:
        groups: dict[str, list[dict[str, Any]]] = {}
        for run in result.runs("stream"):
            groups.setdefault(run["label"].split(" on ")[1].split(",")[0], []).append(run)
        for label, runs in groups.items():
            means = {
                span: [statistics.fmean(r["rounds"][span][side] for r in runs) for side in (0, 1)]
                for span in (*SPANS, "seconds")
            }
            rows.append(
                [f"{result.name}, {label}"]
                + [f"{p * 1e3:.3f} / {m * 1e3:.3f}" if p or m else "" for p, m in means.values()]
            )
    heads = ["predicted / measured, ms", *(s.replace("_", " ") for s in SPANS), "round"]
    return "## Spans of a round, one stream, mean over the plans\n\n" + table(heads, rows)


def intervals_table(results: Sequence[Result]) -> str:
    """What each part adds to the intervals that are counted: mean half widths."""
    rows = []
    for result in results:
        for workload, shown in (
            ("stream", "one stream"),
            ("batch", "batch"),
            ("segment", "replay"),
        ):
            found = [
                (run["parts"][name], run["figures"][name])
                for run in result.runs(workload)
                for name in judged_names(run)
                if name in run.get("parts", {})
            ]
            if found:
                rows.append([f"{result.name}, {shown}", *_widths(found)])
    heads = ["80 % intervals, mean half width", "simulations", "prompts served", "prompts recorded",
             "steps", "all", "mean error", "coverage"]  # fmt: skip
    return "## What the intervals are made of\n\n" + table(heads, rows) if rows else ""


def _widths(found: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[str]:
    parts = [statistics.fmean(each) for each in zip(*(parts for parts, _ in found), strict=True)]
    whole = statistics.fmean((f[HIGH] - f[LOW]) / (2.0 * f[PREDICTED]) for _, f in found)
    error = statistics.fmean(abs(error_of(f) or 0.0) for _, f in found)
    inside = statistics.fmean(float(is_inside(f)) for _, f in found)
    return [*map(percent, (*parts, whole, error)), f"{percent(inside, 0)} of {len(found)}"]


def calibration_table(results: Sequence[Result], picture: str) -> str:
    """Confidence against acceptance: the errors by kind of prompt, and the link to the picture."""
    kinds = list(dict.fromkeys(kind for r in results for kind in r.pair["calibration"]))
    rows = [
        [r.name, *(_gap(r.pair["calibration"].get(kind, ())) for kind in kinds)] for r in results
    ]
    return (
        "## Confidence against acceptance\n\n"
        f"![confidence against acceptance]({picture})\n\n"
        "Horizontal: confidence in the draft's likeliest token after calibration, in tenths.\n"
        "Vertical: the share of these tokens that the target chose. Each request's calibration\n"
        "was fitted to other requests. Expected calibration error by kind of prompt:\n\n"
        f"{table(['pair', *kinds], rows)}"
    )


def _gap(bins: Sequence[Sequence[float]]) -> str:
    total = sum(count for *_, count in bins)
    gap = sum(abs(chance - share) * count for chance, share, count in bins)
    return f"{gap / total:.3f}" if total else ""
