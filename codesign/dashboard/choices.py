"""What a visitor chose, as plain values: the traffic, the machine, the policy; and what there is.

Choices are frozen and hashable, so that they are keys of caches and fit into a link. Files are read
again when they have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

from codesign.dashboard.files import upload_folder
from codesign.errors import InputError

if TYPE_CHECKING:
    from codesign.fit import Fit
    from codesign.traces import Trace

SYNTHETIC = "synthetic"
_KEPT_TRACES = 6
_KEPT_FITS = 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace and what is done to it.

    Attributes:
        source: Name of a trace, path of a file, or SYNTHETIC.
        rate_scale: Factor on the arrival rate; of a file.
        max_prompt: Longest prompt in tokens; None for no limit.
        max_output: Likewise of the answer.
        preset: Statistics of a synthetic trace: "steady", "bursty" or "low".
        rate: Requests per second of a synthetic trace.
        cv: Standard deviation over mean of its gaps; None for the preset's.
        prompt_mean: Mean prompt tokens of a synthetic trace; None for the preset's.
        output_mean: Likewise of answers.
        seconds: Length of a synthetic trace.
    """

    source: str
    rate_scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None
    preset: str = "steady"
    rate: float = 5.0
    cv: float | None = None
    prompt_mean: int | None = None
    output_mean: int | None = None
    seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of the machine and the models: a fit, or GPUs by their data sheets.

    Attributes:
        fit: Path of a fit; "" for GPUs by data sheet, which the other fields name.
        device: As ``codesign plan --device``.
        gpus: How many.
        target: As ``--target``, with the weights after a colon.
        draft: As ``--draft``.
        acceptance: As ``--acceptance``; None for the recordings that ship with the package.
    """

    fit: str = ""
    device: str = "h100"
    gpus: int = 8
    target: str = "llama-3.1-70b"
    draft: str = "llama-3.2-1b"
    acceptance: float | None = None


def traces_here() -> list[str]:
    """Names of the traces that need no download: the bundled ones, then those that were fetched."""
    from codesign.traces.catalog import PUBLISHED, TWINS, cached_path

    return [*TWINS, *(known.name for known in PUBLISHED if cached_path(known).is_file())]


def fits_here(folder: Path) -> dict[str, str]:
    """Fits of a folder and its subfolders, then the shipped one: words for a list, by path."""
    from codesign.fit.shipped import DEFAULT_FIT, machine_of

    found = [path for pattern in ("fit.json", "*/fit.json") for path in folder.glob(pattern)]
    named = {str(path): f"{path.relative_to(folder)}" for path in sorted(found)}
    return {**named, str(DEFAULT_FIT): f"shipped: {machine_of(DEFAULT_FIT)}"}


def load_traffic(traffic: Traffic, most: int | None = None) -> Trace:
    """The trace, cut to ``most`` requests, then scaled; in the order of ``codesign plan``.

    Raises:
        InputError: If it is missing, broken, or a number makes no sense.
    """
    if traffic.source == SYNTHETIC:
        return _synthetic(traffic, most)
    return _scaled(traffic, file_time(traffic.source), most)


def length_factors(traffic: Traffic) -> tuple[float, float]:
    """What prompts and answers of a synthetic trace are multiplied by, for the means wanted.

    Raises:
        InputError: If a number makes no sense.
    """
    from codesign.traces import summarise

    if traffic.prompt_mean is None and traffic.output_mean is None:
        return 1.0, 1.0
    about = summarise(_unscaled(traffic.preset, traffic.seconds, traffic.rate, traffic.cv))
    prompt, output = traffic.prompt_mean, traffic.output_mean
    return (
        1.0 if prompt is None else prompt / about.prompt.mean,
        1.0 if output is None else output / about.output.mean,
    )


def load_machine(machine: Machine) -> Fit:
    """The fit, read or worked out from data sheets.

    Raises:
        InputError: If it is missing or broken, or the models do not fit the machine.
    """
    return _machine(machine, file_time(machine.fit))


def splits(machine: Machine, policy: str) -> list[str]:
    """Labels of the ways to divide all of a machine that a policy, by its label, can run on.

    Raises:
        InputError: If there is none, or no such policy.
    """
    from codesign.planner.defaults import all_workers
    from codesign.planner.search_space import search_space
    from codesign.policy.speculation import parse_policy

    fit = load_machine(machine)
    workers = all_workers(fit)
    space = search_space(fit.costs, workers=workers, max_batch=1, policies=(policy,))
    wanted = parse_policy(policy)  # a search always compares plain decoding as well
    labels = [c.deployment.label for c in space.candidates if c.speculation == wanted]
    return list(dict.fromkeys(labels))


def file_time(source: str) -> int:
    """When a file was last written, in nanoseconds; 0 where the name is no file's."""
    try:
        found = Path(source).stat()
    except OSError:
        return 0
    return found.st_mtime_ns if S_ISREG(found.st_mode) else 0  # "" is this folder


@lru_cache(maxsize=2)
def _read(source: str, stamp: int) -> Trace:
    from codesign.traces import load_trace

    try:
        return load_trace(source)
    except InputError as err:
        # Say the name that the visitor gave, not where an upload was put.
        raise InputError(str(err).replace(upload_folder(source), "")) from err


@lru_cache(maxsize=_KEPT_TRACES)
def _scaled(traffic: Traffic, stamp: int, most: int | None) -> Trace:
    trace = _cut(_read(traffic.source, stamp), most).scale_rate(traffic.rate_scale)
    return trace.scale_lengths(max_prompt=traffic.max_prompt, max_output=traffic.max_output)


@lru_cache(maxsize=_KEPT_TRACES)
def _synthetic(traffic: Traffic, most: int | None) -> Trace:
    prompt, output = length_factors(traffic)
    trace = _unscaled(traffic.preset, traffic.seconds, traffic.rate, traffic.cv)
    return _cut(trace, most).scale_lengths(
        prompt=prompt,
        output=output,
        max_prompt=traffic.max_prompt,
        max_output=traffic.max_output,
    )


def _cut(trace: Trace, most: int | None) -> Trace:
    return trace if most is None else trace.head(most)


@lru_cache(maxsize=_KEPT_TRACES)
def _unscaled(preset: str, seconds: float, rate: float, cv: float | None) -> Trace:
    from codesign.traces.synth import synthesise

    return synthesise(preset, duration=seconds, rate=rate, cv=cv)


@lru_cache(maxsize=_KEPT_FITS)
def _machine(machine: Machine, stamp: int) -> Fit:
    from codesign.fit import Fit
    from codesign.fit.what_if import device_fit

    if machine.fit:
        return Fit.load(machine.fit)
    return device_fit(
        machine.device,
        machine.gpus,
        machine.target,
        machine.draft,
        acceptance=machine.acceptance,
    )
