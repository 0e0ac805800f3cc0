"""What the campaign tells the process of a session: one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.campaign.schedule import Session
from benchmarks.campaign.units import Size, find_pair, grid


@dataclass(frozen=True, slots=True)
class Task:
    """What a session is told.

    Attributes:
        out: The campaign's folder.
        pair: Name of the pair.
        label: The deployment.
        device: "cuda" or "cpu-ranks".
        deadline: ``monotonic`` at which it ends.
        run_seconds: At most so long for runs.
        size: Of the grid; None for none.
        is_quick: Of the profile.
        recorded: Share of the prompts whose acceptance is recorded.
        seed: Of the requests that are served, and of those that are recorded.
    """

    out: str
    pair: str
    label: str
    device: str
    deadline: float
    run_seconds: float
    size: Mapping[str, Any] | None
    is_quick: bool = True
    recorded: float = 1.0
    seed: int = 0

    @property
    def session(self) -> Session:
        """As units."""
        pair = find_pair(self.pair)
        units = () if self.size is None else tuple(grid(self.label, Size(**self.size)))
        return Session(pair, self.label, units)

    @property
    def folder(self) -> Path:
        """The pair's."""
        return Path(self.out) / self.session.pair.name
