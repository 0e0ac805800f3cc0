"""What ``eight_gpus`` predicts before it measures: a roofline of our engine's own steps.

Steps of one, two and four GPUs (benchmarks/results/engine_steps_*.json) tell how near the engine
comes to the hardware (benchmarks/engine_roofline.py); steps on six and eight are added to them
once they are measured. Imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.engine_roofline import TimedStep, engine_software, errors_by_degree
from codesign.fit import Fit
from codesign.fit.devices import load_device
from codesign.fit.priced_model import PricedModel, parse_model
from codesign.fit.roofline import DEFAULT_SOFTWARE, Software, roofline_fit
from codesign.fit.shipped import DEFAULT_FIT, shipped_pair
from codesign.fit.what_if import dialled_acceptance

RESULTS = Path(__file__).parent / "results"
DEVICE = "h200"
ROWS = 8  # of one tile: more rows cost another one, which no roofline knows
ALL_REDUCE = ("all-reduce", ROWS, 8192, "ours, residual added")
MEASURED_PAIR = ("llama-3-70b:int4", "llama-3.2-1b:int4")  # its profile has messages and re-rooting


def model(name: str) -> PricedModel:
    """An int4 model by the name of its shape."""
    return parse_model(f"{name}:int4")


def known_steps(files: Iterable[Path]) -> list[TimedStep]:
    """Steps of 8 rows in files of step times, and in those of ``bench_engine``'s runs."""
    found = []
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            if row.get("rows") == ROWS and "ms_median" in row:
                found.append(_step(row["model"], row["gpus"], row["context"], row["ms_median"]))
            found += _steps_of_run(row)
    return found


def _steps_of_run(row: dict[str, Any]) -> list[TimedStep]:
    split = re.search(r" on (\d+)(?:\+(\d+))?", row.get("candidate", ""))
    if split is None:
        return []
    sizes = {"target": int(split[1]), "draft": int(split[2] or split[1])}
    found = []
    for side, gpus in sizes.items():
        for name, milliseconds in row.get(f"{side}_step", {}).items():
            if name.startswith("ms_at_context_"):
                shape = row[side].removeprefix("bench-").partition(f"-{side}-")[0]
                context = int(name.removeprefix("ms_at_context_"))
                found.append(_step(shape, gpus, context, milliseconds))
    return found


def _step(name: str, gpus: int, context: int, milliseconds: float) -> TimedStep:
    return TimedStep(model(name), gpus, ROWS, context, milliseconds / 1e3)


def software_of(steps: Sequence[TimedStep]) -> Software:
    """The engine's, as its steps say."""
    return engine_software(steps, load_device(DEVICE), parts_of_a_round())


def parts_of_a_round() -> Software:
    """Messages and re-rooting of a profile, and an all-reduce as a kernel of its own takes."""
    path = shipped_pair(DEVICE, *MEASURED_PAIR)
    assert path is not None, "the package ships this pair"
    costs = Fit.load(path).costs.values()
    file = RESULTS / "collectives_tp4_2026-11-21_h200.json"  # of the day of the steps
    [all_reduce] = [
        row["us"] / 1e6
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
        if tuple(row.get(n) for n in ("op", "rows", "hidden", "version")) == ALL_REDUCE
    ]
    return replace(
        DEFAULT_SOFTWARE,
        reroot=min(cost.reroot for cost in costs),
        host={**DEFAULT_SOFTWARE.host, "nvlink": max(cost.link for cost in costs)},
        all_reduce={**DEFAULT_SOFTWARE.all_reduce, "nvlink": all_reduce},
    )


@cache
def recorded() -> Fit:
    """The fit whose recordings stand for the pairs'; inflated models agree as the small ones do."""
    return Fit.load(DEFAULT_FIT)


def priced(pair: str, gpus: int, acceptance: float | None, software: Software) -> Fit:
    """A fit of a pair on so many GPUs."""
    target, draft = map(model, pair.split("+"))
    profile = recorded().acceptance
    if acceptance is not None:
        profile = dialled_acceptance(profile, acceptance)
    origin = "recorded" if acceptance is None else f"dialled to {acceptance}"
    return roofline_fit(
        load_device(DEVICE), gpus, target, draft, profile,
        acceptance_error=0.0, acceptance_origin=origin, software=software,
    )  # fmt: skip


def simulated(fit: Fit, split: str, policy: str) -> dict[str, Any]:
    """One stream on one split: tokens/s with its spans."""
    from codesign.cli import main as codesign

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fit.json"
        fit.save(file)
        words = ["simulate", "--trace", "conv-twin", "--max-requests", "40", "--max-prompt", "200"]
        words += ["--fit", str(file), "--deployment", split, "--max-batch", "1"]
        words += ["--policy", policy, "--json", "--quiet"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            code = codesign(words)
    if code:
        raise RuntimeError(f"codesign {' '.join(words)} ended with {code}")
    metrics = json.loads(said.getvalue())["metrics"]
    return {
        "tokens_per_second": round(1.0 / metrics["tpot_mean"], 1),
        "tokens_a_round": round(metrics["acceptance_length"], 3),
        "span_ms": {name: round(1e3 * span, 3) for name, span in metrics["spans"].items()},
    }


def degree_errors(steps: Sequence[TimedStep]) -> list[dict[str, Any]]:
    """How far steps on more GPUs are from what those on fewer say; a row per step and limit."""
    rows = []
    base = parts_of_a_round()
    for most in sorted({step.gpus for step in steps})[:-1]:
        for step, error in errors_by_degree(steps, load_device(DEVICE), most, base):
            shape = {"model": step.model.label, "gpus": step.gpus, "context": step.context}
            ms = round(1e3 * step.seconds, 4)
            rows.append({"fitted_up_to": most, **shape, "ms": ms, "error": round(error, 4)})
    return rows
