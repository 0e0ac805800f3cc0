"""Fits for hardware and pairs of models from a few words on a command line.

What the package has measurements of is taken from these, more GPUs of such a pair are extrapolated
from them, and everything else is taken from data sheets.

Must not import torch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

from codesign.acceptance import AcceptanceProfile
from codesign.artifacts import alone, cache_dir, sha256
from codesign.config import parse_deployment
from codesign.errors import InputError
from codesign.fit import EXTRAPOLATED, OTHER_PAIR, ROOFLINE, Fit
from codesign.fit.devices import load_device
from codesign.fit.extrapolated import AT_MEDIAN, extent, extrapolated_fit, most_measured
from codesign.fit.measured_pair import covering
from codesign.fit.priced_model import PADDING, parse_model
from codesign.fit.roofline import Forward, roofline_fit
from codesign.fit.shipped import DEFAULT_FIT, shipped_pair

# Tokens per verification of one pair on six datasets are 2.74 to 3.92 (SwiftSpec, Table 6): what a
# pair loses or gains on other prompts, and so at least what another pair may.
OTHER_PAIR_ERROR = 0.18
DIALLED_ERROR = 0.02  # of the model of runs on recordings, whatever the length of a chain
INFLATED = "inflated-"  # models of a large one's shape, made of a small one
_MAX_STEM = 200  # characters of a file's name; file systems take 255 with what is added
_SHAPE_DEPTH = 3  # hits in a row after which the chance of the next one does not rise


def device_fit(
    device: str, gpus: int, target: str, draft: str, *, acceptance: float | None = None
) -> Fit:
    """The fit of so many GPUs and a pair of models: measured if the package has it, else roofline.

    A measured one is of inflated models, whose steps are those of the shapes they have. If it
    tells the times of everything that a roofline would price, or of all GPUs in one group and in
    two, it is taken, and what it cannot tell is no part of the fit. Else the rest is extrapolated
    from it (extrapolated.py). A pair that was never measured is priced by data sheets as a whole.
    Arguments and errors as of ``what_if_fit``.
    """
    priced = what_if_fit(device, gpus, target, draft, acceptance=acceptance)
    sheet, models = load_device(device), (parse_model(target), parse_model(draft))
    path = shipped_pair(sheet.name, priced.target, priced.draft)
    measured = None if path is None else Fit.load(path)
    fit = None if measured is None else covering(measured, priced)
    if fit is None and measured is not None:
        fit = extrapolated_fit(measured, priced, Forward(models[0], sheet, 1), models[1])
    if fit is None:
        return priced
    fit = _with_acceptance(fit, priced, acceptance)
    return replace(fit, target=priced.target, draft=priced.draft, device="cuda")


def _with_acceptance(fit: Fit, priced: Fit, acceptance: float | None) -> Fit:
    """A measured fit with the rate that was asked for, or what its recordings are worth to a pair.

    Inflated models answer as the small ones that they were made of, so what was recorded of them
    may be as far off as that of any other pair, in all parts of an answer.
    """
    if acceptance is not None:
        return replace(
            fit,
            acceptance=dialled_acceptance(fit.acceptance, acceptance),
            errors={**fit.errors, "acceptance": DIALLED_ERROR},
            acceptance_origin=priced.acceptance_origin,
            parts_covariance=(),
        )
    origin = f"{fit.acceptance_origin} for {fit.target} with {fit.draft}"
    if not fit.target.startswith(INFLATED):
        return replace(fit, acceptance_origin=origin)
    error = max(fit.errors["acceptance"], OTHER_PAIR_ERROR)
    return replace(
        fit,
        errors={**fit.errors, "acceptance": error},
        acceptance_origin=f"{origin}, which answer as a small pair does, {OTHER_PAIR} "
        "(--acceptance P: yours)",
        parts_covariance=(),
    )


def measured_note(fit: Fit, device: str) -> str:
    """What the package has measured of a pair that a fit is not of; "" if nothing.

    Args:
        fit: As ``device_fit`` returns.
        device: That it is for, as the command line names it.
    """
    if fit.origin != ROOFLINE:
        return beyond_measured(fit)
    target, draft = (f"{label.partition(':')[0]}:int4" for label in (fit.target, fit.draft))
    if (target, draft) == (fit.target, fit.draft) or shipped_pair(device, target, draft) is None:
        return ""
    return (
        "these step times are from data sheets; measured ones of this pair with int4 weights ship: "
        f"--target {target} --draft {draft}"
    )


def beyond_measured(fit: Fit) -> str:
    """What was measured of a pair, and how far beyond its deployments are told; "" if all were."""
    if fit.origin != EXTRAPOLATED:
        return ""
    most, gpus = most_measured(fit), max(parse_deployment(x).num_workers for x in fit.costs)
    note = f"step times of this pair were {extent(fit)}"
    label = str(gpus)
    if gpus <= most or label not in fit.costs:
        return note
    ours, theirs = (1e3 * fit.costs[str(n)].target(1, 1000.0) for n in (most, gpus))
    return (
        f"{note}: a step of one row takes {ours:.2f} ms on {most}, {theirs:.2f} on {gpus}, up to "
        f"{fit.errors[f'{label}/target'] / AT_MEDIAN:.0%} off as far as smaller groups tell. From "
        f"measurements alone: --gpus {most}"
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
    origin = f"recorded for {recorded.target} with {recorded.draft}, {OTHER_PAIR}"
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


def kept_device_fit(
    fit: Fit, device: str, gpus: int, *, acceptance: float | None = None
) -> tuple[Fit, Path]:
    """Keep a ``device_fit`` in the cache, named by what was asked and where its times are from."""
    # A data sheet that was edited is another one: plans made with it before keep their fit.
    sheet = f"-{sha256(device)[:12]}" if device.endswith(".json") else ""
    dial = "" if acceptance is None else f"-acceptance-{acceptance:g}"
    return kept_fit(fit, f"{gpus}x{device}{sheet}-{fit.target}-{fit.draft}-{fit.origin}{dial}")


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
