"""Figures of a run, simulated or measured, as the comparison of policies keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.policies.cases import SCALES
from codesign.config import SLO
from codesign.metrics import meets_slo, percentile, summarise
from codesign.records import RunRecords

_EVERY = 5.0  # seconds between two points over time


def figures_of(run: RunRecords, slo: SLO, *, over_time: bool = False) -> dict[str, Any]:
    """Figures of a run: those of ``codesign.metrics``, gaps between tokens, attainment by scale."""
    figures = summarise(run, slo).to_dict()
    figures |= _gaps(run)
    running = run.rounds.column("running")
    figures["peak_batch"] = float(running.max(initial=0))
    rounds = max(float(run.rounds.column("batch").sum()), 1.0)
    for name in ("draft", "accepted"):
        figures[f"{name}_tokens"] = float(run.rounds.column(f"num_{name}_tokens").sum()) / rounds
    if slo.tpot is not None:
        figures["attainment"] = {
            str(scale): sum(meets_slo(r, slo, scale) for r in run.requests) / len(run.requests)
            for scale in SCALES
        }
    if over_time:
        figures["over_time"] = _over_time(run)
    return figures


def mean_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over runs of what ``figures_of`` has as floats in all of them, and of attainment."""
    found: dict[str, Any] = {
        key: float(np.mean([run[key] for run in runs]))
        for key, value in runs[0].items()
        if isinstance(value, float) and all(run[key] is not None for run in runs)
    }
    shares = [run["attainment"] for run in runs]
    found["attainment"] = {k: float(np.mean([s[k] for s in shares])) for k in shares[0]}
    return found


def _gaps(run: RunRecords) -> dict[str, float | None]:
    """Percentiles of the time between two tokens of a request; those of a round come together."""
    rounds = run.rounds
    batch = rounds.column("batch")
    gaps = rounds.column("seconds") + rounds.column("prefill")
    order = np.argsort(gaps)
    at_once = float(rounds.column("num_emitted_tokens").sum() - batch.sum())
    counted = np.cumsum(batch[order]) + at_once
    if not len(counted) or counted[-1] <= 0:
        return {}
    found = {}
    for percent in (50, 90, 99):
        wanted = counted[-1] * percent / 100.0
        at = int(np.searchsorted(counted, wanted))
        found[f"itl_p{percent}"] = 0.0 if wanted <= at_once else float(gaps[order[at]])
    latencies = [r.finish - r.arrival for r in run.requests if r.finish is not None]
    found["latency_p90"] = percentile(latencies, 90)
    return found


def _over_time(run: RunRecords) -> list[list[float]]:
    """[second, batch size, draft tokens per request and round] every few seconds."""
    rounds = run.rounds
    batch, drafted = rounds.column("batch"), rounds.column("num_draft_tokens")
    slot = (rounds.column("start") // _EVERY).astype(int)
    found = []
    for number in range(int(slot.max(initial=-1)) + 1):
        here = (slot == number) & (batch > 0)
        if here.any():
            size = float(batch[here].mean())
            length = float(drafted[here].sum() / batch[here].sum())
            found.append([number * _EVERY, round(size, 3), round(length, 3)])
    return found
