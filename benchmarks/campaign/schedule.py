"""When a campaign measures what. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.campaign.expected_seconds import (
    profile_seconds,
    recording_seconds,
    start_seconds,
    unit_seconds,
)
from benchmarks.campaign.units import FULL, LEADING, PAIRS, Pair, Size, Unit


@dataclass(frozen=True, slots=True)
class Wanted:
    """A deployment of a pair.

    Attributes:
        pair: Which models.
        label: Of the deployment.
        run_seconds: Most seconds for its runs.
        segments: Plans that replay a trace.
        batches: Plans that serve a batch before any others serve anything.
        streams: The same of one stream.
    """

    pair: Pair
    label: str
    run_seconds: float
    segments: int = 0
    batches: int = LEADING
    streams: int = LEADING

    @property
    def share(self) -> float:
        """Of the requests of streams and batches: one for all deployments, as the table is."""
        return 1.0 if self.pair == _SMALL or not self.pair.is_inflated else _SHORT


_LARGE, _LARGER_DRAFT, _SMALL, _QWEN = PAIRS[:4]


# With a large target a stream of all requests takes 7 to 11 s, so that fewer are served.
_SHORT = 0.75

_ON_ONE = (
    Wanted(_LARGE, "1", 52.0, segments=2),
    Wanted(_SMALL, "1", 50.0, segments=2),
    Wanted(_QWEN, "1", 52.0, segments=2),
    Wanted(_LARGER_DRAFT, "1", 48.0, segments=1),
)
# Eight plans of every pair serve one stream and batches, and two or more replay a trace.
_ON_TWO = (
    Wanted(_LARGE, "2", 46.0, segments=2),
    Wanted(_LARGE, "1+1", 52.0, segments=1),
    Wanted(_SMALL, "2", 32.0, segments=2),
    Wanted(_SMALL, "1+1", 22.0, segments=1),
    Wanted(_QWEN, "2", 44.0, segments=1),
    Wanted(_QWEN, "1+1", 62.0, segments=1),
    Wanted(_LARGER_DRAFT, "2", 38.0, segments=1),
    Wanted(_LARGER_DRAFT, "1+1", 53.0, segments=1),
)
_ON_FOUR = tuple(Wanted(_LARGE, label, 20.0) for label in ("4", "2+2", "3+1"))
_REST = (
    *(Wanted(_LARGE, label, 15.0) for label in ("2+1", "3", "1+2", "1")),
    Wanted(_SMALL, "1", 10.0),
    *(Wanted(_LARGER_DRAFT, label, 20.0) for label in ("4", "3+1", "2+2")),
    *(Wanted(_QWEN, label, 20.0) for label in ("4", "3+1", "2+2")),
)
# By GPUs of the machine, the most telling first; --dry-run says about how long each takes.
SCHEDULES = {1: _ON_ONE, 2: _ON_TWO, 4: (*_ON_TWO[:2], *_ON_FOUR, *_ON_TWO[2:], *_REST)}
BLIND = "blind"  # folder of the fits that runs are predicted from, below their pair's
SESSIONS = "sessions.jsonl"  # a line for each, below its pair's folder
MOST_SHARE, LEAST_SHARE = 2.0, 0.5  # of the seconds wanted for runs
SLOWER = 1.1  # times a guess: what all but runs takes where the host is slow


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that is measured on one start of a deployment's ranks.

    Attributes:
        pair: Which models.
        label: Of the deployment.
        units: Runs, in order.
        run_seconds: Most seconds for them.
        size: Of the grid that they are.
    """

    pair: Pair
    label: str
    units: tuple[Unit, ...]
    run_seconds: float = inf
    size: Size = FULL

    def left(self, folder: Path) -> list[Unit]:
        """Runs that are not there yet, below the pair's folder."""
        return [u for u in self.units if not (folder / "runs" / u.folder / "run.json").exists()]

    def lacks_visit(self, folder: Path) -> bool:
        """Whether a start measures its deployment before it serves, below the pair's folder.

        The first does, and one that is to serve the first run behind a profile of an earlier start.
        """
        if not is_profiled(folder, self.label):
            return True
        is_blind = (folder / BLIND / f"{self.label}.json").exists()
        return bool(self.left(folder)) and not is_blind and not self._is_spent(folder)

    def phases(self, folder: Path, share: float = 1.0) -> dict[str, float]:
        """About how long each part takes that is not there yet; empty if all is.

        Args:
            folder: The pair's.
            share: Of its seconds for runs, which they may have.
        """
        phases: dict[str, float] = {}
        if self.lacks_visit(folder):
            phases["profile"] = profile_seconds(self.pair, self.label)
        if "+" not in self.label and not is_profiled(folder, "acceptance"):
            phases["acceptance"] = recording_seconds(self.pair, self.label)
        if self.left(folder) and not self._is_spent(folder):
            guess = sum(unit_seconds(u, self.pair) for u in self.left(folder))
            phases["runs"] = min(guess, share * self.run_seconds)
        return {"start": start_seconds(self.pair, self.label), **phases} if phases else {}

    def _is_spent(self, folder: Path) -> bool:
        """Whether its runs have had their seconds: a schedule goes on to the next session."""
        return self.run_seconds < inf and (folder / f"{self.label}.spent").exists()

    def seconds(self, folder: Path) -> float:
        """About how long it takes."""
        return sum(self.phases(folder).values())

    def least_seconds(self, folder: Path) -> float:
        """Without which it is not worth a start: all but runs, and the first of these."""
        phases = self.phases(folder)
        return sum(phases.values()) - phases.get("runs", 0.0) + min(phases.get("runs", 0.0), 8.0)


def phase_file(folder: Path, label: str) -> Path:
    """What a session is at, below its pair's folder; gone once the session has noted its end."""
    return folder / f"{label}.phase.json"


def note_session(folder: Path, label: str, line: Mapping[str, Any]) -> None:
    """Add a session's line to its pair's folder; it is at nothing any more."""
    with (folder / SESSIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    phase_file(folder, label).unlink()


def scheduled(gpus: int, most: float = inf) -> list[Wanted]:
    """The schedule of a machine, or of the next smaller one.

    Args:
        gpus: Of the machine.
        most: Seconds for runs of any session.
    """
    known = max((number for number in SCHEDULES if number <= gpus), default=min(SCHEDULES))
    return [replace(w, run_seconds=min(w.run_seconds, most)) for w in SCHEDULES[known]]


def is_profiled(folder: Path, label: str) -> bool:
    """Whether a part of a pair's profile is there."""
    profile = folder / "profile"
    return (profile / "profile.json").exists() or (profile / "parts" / f"{label}.parquet").exists()


def run_share(phases: Sequence[dict[str, float]], left: float) -> float:
    """What share of its seconds for runs each of these sessions may have, if all are to come.

    The last one may have what is left: it ends with the call.

    Args:
        phases: Of the sessions that are left, from ``Session.phases``.
        left: Seconds for all of them.
    """
    if len(phases) == 1:
        return MOST_SHARE
    wanted = sum(each.get("runs", 0.0) for each in phases)
    fixed = SLOWER * (sum(sum(each.values()) for each in phases) - wanted)
    return min(max((left - fixed) / wanted, LEAST_SHARE), MOST_SHARE) if wanted else 1.0


def by_calls(seconds: Sequence[float], call: float) -> list[int]:
    """The call, from 1, in which each session runs, none cut in two."""
    calls, number, used = [], 1, 0.0
    for needed in seconds:
        if used and used + needed > call:
            number, used = number + 1, 0.0
        used += needed
        calls.append(number)
    return calls
