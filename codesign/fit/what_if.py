"""Fits for hardware and pairs of models from a few words on a command line.

What the package has measurements of is taken from these, everything else from data sheets.

Must not import torch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

from codesign.acceptance import AcceptanceProfile
from codesign.artifacts import alone, cache_dir
from codesign.config import parse_deployment
from codesign.errors import InputError
from codesign.fit import ROOFLINE, Fit
from codesign.fit.devices import load_device
from codesign.fit.priced_model import PADDING, parse_model
from codesign.fit.roofline import roofline_fit
from codesign.fit.shipped import DEFAULT_FIT, shipped_pair
from codesign.policy.cost import RoundCost, StepTime

# Tokens per verification of one pair on six datasets are 2.74 to 3.92 (SwiftSpec, Table 6): what a
# pair loses or gains on other prompts, and so at least what another pair may.
OTHER_PAIR_ERROR = 0.18
DIALLED_ERROR = 0.02  # of the model of runs on recordings, whatever the length of a chain
INFLATED = "inflated-"  # models of a large one's shape, made of a small one
_DOUBLINGS = 12  # of the longest prompt timed, within which knots follow the roofline's parabola
_MAX_STEM = 200  # characters of a file's name; file systems take 255 with what is added
_SHAPE_DEPTH = 3  # hits in a row after which the chance of the next one does not rise


def device_fit(
    device: str, gpus: int, target: str, draft: str, *, acceptance: float | None = None
) -> Fit:
    """The fit of so many GPUs and a pair of models: measured if the package has it, else roofline.

    A measured one is of inflated models, whose steps are those of the shapes they have. It must
    tell the times of everything that a roofline would price, or of all GPUs in one group and in
    two: what it then cannot tell is no part of the fit. Else the machine is priced by data sheets
    as a whole, because one search must not mix two sources. Arguments and errors as of
    ``what_if_fit``.
    """
    priced = what_if_fit(device, gpus, target, draft, acceptance=acceptance)
    path = shipped_pair(load_device(device).name, priced.target, priced.draft)
    fit = None if path is None else _covering(Fit.load(path), priced)
    if fit is None:
        return priced
    origin = f"{fit.acceptance_origin} for {fit.target} with {fit.draft}"
    if fit.target.startswith(INFLATED):
        origin += ", which answer as a small pair does, not for this pair (--acceptance P: yours)"
    models = {"target": priced.target, "draft": priced.draft}
    fit = replace(fit, **models, acceptance_origin=origin, device="cuda")
    if acceptance is None:
        return fit
    return replace(
        fit,
        acceptance=dialled_acceptance(fit.acceptance, acceptance),
        errors={**fit.errors, "acceptance": DIALLED_ERROR},
        acceptance_origin=priced.acceptance_origin,
        parts_covariance=(),
    )


def beyond_measured(device: str, fit: Fit) -> str:
    """What is measured of a pair on fewer GPUs, where data sheets price so many; "" if nothing.

    Args:
        device: As the command line names it.
        fit: From ``device_fit``.
    """
    path = shipped_pair(load_device(device).name, fit.target, fit.draft)
    if fit.origin != ROOFLINE or path is None:
        return ""
    measured = Fit.load(path)
    whole = [label for label in fit.costs if label in measured.costs and "+" not in label]
    if not whole:
        return ""
    most = max(whole, key=int)
    ours, theirs = (1e3 * each.costs[most].target(1, 1000.0) for each in (measured, fit))
    return (
        f"the engine here was measured with this pair on up to {most} x {device}, where a step of "
        f"one row takes {ours:.2f} ms; by data sheets, which are for other engines, "
        f"{theirs:.2f}. It may be as much faster than predicted on more; from measurements: "
        f"--gpus {most}"
    )


def _covering(fit: Fit, priced: Fit) -> Fit | None:
    """A measured fit of a roofline's deployments; None if too few of them were measured."""
    costs, errors = {}, dict(fit.errors)
    is_whole = _tells_all_gpus(
        fit, max(parse_deployment(label).num_workers for label in priced.costs)
    )
    for label in set(priced.costs) & set(fit.costs):
        costs[label] = _with_long_prompts(fit, label, priced.costs[label])
    for label in set(priced.costs) - set(costs):
        size = parse_deployment(label)
        sides = _sides(fit, size.target_workers)
        if size.draft_workers or sides is None:
            if is_whole:
                continue
            return None
        costs[label] = _joined(costs[sides[0]], costs[sides[1]], priced.costs[label])
        for side, op in zip(sides, ("target", "draft"), strict=True):
            errors[f"{label}/{op}"] = fit.errors[f"{side}/{op}"]
    told = [label for label in priced.costs if label in costs]
    return replace(fit, costs={label: costs[label] for label in told}, errors=errors)


def _tells_all_gpus(fit: Fit, gpus: int) -> bool:
    """Whether so many GPUs were timed as one group, and as two."""
    sizes = [parse_deployment(label) for label in fit.costs]
    return {size.draft_workers > 0 for size in sizes if size.num_workers == gpus} == {False, True}


