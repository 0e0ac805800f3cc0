"""Which rounds of a campaign met a slow host: shares of a run, and how much longer they took.

    python -m benchmarks.campaign.phases campaign

Needs the folder that ``--join`` has been through. A profile of seconds cannot tell how many slow
phases a run will meet, so a prediction is off by as much. The target's step of each round without
prompts is divided by its price, and by what the run's own fast rounds of as many requests take of
theirs, so that neither sizes nor the fit's errors matter. A phase is where the running median stays
above. It judges; nothing is fitted to it. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.campaign.chosen_plan import FIT_FILE, candidate_of
from benchmarks.campaign.goals import table
from benchmarks.campaign.units import WORKLOADS
from codesign.candidate import Candidate
from codesign.fit import Fit
from codesign.fit.step_pace import step_seconds
from codesign.run_directory import read_run

_ROUNDS = 15  # of a running median: a single late round is no phase
_FAST = 0.1  # quantile that stands for a run's fast rounds
_SLOW = 1.06  # of these: more is a phase
_FEWEST = 100  # rounds of a run


@dataclass(frozen=True, slots=True)
class Phases:
    """Slow phases of a run.

    Attributes:
        share: Of its rounds.
        longer: By how much the target's step takes longer there; 0 without any.
    """

    share: float
    longer: float


def phases(ratio_N: NDArray[np.float64], requests_N: NDArray[np.int64]) -> Phases:
    """Of (N,) rounds in order, each relative to its price, and of so many requests."""
    pace_N = ratio_N.copy()
    for requests in np.unique(requests_N):
        alike = requests_N == requests
        pace_N[alike] /= np.quantile(ratio_N[alike], _FAST)
    smooth = pd.Series(pace_N).rolling(_ROUNDS, center=True, min_periods=1)
    smooth_N = smooth.median().to_numpy(np.float64)
    slow_N = smooth_N[smooth_N > _SLOW]
    longer = float(np.median(slow_N)) - 1.0 if len(slow_N) else 0.0
    return Phases(len(slow_N) / len(smooth_N), longer)


def compare(folder: Path) -> list[list[str]]:
    """Rows of a table: each run of a pair with enough rounds."""
    fit, rows = Fit.load(folder / FIT_FILE), []
    for workload in WORKLOADS:
        paths = sorted(file.parent for file in (folder / "runs" / workload.name).glob("*/run.json"))
        for path in paths:
            candidate = Candidate.from_dict(candidate_of(path))
            target = fit.costs[candidate.deployment.unit.label].target
            rounds = read_run(path).records.round_table()
            quiet = rounds.loc[(rounds["prefill_tokens"] == 0) & (rounds["batch"] > 0)]
            if len(quiet) < _FEWEST:
                continue
            shapes = (quiet[name] for name in ("rows", "context", "batch", "running"))
            priced = step_seconds(target, *shapes)
            ratios = quiet["target"].to_numpy(np.float64) / priced
            found = phases(ratios, quiet["batch"].to_numpy(np.int64))
            shares = f"{found.share:.0%}", f"{found.longer:.0%}"
            rows.append([candidate.label, workload.name, *shares])
    return rows


def main(words: Sequence[str]) -> None:
    """Print a table for each pair."""
    heads = ["plan", "requests", "rounds in slow phases", "these take more"]
    for folder in sorted(file.parent for file in Path(words[0]).glob(f"*/{FIT_FILE}")):
        print(f"{folder.name}\n")
        print(table(heads, compare(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
