"""What is compared of a run and of all runs: figures, predicted and measured, and their errors.

Errors are relative to the measurement: (predicted - measured) / measured. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codesign.candidate import Candidate, Interval
from codesign.fit.step_pace import Served, is_another_pace
from codesign.validate.ranking import Ranking

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

CHECKED = ("acceptance_length", "tpot_mean", "throughput")  # must lie within the tolerance
TIMED = ("tpot_mean", "throughput")  # of these, what steps take decides about


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, predicted and measured; NaN if the run has none to measure."""

    name: str
    predicted: Interval
    measured: float

    @property
    def error(self) -> float | None:
        """Relative to the measurement; None if that is 0 or missing."""
        if self.measured == 0 or math.isnan(self.measured):
            return None
        return (self.predicted.value - self.measured) / self.measured

    @property
    def size(self) -> float:
        """Of the error, without its sign; infinite if there is nothing to relate it to."""
        return math.inf if self.error is None else abs(self.error)

    def is_too_far(self, tolerance: float) -> bool:
        """Whether the figure is checked and its error not within ``tolerance``."""
        return self.name in CHECKED and not self.size <= tolerance

    @property
    def is_inside(self) -> bool:
        """Whether the measurement lies in the predicted interval."""
        return self.predicted.contains(self.measured)


@dataclass(frozen=True, slots=True, eq=False)
class RunComparison:
    """One run against its prediction.

    Attributes:
        path: Folder of the run.
        candidate: What served.
        origin: "measured", or "simulated" if the run is a simulation itself.
        figures: Those of FIGURES that both sides have, and those of CHECKED that were predicted.
        spans: Mean seconds of each span, over rounds without prompts: where the draft shares the
            target's workers, a round with a prompt has the draft's in its draft span.
        rounds: Means over the rounds, ROUND_FIGURES.
        by_seed: Predicted figures, one value per seed.
        requests: Joined by request: request_id, category, and predicted (mean over the seeds) and
            measured ttft and tpot in seconds.
        notes: What a reader must know about this run.
        served: Models, device and machine; None for a simulation.
        step_pace: Of the target's steps, as ``codesign.fit.step_pace`` has it; None where unknown.
        num_unfinished: Requests without an end. The simulations ran to the end, so that such a run
            is outside any tolerance and takes no part in a ranking.
        refused: Why some of these were refused, by number.
        settings: How ``codesign run`` was told to serve, as run.json has it.
    """

    path: Path
    candidate: Candidate
    origin: str
    figures: tuple[Comparison, ...]
    spans: tuple[Comparison, ...]
    rounds: tuple[Comparison, ...]
    by_seed: dict[str, tuple[float, ...]]
    requests: pd.DataFrame
    notes: tuple[str, ...]
    served: Served | None = None
    step_pace: float | None = None
    num_unfinished: int = 0
    refused: Mapping[int, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Label of the candidate."""
        return self.candidate.label

    @property
    def num_cut(self) -> int:
        """Requests that neither finished nor were refused: the run was cut off."""
        return self.num_unfinished - len(self.refused)

    def figure(self, name: str) -> Comparison | None:
        """The comparison of one figure, if both sides have it."""
        return next((c for c in self.figures if c.name == name), None)

    def request_error(self, figure: str) -> float | None:
        """Median over the requests of the size of the relative error of "ttft" or "tpot"."""
        predicted = self.requests[f"predicted_{figure}"].to_numpy(np.float64)
        measured = self.requests[f"measured_{figure}"].to_numpy(np.float64)
        both = np.isfinite(predicted) & (measured > 0)
        if not both.any():
            return None
        return float(np.median(np.abs(predicted - measured)[both] / measured[both]))


@dataclass(frozen=True, slots=True)
class Validation:
    """All runs against their predictions."""

    runs: tuple[RunComparison, ...]
    rankings: tuple[Ranking, ...]
    chosen: str
    num_seeds: int

    def outside(self, tolerance: float) -> list[tuple[RunComparison, Comparison]]:
        """Checked figures whose error is larger than ``tolerance``, the largest first."""
        found = [
            (run, figure)
            for run in self.runs
            for figure in run.figures
            if figure.is_too_far(tolerance)
        ]
        return sorted(found, key=lambda pair: -pair[1].size)

    @property
    def unfinished(self) -> tuple[RunComparison, ...]:
        """Runs with requests that did not finish."""
        return tuple(run for run in self.runs if run.num_unfinished)

    def of_another_pace(self, tolerance: float) -> list[RunComparison]:
        """Measured runs whose times are off, and whose steps are: slower or faster than the fit."""
        times = {run.path for run, figure in self.outside(tolerance) if figure.name in TIMED}
        return [
            run
            for run in self.runs
            if run.path in times and run.served and is_another_pace(run.step_pace, tolerance)
        ]

    def is_within(self, tolerance: float) -> bool:
        """Whether every run is whole and every checked figure within ``tolerance``."""
        return not self.unfinished and not self.outside(tolerance)
