"""The plan file: what to deploy, what it is predicted to do, and what else was considered.

The engine runs the chosen candidate or any alternative by its label; validation simulates the same
requests with the same seeds again. Files that a plan refers to lie beside it or are named relative
to it, with their checksum, so that a folder can be moved. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codesign.artifacts import header, read_json, read_table, sha256, write_json
from codesign.config import SLO, Deployment
from codesign.errors import InputError
from codesign.policy.speculation import SpeculationSpec
from codesign.policy.walk import Sampling

if TYPE_CHECKING:
    import pandas as pd

# From simple to involved: at equal predictions the simpler one is chosen.
FAMILIES = ("plain", "chain", "threshold", "specserve", "tree", "async-tree")


@dataclass(frozen=True, slots=True)
class Interval:
    """A prediction and the range in which the measurement is expected."""

    value: float
    low: float
    high: float

    def contains(self, measured: float) -> bool:
        """Whether a measurement lies in the range."""
        return self.low <= measured <= self.high

    def overlaps(self, other: Interval) -> bool:
        """Whether two predictions cannot be told apart."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve: split of the machine, speculation policy, batch limit."""

    deployment: Deployment
    speculation: SpeculationSpec
    max_batch: int

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise InputError(f"max_batch must be at least 1, got {self.max_batch}")
        is_split = self.deployment.draft_workers > 0
        if is_split != self.speculation.is_async:
            needs = "workers of its own" if self.speculation.is_async else "no workers of its own"
            raise InputError(
                f"the draft of {self.speculation.label} needs {needs}, got deployment "
                f"{self.deployment.label}"
            )

    @property
    def label(self) -> str:
        """Name that is unique within a plan, for example "tree-8x4x2 on 2, batch 4"."""
        return f"{self.speculation.label} on {self.deployment.label}, batch {self.max_batch}"

    @property
    def family(self) -> str:
        """One of FAMILIES."""
        return "async-tree" if self.speculation.is_async else self.speculation.kind

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Sort key, simpler first."""
        spec = self.speculation
        work = spec.max_rows + spec.width * spec.expansions
        return FAMILIES.index(self.family), work, self.max_batch

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a plan file or run.json; the label is for readers."""
        return {"label": self.label, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        """What ``to_dict`` wrote.

        Raises:
            InputError: If a field is missing, unknown or out of range.
        """
        try:
            return cls(
                deployment=Deployment(**values["deployment"]),
                speculation=SpeculationSpec(**values["speculation"]),
                max_batch=values["max_batch"],
            )
        except (KeyError, TypeError) as err:
            raise InputError(f"not a candidate: {err}. Plan again: codesign plan") from err


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate and what the simulator predicts for it.

    Attributes:
        candidate: What was simulated.
        predicted: Figures of ``metrics.Metrics`` by name, and "ttft_slo" and "tpot_slo", the values
            at the SLO's percentile. Seconds, tokens per second, requests per second, shares.
        spans: Mean seconds per round of each span.
        origin: Where the step times come from: "measured", "fitted" or "roofline".
        is_feasible: Whether it meets the SLO.
    """

    candidate: Candidate
    predicted: dict[str, Interval]
    spans: dict[str, float]
    origin: str
    is_feasible: bool

    @property
    def label(self) -> str:
        """Label of the candidate."""
        return self.candidate.label

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "candidate": self.candidate.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScoredCandidate:
        """What ``to_dict`` wrote.

        Raises:
            InputError: If a field is missing or unknown.
        """
        try:
            return cls(
                candidate=Candidate.from_dict(values["candidate"]),
                predicted={name: Interval(**v) for name, v in values["predicted"].items()},
                spans=dict(values["spans"]),
                origin=values["origin"],
                is_feasible=values["is_feasible"],
            )
        except (KeyError, TypeError, AttributeError) as err:
            raise InputError(f"not a scored candidate: {err}. Plan again: codesign plan") from err


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file that a plan depends on, and its checksum when the plan was made."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: str | Path) -> FileRef:
        """Reference to a file as it is now.

        Raises:
            InputError: If it cannot be read.
        """
        return cls(Path(path), sha256(path))

    def check(self) -> Path:
        """Its path, if the file has not changed.

        Raises:
            InputError: If it is gone or has changed since.
        """
        if sha256(self.path) != self.sha256:
            raise InputError(f"{self.path} has changed since the plan was made. Plan again")
        return self.path


@dataclass(frozen=True, slots=True)
class Plan:
    """What to deploy on this machine for this trace.

    Attributes:
        target: Target model, a name or a directory.
        draft: Draft model; "" if the fit has none.
        slo: Targets that the plan was made for.
        objective: "goodput" or "latency".
        sampling: How the target samples; the seed keys its noise.
        max_kv_tokens: KV rows of all running requests together.
        trace: Prepared trace (Parquet): exactly the requests that were simulated.
        num_requests: Rows of it.
        fit: Fit that the step times and acceptance came from.
        seed: First seed of the simulations.
        num_seeds: Simulations of each candidate, with seeds ``seed``, ``seed + 1``, ...
        chosen: The best candidate.
        alternatives: What else was simulated, best first.
        ties: Labels of alternatives that the prediction cannot tell from ``chosen``.
        reason: Why this one: what a round spends its time on, what binds.
        notes: What a reader must know about the trace and the search.
    """

    target: str
    draft: str
    slo: SLO
    objective: str
    sampling: Sampling
    max_kv_tokens: int
    trace: FileRef
    num_requests: int
    fit: FileRef
    seed: int
    num_seeds: int
    chosen: ScoredCandidate
    alternatives: tuple[ScoredCandidate, ...] = ()
    ties: tuple[str, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def scored(self) -> tuple[ScoredCandidate, ...]:
        """The chosen candidate and the alternatives, best first."""
        return (self.chosen, *self.alternatives)

    @property
    def simulation_seeds(self) -> range:
        """Seeds that each candidate was simulated with."""
        return range(self.seed, self.seed + self.num_seeds)

    def find(self, name: str = "") -> ScoredCandidate:
        """The chosen candidate, or the best that a name fits.

        Args:
            name: "" for the chosen one; a whole label ("chain-3 on 2, batch 4"), a policy
                ("chain-3") or a family ("tree", "async-tree").

        Raises:
            InputError: If none fits.
        """
        if not name:
            return self.chosen
        for scored in self.scored:
            candidate = scored.candidate
            if name in (scored.label, candidate.speculation.label, candidate.family):
                return scored
        labels = "; ".join(scored.label for scored in self.scored)
        raise InputError(f"the plan holds no candidate {name!r}; it holds: {labels}")

    def requests(self) -> pd.DataFrame:
        """The requests to serve: arrival, prompt_tokens, output_tokens, category.

        Raises:
            InputError: If the prepared trace is gone or has changed.
        """
        return read_table(self.trace.check(), kind="trace")[0]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; paths in it are relative to its folder.

        Raises:
            InputError: If the path cannot be written, or a file it depends on cannot be read.
        """
        folder = Path(path).parent
        body = {
            "target": self.target,
            "draft": self.draft,
            "slo": asdict(self.slo),
            "objective": self.objective,
            "sampling": asdict(self.sampling),
            "max_kv_tokens": self.max_kv_tokens,
            "trace": _written(self.trace, folder),
            "num_requests": self.num_requests,
            "fit": _written(self.fit, folder),
            "num_seeds": self.num_seeds,
            "chosen": self.chosen.to_dict(),
            "alternatives": [scored.to_dict() for scored in self.alternatives],
            "ties": self.ties,
            "reason": self.reason,
            "notes": self.notes,
        }
        inputs = {"trace": self.trace.path, "fit": self.fit.path}
        write_json(path, {**header("plan", seed=self.seed, inputs=inputs), **body})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a file.

        Raises:
            InputError: If it is missing or not a plan of this schema version.
        """
        values = read_json(path, kind="plan")
        folder = Path(path).parent
        try:
            return cls(
                target=values["target"],
                draft=values["draft"],
                slo=SLO(**values["slo"]),
                objective=values["objective"],
                sampling=Sampling(**values["sampling"]),
                max_kv_tokens=values["max_kv_tokens"],
                trace=_read(values["trace"], folder),
                num_requests=values["num_requests"],
                fit=_read(values["fit"], folder),
                seed=values["seed"],
                num_seeds=values["num_seeds"],
                chosen=ScoredCandidate.from_dict(values["chosen"]),
                alternatives=_scored(values["alternatives"]),
                ties=tuple(values["ties"]),
                reason=values["reason"],
                notes=tuple(values["notes"]),
            )
        except (KeyError, TypeError) as err:
            raise InputError(f"{path} is not a whole plan: {err}. Plan again: codesign plan") from (
                err
            )


def _scored(entries: Iterable[Mapping[str, Any]]) -> tuple[ScoredCandidate, ...]:
    return tuple(ScoredCandidate.from_dict(entry) for entry in entries)


def _written(ref: FileRef, folder: Path) -> dict[str, str]:
    return {"path": os.path.relpath(ref.path, folder), "sha256": ref.sha256}


def _read(values: Mapping[str, str], folder: Path) -> FileRef:
    return FileRef(folder / values["path"], values["sha256"])