def _with_long_prompts(fit: Fit, label: str, priced: RoundCost) -> RoundCost:
    """A deployment's cost; beyond the longest prompt timed, rows cost what the roofline says."""

    def longer(op: str, time: StepTime, sheet: StepTime) -> StepTime:
        largest = fit.steps[f"{label}/{op}"].most_rows
        if not largest:
            return time
        knots = [n for n in (0, *time.rows) if n < largest]
        more = [largest << doubling for doubling in range(_DOUBLINGS)]
        seconds = [time(n) for n in dict.fromkeys(knots)]
        seconds += [time(largest) + sheet(n) - sheet(largest) for n in more]
        rows = (*dict.fromkeys(knots), *more)
        return replace(time, rows=rows, seconds=tuple(seconds), gamma=0.0, cross=sheet.cross)

    cost = fit.costs[label]
    return replace(
        cost,
        prefill=longer("prefill", cost.prefill, priced.prefill),
        draft_prefill=longer("draft_prefill", cost.draft_prefill, priced.draft_prefill),
    )


def _sides(fit: Fit, gpus: int) -> tuple[str, str] | None:
    """Splits in which the target, and in which the draft, has so many GPUs."""
    splits = [d for label in fit.costs if (d := parse_deployment(label)).draft_workers]
    target = next((d.label for d in splits if d.target_workers == gpus), None)
    draft = next((d.label for d in splits if d.draft_workers == gpus), None)
    return None if target is None or draft is None else (target, draft)


def _joined(target: RoundCost, draft: RoundCost, priced: RoundCost) -> RoundCost:
    """Both models in turn on GPUs that each was timed on alone; what fits is arithmetic."""
    return replace(
        target,
        draft=draft.draft,
        draft_prefill=draft.draft_prefill,
        link=0.0,
        link_each=0.0,
        choice_alone=draft.first_alone,
        first_alone=0.0,
        slowdown=0.0,
        reroot_node=0.0,  # of trees that are kept
        child=draft.child,
        kv_tokens=priced.kv_tokens,
        plain_kv_tokens=priced.plain_kv_tokens,
    )


def what_if_fit(
    device: str, gpus: int, target: str, draft: str, *, acceptance: float | None = None
) -> Fit:
    """The roofline fit of so many GPUs and a pair of models.

    Args:
        device: As in data/devices.json, or a file with such an entry.
        gpus: How many.
        target: Name of a shape or a folder with a config.json, and the weights ("NAME:int4").
        draft: The same.
        acceptance: Chance that the target takes the draft's likeliest token, right after a token
            of the target's own; None for the recordings of the pair that ships with the package.

    Raises:
        InputError: If a name is unknown, a number is out of range, or the models do not fit.
    """
    recorded = Fit.load(DEFAULT_FIT)
    profile, error = recorded.acceptance, OTHER_PAIR_ERROR
    origin = f"recorded for {recorded.target} with {recorded.draft}, not for this pair"
    if acceptance is not None:
        profile, error = dialled_acceptance(recorded.acceptance, acceptance), DIALLED_ERROR
        origin = f"made up: {acceptance:g} of first draft tokens"
    models = parse_model(target), parse_model(draft)
    ours, theirs = (model.shape.vocab for model in models)
    if abs(ours - theirs) > PADDING * ours:
        origin += f"; no engine runs this pair, whose vocabularies are {ours:,} and {theirs:,}"
    return roofline_fit(
        load_device(device),
        gpus,
        *models,
        profile,
        acceptance_error=error,
        acceptance_origin=origin,
    )


def dialled_acceptance(recorded: AcceptanceProfile, rate: float) -> AcceptanceProfile:
    """Made-up recordings in which a share of first draft tokens is taken; hits come in runs.

    Args:
        recorded: How fast the chance of a hit rises in a run, ranks beyond the first, and
            confidences, are as here.
        rate: Chance that the target takes the draft's likeliest token at the start of a round.

    Raises:
        InputError: If the rate is no chance.
    """
    from codesign.importers.run_model import RunModel, template_shape

    if not 0.01 <= rate <= 0.99:
        raise InputError(f"acceptance must lie in [0.01, 0.99], got {rate:g}")
    shape = template_shape(recorded, _SHAPE_DEPTH)
    return RunModel.from_length(1.0 + rate, chain=1, shape=shape).recordings(recorded, seed=0)


def kept_fit(fit: Fit, name: str) -> tuple[Fit, Path]:
    """Keep a fit in the cache, so that a plan can name its file; the same fit keeps its file."""
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", name)
    if len(stem) > _MAX_STEM:  # folders of models may be deep
        stem = f"{stem[:_MAX_STEM]}-{hashlib.sha256(stem.encode()).hexdigest()[:12]}"
    file = cache_dir() / "rooflines" / f"{stem}.json"
    kept = _same(file, fit)
    if kept is None:
        with alone(file.parent):  # a fit is two files: those of two processes must not mix
            kept = _same(file, fit)
            if kept is None:
                fit.save(file)
    return kept or fit, file


def _same(file: Path, fit: Fit) -> Fit | None:
    """What a file holds, if it is this fit."""
    try:
        kept = Fit.load(file)
    except InputError:
        return None  # not there yet, or of another version
    is_same = all(
        getattr(kept, name) == getattr(fit, name)
        for name in ("costs", "errors", "parts_covariance")
    )
    return kept if is_same else None
