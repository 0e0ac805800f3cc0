"""What a campaign was to reach, and what each pair reached; figures as ``join`` left them.

Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.campaign.coverage_luck import usual_coverage
from benchmarks.pages import markdown
from codesign.records import SPANS

SMALL = 0.02  # share of a round below which a span's error is not counted
REPLAYED = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
PREDICTED, LOW, HIGH, MEASURED, KNOWN = range(5)  # places in a figure's list
WIDTH = 100  # of the page
STEPS = 3  # place in the parts of its interval


@dataclass(frozen=True, slots=True)
class Result:
    """A pair of a campaign.

    Attributes:
        machine: That it was measured on.
        pair: As in the file.
    """

    machine: str
    pair: dict[str, Any]

    @property
    def name(self) -> str:
        """Of a table's column."""
        return f"{self.pair['pair']}, {self.machine}"

    def runs(self, *workloads: str) -> list[dict[str, Any]]:
        """Runs of these workloads; of all without one."""
        return [r for r in self.pair["runs"] if not workloads or r["workload"] in workloads]


def goals(results: Sequence[Result]) -> str:
    """What each pair reached, and what is behind it."""
    heads = ["", "goal", *(result.name for result in results)]
    rows = [
        ["decode speed, one stream, mean error", "3 %", *(percent(mean_error(r)) for r in results)],
        ["the same, worst", "8 %", *(percent(worst_error(r)) for r in results)],
        ["the same, acceptance known", "", *map(_known_error, results)],
        [
            "the same, rounds without prompts",
            "",
            *(_between(r, PREDICTED) for r in results),
        ],
        ["the same, acceptance known too", "", *(_between(r, KNOWN) for r in results)],
        ["acceptance length, mean error", "3 %", *map(_length_error, results)],
        ["round time, one stream, mean error", "", *(_round_error(r) for r in results)],
        *(
            [
                f"span: {span.replace('_', ' ')}, mean error",
                "10 %",
                *(percent(span_error(r, span)) for r in results),
            ]
            for span in SPANS
        ),
        *(
            [
                f"replay: {name.replace('_', ' ').upper()}, worst error",
                "10 %",
                *(_worst_replay(r, name) for r in results),
            ]
            for name in REPLAYED
        ),
        ["replay: SLO attainment, worst, points", "3", *(_attainment(r) for r in results)],
        ["regret: latency of one stream", "2 %", *(_plan(r, "stream", "regret") for r in results)],
        ["regret, acceptance known", "", *(_plan(r, "stream", "regret_known") for r in results)],
        ["regret: throughput of a batch", "2 %", *(_plan(r, "batch", "regret") for r in results)],
        ["regret: goodput of a replay", "2 %", *(_plan(r, "segment", "regret") for r in results)],
        [
            "rank correlation, one stream",
            "0.95",
            *(_plan(r, "stream", "correlation") for r in results),
        ],
        *_redrawn(results),
        ["rank correlation, batch", "0.95", *(_plan(r, "batch", "correlation") for r in results)],
        [
            "rank correlation, replay",
            "0.95",
            *(_plan(r, "segment", "correlation") for r in results),
        ],
        ["coverage of 80 % intervals", "70 to 90 %", *map(_coverage, results)],
        *_usual_coverage(results),
        *_known_intervals(results),
        ["runs", "", *(str(len(r.runs())) for r in results)],
    ]
    return "### By pair\n\n" + table(heads, rows)


def error_of(figure: Sequence[float], place: int = PREDICTED) -> float | None:
    """Relative error of a figure; None without the prediction or a measurement."""
    if len(figure) <= place or not figure[MEASURED]:
        return None
    return figure[place] / figure[MEASURED] - 1.0


def errors(
    runs: Iterable[dict[str, Any]], name: str, place: int = PREDICTED
) -> list[tuple[float, dict[str, Any]]]:
    """Errors of one figure with their runs."""
    found = []
    for run in runs:
        error = error_of(run["figures"].get(name, ()), place)
        if error is not None:
            found.append((error, run))
    return found


def speed_error(error: float) -> float:
    """Error of 1 / TPOT."""
    return 1.0 / (1.0 + error) - 1.0


def _speeds(result: Result, place: int = PREDICTED) -> list[float]:
    return [abs(speed_error(e)) for e, _ in errors(result.runs("stream"), "tpot_mean", place)]


def mean_error(result: Result) -> float | None:
    """Of one stream's decode speed."""
    return _mean(_speeds(result))


def worst_error(result: Result) -> float | None:
    """Of one stream's decode speed."""
    return max(_speeds(result), default=None)


def _known_error(result: Result) -> str:
    return percent(_mean(_speeds(result, KNOWN)))


def _between(result: Result, place: int) -> str:
    sizes = [abs(e) for e, _ in errors(result.runs("stream"), "decode_speed", place)]
    return f"{percent(_mean(sizes))}, worst {percent(max(sizes, default=None))}"


def length_error(result: Result, place: int = PREDICTED) -> float | None:
    """Mean error of the acceptance length of streams and batches."""
    runs = [r for r in result.runs("stream", "batch") if not r["label"].startswith("plain")]
    return _mean([abs(e) for e, _ in errors(runs, "acceptance_length", place)])


def _length_error(result: Result) -> str:
    return _beside_known(length_error(result), length_error(result, KNOWN), percent)


def _round_error(result: Result) -> str:
    values = [r["rounds"]["seconds"] for r in result.runs("stream")]
    return percent(_mean([abs(p / m - 1.0) for p, m in values if m]))


