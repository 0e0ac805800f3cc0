"""The folder that a profile is written to, and the parts of one that is not complete yet.

A part is a table that is written when it is measured. ``finish`` turns all parts into the files
that codesign.fit reads. Must not import torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from codesign.artifacts import header, read_json, read_table, to_json, write_json, write_table
from codesign.artifacts.machine import machine_name
from codesign.errors import InputError
from codesign.fit import ACCEPTANCE_FILE, PROFILE_FILE, STEP_COLUMNS, STEPS_FILE
from codesign.fit.drift import VISIT
from codesign.fit.round_costs import COUNTED
from codesign.policy.walk import Sampling

ACCEPTANCE_PART = "acceptance"
Tick = Callable[[float], None]  # takes the share of the work that is done
Device = Literal["cpu", "cuda", "cpu-ranks"]
_PARTS = "parts"
_CONTEXTS = "mixed"  # of steps of several requests; parts of before say nothing of them


def unseen(share: float) -> None:
    """A tick that shows no progress."""


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What to measure.

    Attributes:
        target: Name or directory of the target.
        draft: Name or directory of the draft, or "ngram".
        workers: CPU threads to use in all.
        sampling: How the target samples; its seed also orders the measurements.
        is_quick: Fewer shapes and repetitions.
        device: "cpu" for threads, "cuda" for a GPU a worker, "cpu-ranks" for the same processes
            on the CPU.
        deployments: Labels of the splits to measure; all of ``workers`` if there are none.
    """

    target: str
    draft: str
    workers: int
    sampling: Sampling = field(default_factory=Sampling)
    is_quick: bool = False
    device: Device = "cpu"
    deployments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the profile that is kept once it is done; ``seconds`` is a guess."""

    name: str
    seconds: float
    measure: Callable[[Tick], pd.DataFrame]


def in_turns(steps: Sequence[Part], between: Sequence[Part], visits: int) -> list[Part]:
    """Visit all deployments one after another, some times over; all else follows the first visit.

    A host has slow phases of minutes: each deployment is to meet the beginning and the end of the
    profile, or those that are timed in one phase seem better than the others.

    Args:
        steps: Of all deployments, with what one visit is to take.
        between: Done once. It takes long, which keeps visits apart.
        visits: How many.
    """
    turns = [[_visit(part, number) for part in steps] for number in range(1, visits + 1)]
    return [*turns[0], *between, *[part for turn in turns[1:] for part in turn]]


def _visit(part: Part, number: int) -> Part:
    """The part in one of the visits, which its name and its rows say."""

    def measure(tick: Tick) -> pd.DataFrame:
        return part.measure(tick).assign(**{VISIT: number})

    return replace(part, name=f"{part.name}.{number}", measure=measure)


def _measured(headers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which parts come from which machine and day, by the headers of the parts and their visits."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, meta in headers.items():
        device = meta["settings"]["device"]
        when = machine_name(meta["hardware"], device), meta["created"][:10]
        found.setdefault(when, []).append(name.partition(".")[0])
    return [
        {"machine": machine, "day": day, "parts": list(dict.fromkeys(parts))}
        for (machine, day), parts in found.items()
    ]


def measured_note(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return a line if a profile is of several machines or days; "" if it is of one."""
    if len(measured) < 2:
        return ""
    each = [f"{', '.join(of['parts'])} on {of['machine']}, {of['day']}" for of in measured]
    timed = {of["machine"] for of in measured if of["parts"] != [ACCEPTANCE_PART]}
    warning = ". These are step times of different machines: a fit should be of one"
    return f"measured in parts: {'; '.join(each)}{warning if len(timed) > 1 else ''}"


class PartStore:
    """Finished parts on disk, and the profile that they become."""

    def __init__(self, out: Path, settings: ProfileSettings) -> None:
        self._out = out
        self._settings: dict[str, Any] = json.loads(to_json(asdict(settings)))  # as it is read

    def finished(self) -> dict[str, Any] | None:
        """The profile, if it is complete and has these settings."""
        if not (self._out / PROFILE_FILE).exists():
            return None
        about = read_json(self._out / PROFILE_FILE, kind="profile")
        self._check(about)
        return about

    def open(self, *, resume: bool) -> None:
        """Drop what is there, or check that it can be continued.

        Raises:
            InputError: If the folder is a file, or what is there cannot be replaced or was
                measured with other settings.
        """
        folder = self._out / _PARTS
        try:
            (self._out / PROFILE_FILE).unlink(missing_ok=True)
        except OSError as err:
            raise InputError(
                f"{self._out} cannot hold a profile, which is a folder: {err.strerror}. "
                "Name another: codesign profile --out DIR"
            ) from err
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        for path in sorted(folder.glob("*.parquet")):
            meta = read_table(path, kind="profile")[1]
            self._check(meta)
            if meta.get("contexts") != _CONTEXTS:
                raise InputError(
                    f"{self._out} was begun by an older version, which timed other steps. "
                    "Start over: the same command without --resume"
                )

    def has(self, name: str) -> bool:
        """Whether a part is done."""
        return self._path(name).exists()

    def put(self, name: str, frame: pd.DataFrame) -> None:
        """Keep a part."""
        write_table(self._path(name), frame, self._header())

    def finish(self, names: list[str], notes: list[str]) -> dict[str, Any]:
        """Write the three files of the profile and drop the parts."""
        read = {name: read_table(self._path(name), kind="profile") for name in names}
        frames = {name: frame for name, (frame, _) in read.items()}
        measured = _measured({name: meta for name, (_, meta) in read.items()})
        note = measured_note(measured)
        recorded = frames.pop(ACCEPTANCE_PART)
        steps = pd.concat(list(frames.values()), ignore_index=True)
        more = [column for column in (*COUNTED, VISIT) if column in steps]
        steps = steps.loc[:, [*STEP_COLUMNS, *more]]
        if VISIT in steps:
            steps[VISIT] = steps[VISIT].fillna(1).astype(int)  # what was measured once
        about = {
            **self._header(),
            "target": self._settings["target"],
            "draft": self._settings["draft"],
            "workers": self._settings["workers"],
            "device": self._settings["device"],
            "temperature": self._settings["sampling"]["temperature"],
            "top_k": self._settings["sampling"]["top_k"],
            "top_p": self._settings["sampling"]["top_p"],
            "K": len(recorded["log_probs"].iloc[0]),
            "num_timings": int((steps["seconds"] > 0).sum()),
            "num_tokens": len(recorded),
            "measured": measured,
            "notes": [*notes, note] if note else notes,
        }
        write_table(self._out / STEPS_FILE, steps, about)
        write_table(self._out / ACCEPTANCE_FILE, recorded, about)
        write_json(self._out / PROFILE_FILE, about)
        shutil.rmtree(self._out / _PARTS)
        return about

    def _path(self, name: str) -> Path:
        return self._out / _PARTS / f"{name}.parquet"

    def _header(self) -> dict[str, Any]:
        seed = self._settings["sampling"]["seed"]
        return {**header("profile", seed=seed), "settings": self._settings, "contexts": _CONTEXTS}

    def _check(self, meta: dict[str, Any]) -> None:
        found = meta.get("settings")
        if found != self._settings:
            changed = [k for k, v in self._settings.items() if (found or {}).get(k) != v]
            raise InputError(
                f"{self._out} was measured with another {', '.join(changed)}. "
                "Start over: the same command without --resume"
            )
