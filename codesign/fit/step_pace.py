"""Whether a run's steps took what its fit says, and what to do where they did not.

A fit is of one machine. On another one every prediction is off by what its steps take there, which
no interval counts. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codesign.artifacts.machine import hardware, machine_name
from codesign.config import Deployment
from codesign.fit import EXTRAPOLATED, ROOFLINE, Fit
from codesign.fit.profile_command import is_of_memory, profile_command
from codesign.fit.shipped import FITS, machines_of
from codesign.policy.ahead import asked
from codesign.policy.cost import RoundCost, StepTime
from codesign.records import RoundLog

TOLERANCE = 0.15  # as codesign validate's
_USUAL_ROWS = 8  # as codesign run's --padded-rows


@dataclass(frozen=True, slots=True)
class Served:
    """What a run was of, as run.json says.

    Attributes:
        target: Name or directory of the target.
        draft: The same of the draft; "" for none.
        device: As ``codesign run --device`` takes it.
        machine: The GPU or CPU that served.
    """

    target: str
    draft: str
    device: str
    machine: str

    @classmethod
    def here(cls, target: str, draft: str, device: str) -> Served:
        """A run on this machine."""
        return cls(target, draft, device, machine_name(hardware(), device))

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> Served:
        """The run that a run.json is of."""
        device = summary.get("settings", {}).get("device", "cpu")
        machine = machine_name(summary["hardware"], device)
        return cls(summary.get("target", ""), summary.get("draft", ""), device, machine)


def step_pace(cost: RoundCost, rounds: RoundLog, *, is_apart: bool) -> float | None:
    """Seconds of the target's steps over what the fit says for their rows, requests and context.

    Rounds with prompts are left out. What a draft may cost that runs beside the target on the same
    cores is taken for granted.

    Args:
        cost: Of one replica's deployment.
        rounds: As they were measured.
        is_apart: The draft has workers of its own.

    Returns:
        Above 1 for steps that took longer; None where no round has decoded alone.
    """
    names = ("prefill_tokens", "batch", "target")
    prompts, batch, target = (rounds.column(name) for name in names)
    quiet = (prompts == 0) & (batch > 0)
    measured = float(target[quiet].sum())
    shapes = (rounds.column(name) for name in ("rows", "context", "batch", "running"))
    alone = float(step_seconds(cost.target, *shapes)[quiet].sum())
    if not measured or not alone:
        return None
    beside = alone / (1.0 - cost.slowdown) if is_apart else alone
    return measured / min(max(measured, alone), beside)


def step_seconds(
    step: StepTime, rows: ArrayLike, context: ArrayLike, batch: ArrayLike, running: ArrayLike
) -> NDArray[np.float64]:
    """(rounds,) seconds of the target's steps by a fit, from columns of rounds.

    Where fewer take part than run, they take turns, and the step waited for the host.
    """
    everyone, some = (one.of_arrays(rows, context, batch) for one in (step, asked(step)))
    return np.where(np.less(batch, running), some, everyone)


def pace_of_run(
    cost: RoundCost | None, rounds: RoundLog, settings: Mapping[str, Any], *, is_apart: bool
) -> float | None:
    """``step_pace`` of a run with these settings; None too where the fit does not price it."""
    if cost is None or not has_usual_rows(settings):
        return None
    return step_pace(cost, rounds, is_apart=is_apart)


def has_usual_rows(settings: Mapping[str, Any]) -> bool:
    """Whether a run's forwards had the rows that fits price: no ``--padded-rows`` was set."""
    return settings.get("padded_rows", _USUAL_ROWS) == _USUAL_ROWS


def is_another_pace(pace: float | None, tolerance: float) -> bool:
    """Whether a fit is off by more than ``tolerance`` of what was measured."""
    return pace is not None and abs(1.0 / pace - 1.0) > tolerance


def other_machine_note(fit: Fit, fit_file: Path, served: Served) -> str:
    """A line if a fit was measured on a GPU or CPU of another name than a run's; else empty."""
    machines = machines_of(fit_file)
    if fit.origin == ROOFLINE or served.machine in machines:
        return ""
    return (
        f"the plan's step times were measured on {' and '.join(machines)}, this is "
        f"{served.machine}. {_remedy(fit, served)}"
    )


def step_pace_note(
    paces: Sequence[tuple[Deployment, float | None]],
    fit: Fit,
    fit_file: Path,
    served: Served,
    *,
    tolerance: float = TOLERANCE,
) -> str:
    """One line that ends with the command to type, if steps took other times than the fit says.

    Args:
        paces: Of each run, what it was on, and its pace, see ``step_pace``.
        fit: What the runs were predicted with.
        fit_file: Its file, for the machine that it is of.
        served: The first of the runs.
        tolerance: Largest error of the fit, relative to the measurement.

    Returns:
        Empty if all were within the tolerance.
    """
    found = [(where, pace) for where, pace in paces if pace is not None]
    found = [(where, pace) for where, pace in found if is_another_pace(pace, tolerance)]
    if not found:
        return ""
    deployments, off = zip(*found, strict=True)
    low, high = f"{min(off):.2g}", f"{max(off):.2g}"
    times = low if low == high else f"{low} to {high}"
    return (
        f"steps of the target took {times} times what the fit says, {_source(fit, fit_file)}; the "
        f"run was on {served.machine}{_doubt(fit, fit_file, served)}{_untimed(fit, deployments)}. "
        f"{_remedy(fit, served)}"
    )


def _source(fit: Fit, fit_file: Path) -> str:
    if fit.origin == ROOFLINE:
        return "which is from data sheets"
    whose = "the one that ships, " if FITS in fit_file.resolve().parents else ""
    there = ", or extrapolated from there" if fit.origin == EXTRAPOLATED else ""
    return f"{whose}measured on {' and '.join(machines_of(fit_file))}{there}"


def _doubt(fit: Fit, fit_file: Path, served: Served) -> str:
    if fit.origin == ROOFLINE or served.machine not in machines_of(fit_file):
        return ""
    if served.device == "cpu-ranks" and fit.device != served.device:
        return ", with a process for each worker where the fit is of threads"
    return ", perhaps another of that name, or busy"


def _untimed(fit: Fit, deployments: Sequence[Deployment]) -> str:
    """That the target's steps were extrapolated, which may be why they took other times."""
    sizes = {each.target_workers for each in deployments} - fit.sizes_measured("target")
    if fit.origin != EXTRAPOLATED or not sizes:
        return ""
    on = " and ".join(map(str, sorted(sizes)))
    return f"; steps on {on} GPUs were extrapolated, not measured, and may be off for that"


def _remedy(fit: Fit, served: Served) -> str:
    """What measures the machine and the models of a run."""
    draft, device = served.draft or "ngram", served.device
    profile = profile_command(fit, target=served.target, draft=draft, device=device)
    # Their plans may have been made with --device, beside which there is no --fit.
    place = " in place of --device" if fit.origin == ROOFLINE or is_of_memory(fit) else ""
    return (
        f"Measure this machine, then plan again with --fit fit.json{place}: {profile} && "
        "codesign fit profile --out fit.json"
    )
