"""Finished simulations of a search, kept while it runs so that an interrupted one can go on.

One JSON object a line, beside the plan that is being made. A line belongs to a key: a hash of
everything that the simulation depended on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from codesign import __version__
from codesign.config import SLO, Serving
from codesign.errors import InputError
from codesign.planner.executor import Job
from codesign.planner.predict import Outcome

if TYPE_CHECKING:
    import pandas as pd


def search_key(requests: pd.DataFrame, fit_sha256: str, slo: SLO, serving: Serving) -> str:
    """Hash of what all simulations of a search depend on.

    Args:
        requests: Prepared trace.
        fit_sha256: Checksum of the fit.
        slo: Targets.
        serving: How memory and steps are shared.
    """
    digest = hashlib.sha256(__version__.encode())  # another version may simulate otherwise
    for column in sorted(requests):
        digest.update("\0".join((column, *map(str, requests[column]))).encode())
    digest.update(json.dumps([fit_sha256, asdict(slo), asdict(serving)]).encode())
    return digest.hexdigest()


class SearchCache:
    """Outcomes by candidate, seed and stretch of the trace, in memory and, with a path, in a file.

    Args:
        key: See ``search_key``; lines of the file with another key are ignored.
        path: File to append to; None for memory alone.
        resume: Read what an earlier search left in the file; otherwise it starts empty.

    Raises:
        InputError: If the file cannot be read or written.
    """

    def __init__(self, key: str, path: Path | None = None, *, resume: bool = False) -> None:
        self._key = key
        self._path = path
        self._outcomes: dict[tuple[str, int, int], Outcome] = {}
        if path is None:
            return
        try:
            if resume and path.exists():
                self._read(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("", encoding="utf-8")  # says now if it cannot be written
                path.unlink()  # a search that fails before it has kept anything leaves no file
        except OSError as err:
            raise InputError(
                f"cannot write into {path.parent}: {err.strerror}. Name another: --out FILE"
            ) from err

    def __len__(self) -> int:
        """Outcomes at hand."""
        return len(self._outcomes)

    def get(self, job: Job) -> Outcome | None:
        """What a simulation gave, if it was made; a search has one stretch of each length."""
        if job.rate != 1.0:
            return None
        return self._outcomes.get((job.candidate.label, job.seed, job.num_requests))

    def put(self, job: Job, outcome: Outcome) -> None:
        """Keep an outcome: in the file first, so that none is counted that is not there.

        What was simulated at another rate is not kept.

        Raises:
            InputError: If the file cannot be written.
        """
        if job.rate != 1.0:
            return
        if self._path is not None:
            line = json.dumps({"key": self._key, **asdict(outcome)})
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            except OSError as err:
                raise InputError(f"cannot write {self._path}: {err.strerror}") from err
        self._keep(outcome)

    def remove(self) -> None:
        """Delete the file: the search is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8", errors="replace")
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")  # so that the next line does not go on the cut one
        for line in text.splitlines():
            try:
                values = json.loads(line)
                key = values.pop("key")
                outcome = Outcome(**values)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the line that the interruption cut off
            if key == self._key:
                self._keep(outcome)

    def _keep(self, outcome: Outcome) -> None:
        self._outcomes[outcome.label, outcome.seed, outcome.num_requests] = outcome
