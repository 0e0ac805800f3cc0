"""How well steps on four GPUs are told from those on one and two: by each way that was tried.

    python -m benchmarks.group_sizes

Prints docs/planner.md's table, from the fits that ship. No way has seen four GPUs. Imports no
torch, needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from benchmarks.engine_roofline import TimedStep, engine_software
from codesign.fit import Fit
from codesign.fit.devices import Device, load_device
from codesign.fit.extrapolated import BARE, BATCHES, STEPS, SizeLine
from codesign.fit.priced_model import PricedModel, parse_model
from codesign.fit.roofline import DEFAULT_SOFTWARE, Forward, Software
from codesign.fit.shipped import FITS
from codesign.policy.cost import StepTime

KNOWN, TOLD = (1, 2), 4
OPS = ("target", "draft")
WAYS = (
    "data sheets",
    "as data sheets grow",
    "one roofline for both models, calibrated",
    "as that one grows",
    "a line for each model (used)",
)


def table() -> str:
    """Markdown: a row for each way, median and worst error of each model's steps."""
    found: dict[tuple[str, str], list[float]] = {}
    for device, fit, models in pairs():
        steps = {op: {n: getattr(fit.costs[str(n)], op) for n in (*KNOWN, TOLD)} for op in OPS}
        software = _calibrated(steps, models, device)
        for op in OPS:
            for way, errors in errors_by_way(steps[op], models[op], device, software).items():
                found.setdefault((way, op), []).extend(errors)
    lines = ["| way | target, median | worst | draft, median | worst |", "|---|---|---|---|---|"]
    for way in WAYS:
        cells = [f"{f(found[way, op]):.1%}" for op in OPS for f in (_median, _worst)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pairs() -> Iterator[tuple[Device, Fit, dict[str, PricedModel]]]:
    """Every fit of GPUs that ships: the GPU, the fit and both models by data sheet."""
    for path in sorted(FITS.glob("h*/fit.json")):
        device, _, names = path.parent.name.partition("-")
        shapes = [name.replace("-int4", ":int4") for name in names.split("+")]
        target, draft = map(parse_model, shapes)
        models = {"target": target, "draft": draft}
        yield load_device(device), Fit.load(path), models


def errors_by_way(
    times: dict[int, StepTime], model: PricedModel, device: Device, software: Software
) -> dict[str, list[float]]:
    """Relative errors of steps on four GPUs."""
    line = SizeLine({n: times[n] for n in KNOWN}, Forward(model, device, 1, BARE), STEPS)
    base = max(KNOWN)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for shape in (*STEPS, *BATCHES):
        before, true = times[base](*shape), times[TOLD](*shape)
        sheet, fitted = (
            {n: Forward(model, device, n, each).decode(*shape) for n in (base, TOLD)}
            for each in (DEFAULT_SOFTWARE, software)
        )
        told = (
            sheet[TOLD],
            before * sheet[TOLD] / sheet[base],
            fitted[TOLD],
            before * fitted[TOLD] / fitted[base],
            before * line.ratio(TOLD, base),
        )
        for way, seconds in zip(WAYS, told, strict=True):
            found[way].append(seconds / true - 1.0)
    return found


def _calibrated(
    steps: dict[str, dict[int, StepTime]], models: dict[str, PricedModel], device: Device
) -> Software:
    """The software constants that steps of one request on one and two GPUs say."""
    shapes = [(rows, context) for rows, context, _ in STEPS]
    timed = [
        TimedStep(models[op], n, rows, context, steps[op][n](rows, context))
        for op in OPS
        for n in KNOWN
        for rows, context in shapes
    ]
    return engine_software(timed, device, replace(DEFAULT_SOFTWARE, peer=0.0))


def _median(errors: list[float]) -> float:
    return median(map(abs, errors))


def _worst(errors: list[float]) -> float:
    return max(map(abs, errors))


if __name__ == "__main__":
    print(table())