def span_errors(result: Result, span: str, *workloads: str) -> list[float]:
    """Sizes of the errors of a span, where it is more than ``SMALL`` of the round."""
    found = []
    for run in result.runs(*workloads):
        predicted, measured = run["rounds"][span]
        if measured > SMALL * run["rounds"]["seconds"][1]:
            found.append(abs(predicted / measured - 1.0))
    return found


def span_error(result: Result, span: str) -> float | None:
    """Mean error of a span of streams and batches."""
    return _mean(span_errors(result, span, "stream", "batch"))


def replay_error(result: Result, name: str, place: int = PREDICTED) -> float | None:
    """Worst error of a latency of replays."""
    return max((abs(e) for e, _ in errors(result.runs("segment"), name, place)), default=None)


def _worst_replay(result: Result, name: str) -> str:
    found = replay_error(result, name), replay_error(result, name, KNOWN)
    return _beside_known(*found, percent)


def _beside_known(
    worst: float | None, known: float | None, shown: Callable[[float | None], str]
) -> str:
    """An error, and the same with the acceptance known, if it is."""
    return shown(worst) + ("" if known is None else f" ({shown(known)} known)")


def attainment_error(result: Result, place: int = PREDICTED) -> float | None:
    """Worst error of the share of a replay's requests that met the SLO."""
    found = [run["figures"].get("slo_attainment", ()) for run in result.runs("segment")]
    return max((abs(f[place] - f[MEASURED]) for f in found if len(f) > place), default=None)


def _attainment(result: Result) -> str:
    found = attainment_error(result), attainment_error(result, KNOWN)
    return _beside_known(*found, lambda error: "-" if error is None else f"{error * 100.0:.1f}")


def _plan(result: Result, workload: str, name: str) -> str:
    plans = [p for p in result.pair["plans"] if p["workload"] == workload]
    plans = [p for p in plans if p.get(name) is not None and p["num_runs"] > 1]
    values = [percent(p[name]) if name.startswith("regret") else f"{p[name]:.3f}" for p in plans]
    values = [f"{v} of {p['num_runs']}" for v, p in zip(values, plans, strict=True)]
    if len(plans) > 1:
        values = [f"{v} ({p['workers']} GPUs)" for v, p in zip(values, plans, strict=True)]
    return ", ".join(values) or "-"


def _redrawn(results: Sequence[Result]) -> list[list[str]]:
    """A row, if these results say how sure the measured order is."""
    values = [_plan(result, "stream", "redrawn") for result in results]
    label = "the same, measured order against itself, requests resampled"
    return [[label, "", *values]] if any(value != "-" for value in values) else []


def covered(result: Result) -> list[bool]:
    """Of each 80 % interval, whether it holds the measurement."""
    return [is_inside(figure) for figure in judged(result)]


def _coverage(result: Result) -> str:
    inside = covered(result)
    return percent(_mean(inside), 0) + f" of {len(inside)}"


def _usual_coverage(results: Sequence[Result]) -> list[list[str]]:
    """A row, if these results say what intervals are made of: how much of it is chance."""
    found = [usual_coverage(result.runs()) for result in results]
    shares = ["-" if each is None else f"{each[0]:.0%} to {each[1]:.0%}" for each in found]
    label = "the same, of intervals that are right, 8 of 10 times"
    return [[label, "", *(share.replace("%", " %") for share in shares)]] if any(found) else []


def _known_intervals(results: Sequence[Result]) -> list[list[str]]:
    """A row, if these results say what intervals are made of: none of it is luck of prompts."""
    shares = [_steps_coverage(r) if "unsure" in r.pair else "-" for r in results]
    label = "of the steps' part alone, acceptance known"
    return [[label, "", *shares]] if any(share != "-" for share in shares) else []


def _steps_coverage(result: Result) -> str:
    """Of seconds a round in streams and batches; what queues make of a replay's is all in one."""
    inside = []
    for run in result.runs("stream", "batch"):
        tpot, length = (run["figures"].get(n, ()) for n in ("tpot_mean", "acceptance_length"))
        if len(tpot) > KNOWN and "tpot_mean" in run.get("parts", {}):
            tokens = length[KNOWN] / length[MEASURED] if len(length) > KNOWN else 1.0
            error = tokens * tpot[KNOWN] / tpot[MEASURED] - 1.0
            inside.append(float(abs(error) <= run["parts"]["tpot_mean"][STEPS]))
    return percent(_mean(inside), 0) + f" of {len(inside)}" if inside else "-"


def judged_names(run: dict[str, Any]) -> list[str]:
    """Figures whose intervals are counted: speed, throughput and acceptance."""
    names = ["tpot_mean", "throughput"]
    if not run["label"].startswith("plain"):
        names.append("acceptance_length")
    return [name for name in names if name in run["figures"]]


def judged(result: Result) -> Iterator[list[float]]:
    """Figures of every run whose intervals are counted."""
    for run in result.runs():
        yield from (run["figures"][name] for name in judged_names(run))


def is_inside(figure: Sequence[float]) -> bool:
    """Whether a measurement lies in the interval."""
    return figure[LOW] <= figure[MEASURED] <= figure[HIGH]


def percent(value: float | None, digits: int = 1) -> str:
    """A share as percent."""
    return "-" if value is None or math.isnan(value) else f"{value * 100:.{digits}f} %"


def signed(value: float) -> str:
    """An error as percent."""
    return f"{value * 100:+.1f} %"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, with the line's end."""
    return markdown(heads, rows) + "\n"


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
