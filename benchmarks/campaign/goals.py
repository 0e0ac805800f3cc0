"""What a campaign was to reach, and its errors; figures as ``join`` left them.

Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pages import markdown
from codesign.artifacts.machine import short_gpu_name

SMALL = 0.02  # share of a round below which a span's error is not counted
REPLAYED = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
PREDICTED, LOW, HIGH, MEASURED, KNOWN = range(5)  # places in a figure's list
WIDTH = 100  # of the page
STEPS = 3  # place in the parts of its interval
# What was asked for: errors at most (shares; of attainment, points of 100), least correlation.
SPEED, WORST_SPEED, LENGTH, SPAN = 0.03, 0.08, 0.03, 0.1
REPLAY, ATTAINMENT, REGRET = 0.1, 0.03, 0.02
CORRELATION, COVERAGE = 0.95, (0.7, 0.9)


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

    @property
    def deployments(self) -> set[str]:
        """Labels of those that served, such as "1+1"."""
        return {run["label"].partition(" on ")[2].partition(",")[0] for run in self.runs()}

    def runs(self, *workloads: str) -> list[dict[str, Any]]:
        """Runs of these workloads; of all without one."""
        return [r for r in self.pair["runs"] if not workloads or r["workload"] in workloads]


def newest(payloads: Iterable[dict[str, Any]]) -> list[Result]:
    """Each pair of each machine once: of the last file that has it, on no less than one before."""
    found: dict[str, Result] = {}
    for payload in payloads:
        for result in (Result(machine(payload), pair) for pair in payload["pairs"]):
            if found.setdefault(result.name, result).deployments <= result.deployments:
                found[result.name] = result
    return list(found.values())


def machine(payload: dict[str, Any]) -> str:
    """The GPU, or the CPU, in a few words."""
    found = payload["hardware"]
    if found.get("gpus"):
        return short_gpu_name(found["gpus"][0]["name"])
    return f"{found['cores']} CPU cores"


def between(shares: tuple[float, float]) -> str:
    """Such as "70 to 90 %"."""
    return "{:.0f} to {:.0f} %".format(*(100.0 * share for share in shares))


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


def speeds(result: Result, place: int = PREDICTED) -> list[float]:
    """Sizes of the errors of one stream's decode speed."""
    return [abs(speed_error(e)) for e, _ in errors(result.runs("stream"), "tpot_mean", place)]


def mean_error(result: Result) -> float | None:
    """Of one stream's decode speed."""
    return mean_of(speeds(result))


def worst_error(result: Result) -> float | None:
    """Of one stream's decode speed."""
    return max(speeds(result), default=None)


def length_error(result: Result, place: int = PREDICTED) -> float | None:
    """Mean error of the acceptance length of streams and batches."""
    runs = [r for r in result.runs("stream", "batch") if not r["label"].startswith("plain")]
    return mean_of([abs(e) for e, _ in errors(runs, "acceptance_length", place)])


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
    return mean_of(span_errors(result, span, "stream", "batch"))


def replay_error(result: Result, name: str, place: int = PREDICTED) -> float | None:
    """Worst error of a latency of replays."""
    return max((abs(e) for e, _ in errors(result.runs("segment"), name, place)), default=None)


def attainment_error(result: Result, place: int = PREDICTED) -> float | None:
    """Worst error of the share of a replay's requests that met the SLO."""
    found = [run["figures"].get("slo_attainment", ()) for run in result.runs("segment")]
    return max((abs(f[place] - f[MEASURED]) for f in found if len(f) > place), default=None)


def covered(result: Result) -> list[bool]:
    """Of each 80 % interval, whether it holds the measurement."""
    return [is_inside(figure) for figure in judged(result)]


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


def mean_of(values: Sequence[float]) -> float | None:
    """Their mean, if there are any."""
    return statistics.fmean(values) if values else None
