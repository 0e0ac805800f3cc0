"""Replays predicted again with as many rounds as each request took: what is left is the queue's.

    python -m benchmarks.campaign.served_rounds campaign

Needs the folder that ``--join`` has been through. Who waits for whom turns on when others end, and
so on single requests' acceptance. "Acceptance known" is that of the answers that plain decoding
gave on one deployment; on another one ties are broken otherwise, so that some answers are other
ones. Here each request plays what was recorded of it, from as many tokens more or fewer as it takes
to end after its rounds. It judges; nothing is fitted to it. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.campaign.chosen_plan import FIT_FILE, candidate_of, workers_of
from benchmarks.campaign.goals import signed, table
from benchmarks.campaign.join import each_its_own, fit_to_these
from benchmarks.campaign.units import SEGMENT
from codesign.candidate import Candidate
from codesign.fit import Fit
from codesign.plan import Plan
from codesign.run_directory import read_run
from codesign.sim import simulate
from codesign.validate import validate

FIGURES = ("ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p99", "slo_attainment")
_MOST_TRIES = 64  # answers are so much longer or shorter at most


def with_rounds(
    requests: pd.DataFrame,
    wanted: NDArray[np.int64],
    rounds_of: Callable[[pd.DataFrame], NDArray[np.int64]],
) -> pd.DataFrame:
    """Requests that emit as many tokens more or fewer as let them take so many rounds.

    Args:
        requests: With ``output_tokens``.
        wanted: (R,) rounds of each.
        rounds_of: Simulates requests: (R,) rounds of each, which depend on its own tokens alone.
    """
    tokens = requests["output_tokens"].to_numpy(np.int64)
    for _ in range(_MOST_TRIES):
        missing = np.sign(wanted - rounds_of(requests.assign(output_tokens=tokens)))
        if not missing.any():
            break
        tokens = np.maximum(tokens + missing, 2)
    return requests.assign(output_tokens=tokens)


def num_other(
    outputs: Mapping[int, Sequence[int]], recorded: Mapping[int, Sequence[int]]
) -> tuple[int, int]:
    """Answers that differ from those whose acceptance was recorded, and how many there are."""
    both = outputs.keys() & recorded.keys()
    return sum(list(outputs[n]) != list(recorded[n]) for n in both), len(both)


def compare(folder: Path) -> list[list[str]]:
    """Rows of a table: errors of replays as predicted, with known answers, and known rounds."""
    fit, rows = Fit.load(folder / FIT_FILE), []
    known = fit_to_these(folder, SEGMENT, fit)
    paths = sorted(file.parent for file in (folder / "runs" / SEGMENT.name).glob("*/run.json"))
    plain = next((p for p in paths if Candidate.from_dict(candidate_of(p)).family == "plain"), None)
    if known is None or plain is None:
        return []
    recorded = read_run(plain).outputs or {}
    for path in paths:
        candidate = Candidate.from_dict(candidate_of(path))
        plan = Plan.load(folder / f"{SEGMENT.name}-{workers_of(candidate_of(path))}.plan.json")
        run = read_run(path)
        wanted = run.records.request_table()["num_rounds"].to_numpy(np.int64)
        own = each_its_own(plan.requests()).iloc[: len(wanted)]

        def rounds_of(
            requests: pd.DataFrame, candidate: Candidate = candidate, plan: Plan = plan
        ) -> NDArray[np.int64]:
            found = simulate(requests, candidate, known, serving=plan.serving, seed=plan.seed)
            return found.request_table()["num_rounds"].to_numpy(np.int64)

        served = with_rounds(own, wanted, rounds_of)
        alone = replace(plan, num_seeds=1)
        runs = [
            validate(asked, using, [path], requests=requests).runs[0]
            for asked, using, requests in (
                (plan, fit, None), (plan, known, own), (alone, known, served),
            )
        ]  # fmt: skip
        others = num_other(run.outputs or {}, recorded)
        for name in FIGURES:
            figures = [each.figure(name) for each in runs]
            errors = [signed(f.error) for f in figures if f is not None and f.error is not None]
            if len(errors) == len(runs):
                rows.append([candidate.label, name, *errors, "{} of {}".format(*others)])
    return rows


def main(words: Sequence[str]) -> None:
    """Print a table for each pair."""
    heads = ["plan", "figure", "as predicted", "known answers", "known rounds", "other answers"]
    for folder in sorted(file.parent for file in Path(words[0]).glob(f"*/{FIT_FILE}")):
        print(f"{folder.name}\n")
        print(table(heads, compare(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
