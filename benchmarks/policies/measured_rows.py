"""Stretches of a trace that engines on GPUs served, policy by policy.

The newest row of each machine, pair of models, trace and load; older runs stay in the results. A
row whose policies all ran twice counts the faster run of each: what else a machine does only costs
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.policies.cases import SEGMENTS
from benchmarks.policies.figures import Results, below
from benchmarks.policies.segments import read_segment
from codesign.config import parse_deployment

# Keys of ``policy_ranks join``; "ranks-8b-loads-before", "ranks" and "ranks-8b" are replaced.
RUNS = (
    "ranks-70b-burst",
    "ranks-70b-loads",
    "ranks-70b-1",
    "ranks-70b-3b-1",
    "ranks-70b",
    "ranks-8b-loads-told",
    "ranks-8b-loads",
    "ranks-8b-1",
    "ranks-8b-told-h100",
    "ranks-70b-24-h200x2",
    "ranks-8b-24-h200x2",
    "ranks-70b-24-h100x2",
    "ranks-8b-24-h100x2",
    "ranks-70b-24-turns-h100x2",
    "ranks-8b-24-turns-h100x2",
    "ranks-70b-24-h100x4",
    "ranks-8b-24-h100x4",
    "ranks-70b-24-h200x1",
    "ranks-70b-24-mixed-h200x1",
    "ranks-70b-3b-24-h200x1",
    "ranks-70b-24-turns-h200x2",
    "ranks-70b-24-mixed-h200x2",
    "ranks-8b-24-h200x1",
    "ranks-8b-24-mixed-h200x1",
    "ranks-8b-24-turns-h200x2",
    "ranks-8b-24-low-h200x1",
    "ranks-8b-24-heads-h200x1",
    "ranks-70b-burst-h200x1",
    "ranks-8b-burst-h200x1",
    "ranks-70b-burst-28-h200x1",
    "ranks-70b-twice-h200x1",
    "ranks-8b-twice-h200x1",
    "ranks-70b-twice-h200x2",
)
_BURST = "ranks-70b-burst"  # the run of most policies
_NUMBERS = {1: "one", 2: "two", 4: "four"}


@dataclass(frozen=True)
class Row:
    """What all policies did with one stretch of a trace.

    Attributes:
        found: Figures by policy, each with those simulated for the same requests.
        apart: How much longer a policy's slower run took than its faster one, a share, the most of
            all that ran twice; None without any.
        split: What asynchronous policies ran on, such as "3+1"; "" without any.
    """

    run: str
    about: Mapping[str, Any]
    segment: str
    gpus: int
    found: Mapping[str, Mapping[str, Any]]
    apart: float | None = None
    split: str = ""

    @property
    def place(self) -> str:
        """Such as "one NVIDIA H200: llama-3-70b + llama-3.2-1b"."""
        target = self.about["target"].removeprefix("inflated-")
        draft = self.about["draft"].removeprefix("inflated-draft-")
        return f"{_NUMBERS[self.gpus]} {self.about['machine']}: {target} + {draft}"

    @property
    def label(self) -> str:
        """Short, for a table: "70B + 1B, 2 GPUs, mooncake at 0.7"."""
        sizes = [str(self.about[k]).rpartition("-")[2].upper() for k in ("target", "draft")]
        trace, load = read_segment(self.segment)
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return f"{' + '.join(sizes)}, {gpus}, {trace.name} at {load:g}"

    def speedup(self, policy: str) -> tuple[float, float] | None:
        """Over plain decoding, measured and simulated; None if the policy was not run."""
        if policy not in self.found:
            return None
        plain, ours = self.found["plain"], self.found[policy]
        simulated = plain["simulated"]["latency_mean"] / ours["simulated"]["latency_mean"]
        return plain["latency_mean"] / ours["latency_mean"], simulated


def rows_of(results: Results, runs: Sequence[str] = RUNS) -> list[Row]:
    """The newest row of each machine, pair, trace and load, in the order of the runs."""
    newest: dict[tuple[str, str, float], Row] = {}
    for run in runs:
        about = results.get(f"{run}/about")
        names = [key for key in below(results, run) if key != "about"] if about else []
        for segment in dict.fromkeys(name.partition("/")[0] for name in names):
            ways = below(results, f"{run}/{segment}")
            gpus = max(parse_deployment(way.rpartition(" on ")[2]).num_workers for way in ways)
            split = next((way.rpartition(" on ")[2] for way in ways if "+" in way), "")
            row = Row(run, about or {}, segment, gpus, *_by_policy(ways), split)
            trace, load = read_segment(segment)  # "code" is "code@0.7"
            same = row.place, trace.name, load
            if same not in newest or newest[same].about["created"] < row.about["created"]:
                newest[same] = row
    traces = list(SEGMENTS)

    def order(row: Row) -> tuple[int, int, float]:
        trace, load = read_segment(row.segment)
        return places.index(row.place), traces.index(trace.name), load

    places = list(dict.fromkeys(row.place for row in newest.values()))
    return sorted(newest.values(), key=order)


def _by_policy(
    ways: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Mapping[str, Any]], float | None]:
    """Figures by policy, and how far apart its runs are, at most; "again" makes a second run."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for way, figures in ways.items():
        runs.setdefault(way.rpartition(" on ")[0].removesuffix(" again"), []).append(figures)
    alike = min(map(len, runs.values()))  # a second try must not help some policies only
    found = {policy: min(each[:alike], key=_latency) for policy, each in runs.items()}
    spans = [[_latency(run) for run in each] for each in runs.values() if len(each) > 1]
    return found, max((max(span) / min(span) - 1.0 for span in spans), default=None)


def _latency(figures: Mapping[str, Any]) -> float:
    return figures["latency_mean"]


def burst_row(results: Results) -> Row | None:
    """The stretch with the burst, of most policies."""
    return next(iter(rows_of(results, (_BURST,))), None)
