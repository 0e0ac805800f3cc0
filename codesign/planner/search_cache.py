"""Finished simulations of a search, kept beside the plan, so that the next one can begin with them.

One JSON object a line. A line belongs to a key: a hash of everything that the simulation depended
on. A simulation that no target steers is kept for any SLO.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path

from codesign.artifacts import replacing
from codesign.errors import InputError
from codesign.planner.executor import Job, Task, requests_of
from codesign.planner.predict import Outcome
from codesign.planner.slo_figures import is_steered, outcome_for

Place = tuple[str, int, int, float]  # candidate, seed, requests of the trace, factor on their rate
MOST_BYTES = 64 << 20  # of a file; above that a search drops lines that it cannot use


@cache
def _of_this_code() -> bytes:
    """A hash of the package's sources: others may simulate otherwise."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.digest()


@dataclass(frozen=True, eq=False)
class SearchKey:
    """What the simulations of a search depend on, as hashes.

    Attributes:
        task: What they share.
        fit_sha256: Checksum of the fit.
    """

    task: Task
    fit_sha256: str

    @cached_property
    def of_any_slo(self) -> str:
        """Of those that no target steers."""
        digest = hashlib.sha256(_of_this_code())
        requests = self.task.requests
        for column in sorted(requests):
            digest.update("\0".join((column, *map(str, requests[column]))).encode())
        digest.update(json.dumps([self.fit_sha256, asdict(self.task.serving)]).encode())
        return digest.hexdigest()

    @cached_property
    def of_this_slo(self) -> str:
        """Of the others."""
        slo = json.dumps(asdict(self.task.slo))
        return hashlib.sha256(f"{self.of_any_slo} {slo}".encode()).hexdigest()

    def of(self, job: Job, outcome: Outcome) -> str:
        """Of one simulation."""
        depends = is_steered(job.candidate, self.task.serving) or not outcome.times
        return self.of_this_slo if depends else self.of_any_slo

    def judged(self, job: Job, outcome: Outcome) -> Outcome:
        """An outcome as the targets asked for see it."""
        requests = requests_of(self.task, job)
        return outcome_for(outcome, requests, job.candidate, self.task.fit, self.task.slo)


class SearchCache:
    """Outcomes by candidate, seed, stretch of the trace and rate, in memory or in a file.

    The file is a help for the next search: this one goes on without it from the moment that it
    takes nothing more, for example because the disk is full.

    Args:
        key: Lines of the file with another one are ignored; None for memory alone.
        path: File to append to, with a key; None for memory alone.
        resume: Read what earlier searches left in the file; otherwise it starts empty.
        warn: Told in one line, once, if the file takes nothing more.

    Raises:
        InputError: If the file cannot be read, or not be written at the start.
    """

    def __init__(
        self,
        key: SearchKey | None = None,
        path: Path | None = None,
        *,
        resume: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._key = key
        self._path = path
        self._warn = warn
        self._is_full = False
        self._outcomes: dict[Place, Outcome] = {}
        self._lost: set[Place] = set()  # here, but not in the file that they were meant for
        self._of_any_slo: set[Place] = set()
        self._unjudged: set[Place] = set()  # perhaps made for another SLO
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
            where = path if path.is_dir() else f"into {path.parent}"
            raise InputError(
                f"cannot write {where}: {err.strerror}. Name another: --out FILE"
            ) from err

    def __len__(self) -> int:
        """Outcomes kept: in the file, or in memory where there is none."""
        return len(self._outcomes) - len(self._lost)

    @property
    def num_of_any_slo(self) -> int:
        """Of these, those that no target steers."""
        return len(self._of_any_slo - self._lost)

    @property
    def num_lost(self) -> int:
        """Outcomes that the file no longer took."""
        return len(self._lost)

    def get(self, job: Job) -> Outcome | None:
        """What a simulation gave, if it was made; a search has one stretch of each length."""
        place = job.candidate.label, job.seed, job.num_requests, job.rate
        outcome = self._outcomes.get(place)
        if outcome is not None and self._key is not None and place in self._unjudged:
            self._unjudged.remove(place)
            outcome = self._outcomes[place] = self._key.judged(job, outcome)
        return outcome

    def put(self, job: Job, outcome: Outcome) -> None:
        """Keep an outcome: in the file first, so that none is counted that is not there."""
        key = "" if self._key is None else self._key.of(job, outcome)
        is_kept = True
        if self._path is not None:
            line = json.dumps({"key": key, "rate": job.rate, **asdict(outcome)})
            is_kept = self._append(self._path, line + "\n")
        place = self._keep(outcome, job.rate, key)
        if not is_kept:
            self._lost.add(place)

    def _append(self, path: Path, text: str) -> bool:
        """Whether the file took a text; after the first that it did not, none is tried."""
        if self._is_full:
            return False
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as err:
            self._is_full = True
            if self._warn is not None:
                why = f"cannot write {path}: {err.strerror}"
                self._warn(f"{why}; the search goes on and keeps no more simulations")
        return not self._is_full

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if self._take(line)]
        if text and not text.endswith("\n"):
            self._append(path, "\n")  # so that the next line does not go on the cut one
        if len(text) > MOST_BYTES:
            with suppress(InputError), replacing(path) as draft:  # if it cannot, it stays as it is
                draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _take(self, line: str) -> bool:
        """Keep what a line of the file has, if it holds for this search."""
        try:
            values = json.loads(line)
            key, rate = values.pop("key"), float(values.pop("rate"))
            outcome = Outcome(**values | {"times": tuple(map(tuple, values["times"]))})
            if any(len(times) != outcome.num_requests for times in outcome.times):
                raise ValueError("a time for each request")
        except (ValueError, KeyError, TypeError, AttributeError):
            return False  # the line that an interruption cut off
        if self._key is None or key not in (self._key.of_any_slo, self._key.of_this_slo):
            return False
        place = self._keep(outcome, rate, key)
        if key == self._key.of_any_slo:
            self._unjudged.add(place)
        return True

    def _keep(self, outcome: Outcome, rate: float, key: str) -> Place:
        place = outcome.label, outcome.seed, outcome.num_requests, rate
        self._outcomes[place] = outcome
        if self._key is not None and key == self._key.of_any_slo:
            self._of_any_slo.add(place)
        return place
